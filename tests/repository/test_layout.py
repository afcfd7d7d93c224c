"""Four folders, one package, and the rule that imports go down its floors (docs/adr/0001-layout.md, 0028-floors.md)."""

from __future__ import annotations

import ast
import collections
import functools
import graphlib
from collections.abc import Mapping
from pathlib import Path

import pytest

import commlib
import commlib.bench
import commlib.compressors
import commlib.transports

CORE = Path(commlib.__file__).parent
PLUG_INS = ("bench", "compressors", "transports")
# In the checkout the folder commlib/ is the core alone; in a wheel the plug-ins lie inside it.
CORE_FILES = sorted(p for p in CORE.rglob("*.py") if p.relative_to(CORE).parts[0] not in PLUG_INS)
PACKAGES = {m.__name__: Path(str(m.__file__)).parent for m in (commlib.bench, commlib.compressors, commlib.transports)}
PLUG_IN_FILES = [(name, root, path) for name, root in PACKAGES.items() for path in sorted(root.rglob("*.py"))]


@functools.cache  # ten tests look at all files
def imported(source: str, package: str) -> tuple[str, ...]:
    """Absolute names that a module of ``package`` imports, ``from x import y`` as x.y."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            stem = ".".join([*base, *filter(None, [node.module])])
            found += (f"{stem}.{alias.name}" for alias in node.names)
    return tuple(found)


def names_a_plug_in(name: str) -> bool:
    parts = name.split(".")
    return parts[0] == "commlib" and len(parts) > 1 and parts[1] in PLUG_INS


@pytest.mark.parametrize("path", CORE_FILES, ids=lambda p: str(p.relative_to(CORE)))
def test_the_core_imports_no_plug_in(path: Path) -> None:
    package = ".".join(["commlib", *path.relative_to(CORE).parent.parts])
    found = [n for n in imported(path.read_text(encoding="utf-8"), package) if names_a_plug_in(n)]
    assert not found, f"{path.name} imports {', '.join(found)}: the core finds plug-ins through entry points"


@pytest.mark.parametrize(
    ("package", "root", "path"), PLUG_IN_FILES, ids=[f"{n}.{p.relative_to(r)}" for n, r, p in PLUG_IN_FILES]
)
def test_the_plug_ins_use_no_bare_folder_name(package: str, root: Path, path: Path) -> None:
    inside = ".".join([package, *path.relative_to(root).parent.parts])
    found = [n for n in imported(path.read_text(encoding="utf-8"), inside) if n.split(".")[0] in PLUG_INS]
    assert not found, f"{path.name} imports {', '.join(found)}, which only the checkout has: put commlib. before it"


@pytest.mark.parametrize(
    ("source", "package"),
    [
        ("import commlib.bench.codec.command", "commlib"),
        ("from commlib import compressors", "commlib"),
        ("from commlib.transports import zeromq", "commlib.exchange"),
        ("from .bench import codec", "commlib"),
        ("from . import bench", "commlib"),
        ("from ..compressors.none import Identity", "commlib.exchange"),
        ("def f():\n    from commlib.compressors.none import Identity", "commlib"),
    ],
)
def test_the_guard_sees_every_way_of_importing(source: str, package: str) -> None:
    assert any(map(names_a_plug_in, imported(source, package)))


@pytest.mark.parametrize(
    "source", ["import commlib.codecs.registry", "from .errors import unknown", "import bench_tools"]
)
def test_the_guard_lets_the_core_import_itself(source: str) -> None:
    assert not any(map(names_a_plug_in, imported(source, "commlib")))


def test_the_test_folder_does_not_shadow_the_package() -> None:
    assert commlib.__file__ is not None
    assert Path(commlib.__file__).name == "__init__.py"


FLOORS = (
    ("errors", "__version__"),
    ("runtime", "groups"),
    ("codecs", "messaging", "telemetry"),
    ("exchange", "server"),
    ("planning", "pipeline"),
    ("checkpoint", "monitoring", "placement"),
    ("ddp",),
    ("fsdp", "zero", "local_sgd"),
    ("_attach",),
    ("",),  # commlib itself: its public names
    ("cli", "integrations", "testing"),
    ("__main__",),
    ("compressors", "transports"),
    ("bench",),
)
"""Packages and modules in ``commlib``, from the ground; what is on a floor imports itself and what is below."""
FLOOR_OF = {name: i for i, names in enumerate(FLOORS) for name in names}


def module_of(root: Path, package: str, path: Path) -> str:
    """The name that a file of the package below ``root`` is imported by."""
    parts = [package, *path.relative_to(root).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(sources: Mapping[str, tuple[bool, str]]) -> dict[str, set[str]]:
    """Modules → those of them that each imports.

    Args:
        sources: module → whether it is a package, and its source.
    """
    graph = {}
    for module, (is_package, source) in sources.items():
        found = set()
        for name in imported(source, module if is_package else module.rpartition(".")[0]):
            while name and name not in sources:  # from x import y: y is a module, or something in x
                name = name.rpartition(".")[0]
            found.add(name)
        graph[module] = found - {"", module}
    return graph


def room(module: str) -> str:
    """The package or module in ``commlib`` that it lies in."""
    return [*module.split("."), ""][1]


def rooms(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The same of packages."""
    found: dict[str, set[str]] = {}
    for module, others in graph.items():
        found.setdefault(room(module), set()).update(room(o) for o in others if room(o) != room(module))
    return found


