"""Which of torch's names the package uses, and which of them the oldest torch that it promises has.

Chains that begin at an imported module (``dist.all_reduce``) are looked up as they are. Of what is asked of objects
(``group.size()``) only the attribute is known: it must be no name that a class of torch has got since.

    python tests/support/torch_names.py    # under the oldest torch: writes tests/repository/torch_2.7.txt anew
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests" / "repository" / "torch_2.7.txt"
FOLDERS = ("commlib", "compressors", "transports", "bench")
CLASSES = (
    "torch.Tensor",
    "torch.amp.GradScaler",
    "torch.cuda.Event",
    "torch.cuda.Stream",
    "torch.distributed.GradBucket",
    "torch.distributed.ProcessGroup",
    "torch.distributed.Store",
    "torch.distributed.Work",
    "torch.futures.Future",
    "torch.nn.Module",
    "torch.nn.parallel.DistributedDataParallel",
    "torch.optim.Optimizer",
)
"""Of whose objects the package asks something."""


def sources() -> list[Path]:
    """Modules of the package."""
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def chains(tree: ast.Module) -> set[str]:
    """Dotted names under ``torch`` that a module uses, whatever it calls what it has imported."""
    known: dict[str, str] = {}
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                known[alias.asname or top] = alias.name if alias.asname else top
                found.add(alias.name)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                found.add(f"{node.module}.{alias.name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (chain := _chain(node)) and chain[0] in known:
            found.add(".".join([known[chain[0]], *chain[1:]]))
    return {name for name in found if name.partition(".")[0] == "torch"}


def _chain(node: ast.expr) -> list[str] | None:
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (before := _chain(node.value)):
        return [*before, node.attr]
    return None


def attributes(tree: ast.Module) -> set[str]:
    """What a module asks of any object but ``self``."""
    asked = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return {a.attr for a in asked if not (isinstance(a.value, ast.Name) and a.value.id == "self")}


def homes(name: str) -> Iterator[tuple[str, str]]:
    """(module or class, a name in it) for each step of a dotted name, as far as they are modules and classes."""
    here: Any = importlib.import_module("torch")
    parts = name.split(".")
    for i, part in enumerate(parts[1:], start=1):
        if not (inspect.ismodule(here) or inspect.isclass(here)):
            return  # an object: what may be asked of it, its class knows
        if not part.startswith("__"):
            yield ".".join(parts[:i]), part
        if not hasattr(here, part) and inspect.ismodule(here):
            try:
                importlib.import_module(".".join(parts[: i + 1]))
            except ImportError:
                return
        if not hasattr(here, part):
            return
        here = getattr(here, part)


def names_in(home: str) -> list[str]:
    """What a module or class of torch has, its submodules included once they are imported."""
    parts = home.split(".")
    for i in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:i]))
        except ImportError:
            continue
        for part in parts[i:]:
            found = getattr(found, part)
        inside = {
            *dir(found),
            *dir(type(found)),
        }  # group.WORLD is its metaclass's, cudnn.deterministic its module's class's
        return sorted(n for n in inside if not n.startswith("__"))
    raise ImportError(home)


def recorded() -> dict[str, set[str]]:
    """Module or class → its names in the oldest torch."""
    lines = RECORD.read_text().splitlines()
    return {home: set(names.split()) for home, _, names in (line.partition(": ") for line in lines)}


def main() -> None:
    """Write the record, from the torch that is installed."""
    steps = {step for path in sources() for name in chains(ast.parse(path.read_text())) for step in homes(name)}
    wanted = sorted({home for home, _ in steps} | set(CLASSES))
    RECORD.write_text("".join(f"{home}: {' '.join(names_in(home))}\n" for home in wanted))


if __name__ == "__main__":
    main()
