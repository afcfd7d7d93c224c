"""Four folders, one package, and the rule that imports point inward (docs/adr/0001-layout.md)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
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


def imported(source: str, package: str) -> Iterator[str]:
    """Absolute names that a module of ``package`` imports, ``from x import y`` as x.y."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            stem = ".".join([*base, *filter(None, [node.module])])
            yield from (f"{stem}.{alias.name}" for alias in node.names)


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