def goes_up(graph: Mapping[str, set[str]]) -> list[str]:
    """Imports that do not go down."""
    return [
        f"{module} imports {other}"
        for module, others in graph.items()
        for other in sorted(others)
        if room(other) != room(module) and FLOOR_OF[room(other)] >= FLOOR_OF[room(module)]
    ]


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """What imports itself by way of others, those too; empty if there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as e:
        return list(e.args[1])
    return []


def sources() -> dict[str, tuple[bool, str]]:
    files = [("commlib", CORE, path) for path in CORE_FILES] + PLUG_IN_FILES
    return {
        module_of(root, package, path): (path.name == "__init__.py", path.read_text(encoding="utf-8"))
        for package, root, path in files
    }


def test_every_package_has_a_floor_and_no_import_goes_up() -> None:
    graph = import_graph(sources())
    assert {room(module) for module in graph} == set(FLOOR_OF)
    assert goes_up(graph) == []


def test_there_is_no_circle_of_files_or_of_packages() -> None:
    graph = import_graph(sources())
    assert circle(graph) == []
    assert circle(rooms(graph)) == []


@pytest.mark.parametrize(
    "put_in",
    [
        "from commlib.ddp import state",
        "from commlib.ddp.state import HookState",
        "import commlib.bench",
        "from commlib import attach",
        "def f():\n    import commlib.server.shard.shard",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from commlib.planning.plan import Plan",
    ],
)
def test_an_import_that_goes_up_is_seen(put_in: str) -> None:
    having = sources()
    having["commlib.codecs.slots"] = (False, having["commlib.codecs.slots"][1] + "\n" + put_in)
    (line,) = goes_up(import_graph(having))
    assert line.startswith("commlib.codecs.slots imports commlib")


def test_a_circle_is_seen() -> None:
    having = sources()
    having["commlib.codecs.slots"] = (False, having["commlib.codecs.slots"][1] + "\nfrom commlib.codecs import base")
    assert set(circle(import_graph(having))) == {"commlib.codecs.slots", "commlib.codecs.base"}


def test_the_root_is_the_entrance_only() -> None:
    files = sorted(path.name for path in CORE.iterdir() if path.is_file())
    assert files == ["__init__.py", "__main__.py", "__version__.py", "_attach.py", "errors.py", "py.typed"]


def test_no_two_public_classes_have_one_name() -> None:
    homes: dict[str, list[str]] = {}
    for module, (_, source) in sources().items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module)
    # Lightning's own name, for each of the two packages that it comes in.
    assert homes.pop("DDPStrategy") == ["commlib.integrations.lightning", "commlib.integrations.pytorch_lightning"]
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


def test_a_small_file_lives_with_its_only_caller() -> None:
    having = sources()
    callers = collections.Counter(other for others in import_graph(having).values() for other in others)
    small = [m for m, (_, source) in having.items() if len(source.splitlines()) < 60 and callers[m] == 1]
    assert len([m for m in small if not having[m][0]]) <= 10, small
