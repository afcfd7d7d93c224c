"""Nothing in the package makes objects of bytes that come from elsewhere (docs/security.md)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("commlib", "compressors", "transports")

OBJECTS = {
    "send_object_list", "recv_object_list", "broadcast_object_list", "scatter_object_list", "gather_object",
    "all_gather_object",
}  # fmt: skip
"""Calls of torch.distributed that unpickle what other ranks send."""

LOADS = {"pickle", "marshal", "dill", "cloudpickle", "shelve", "jsonpickle"}
"""Modules whose ``load`` and ``loads`` make objects."""


def ways_in(text: str) -> Iterator[str]:
    """Calls in a file that may run code which is in what they read."""
    for call in (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call)):
        name = ast.unparse(call.func)
        module, _, last = name.rpartition(".")
        safe = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in call.keywords)
        loads = last in ("load", "loads", "Unpickler", "open") and module in LOADS
        if loads or last in OBJECTS or name in ("eval", "exec"):
            yield name
        elif name == "torch.load" and not safe:
            yield f"{name} without weights_only=True"
        elif last == "load" and module in ("np", "numpy") and any(k.arg == "allow_pickle" for k in call.keywords):
            yield f"{name} with allow_pickle"
        elif last == "recv" and "Connection" in module:
            yield name


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_file_makes_objects_of_bytes(folder: str) -> None:
    found = {
        str(p.relative_to(ROOT)): names for p in (ROOT / folder).rglob("*.py") if (names := [*ways_in(p.read_text())])
    }
    assert found == {}


@pytest.mark.parametrize(
    "text",
    [
        "dist.recv_object_list(x, 0)",
        "torch.distributed.all_gather_object(a, b)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "pickle.loads(store.get('a'))",
        "np.load(p, allow_pickle=True)",
        "eval(text)",
    ],
)
def test_each_way_in_is_seen(text: str) -> None:
    assert [*ways_in(text)] != []
