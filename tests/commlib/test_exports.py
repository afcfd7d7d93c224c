"""The public names: sorted, importable, documented; and the examples in docstrings are true."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pkgutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import commlib
import commlib.bench
import commlib.compressors
import commlib.transports

PACKAGES = (commlib, commlib.bench, commlib.compressors, commlib.transports)  # in the checkout not one tree
FOUND = {m.name for p in PACKAGES for m in pkgutil.walk_packages(p.__path__, f"{p.__name__}.")}
MODULES = sorted(name for name in FOUND if not name.endswith("__main__"))


def test_all_is_sorted_and_without_repeats() -> None:
    # as ruff sorts: initials (BSP), classes, functions
    assert list(commlib.__all__) == sorted(set(commlib.__all__), key=lambda n: (not n.isupper(), not n[0].isupper(), n))


def test_all_is_complete() -> None:
    modules = {name for name in vars(commlib) if inspect.ismodule(getattr(commlib, name))}
    public = {name for name in vars(commlib) if not name.startswith("_")} - modules - {"annotations"}
    assert public - set(commlib.__all__) == set()


@pytest.mark.checkout
def test_every_public_name_is_of_the_core_or_an_extension() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tiers.md").read_text()
    assert [name for name in commlib.__all__ if f"`{name}`" not in page] == []


def test_type_checkers_read_what_is_imported_at_run_time() -> None:
    block = next(n for n in ast.parse(inspect.getsource(commlib)).body if isinstance(n, ast.If))
    read = {a.name: n.module for n in block.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert read == commlib._HOME
    assert set(read) == set(commlib.__all__)


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="module 'commlib' has no attribute 'atach'"):
        _ = commlib.atach  # type: ignore[attr-defined]
    assert not hasattr(commlib, "__wrapped__")


BARE = """
import sys, torch
before = set(sys.modules)
import commlib
print(*sorted(set(sys.modules) - before))
"""


def bare() -> list[str]:
    """What a Python that has PyTorch already loads for ``import commlib``."""
    return subprocess.run([sys.executable, "-c", BARE], capture_output=True, text=True, check=True).stdout.split()


def test_importing_commlib_loads_no_server_pipeline_placement_or_fsdp_and_no_library_of_a_command() -> None:
    loaded = bare()
    ours = [m for m in loaded if m.partition(".")[0] == "commlib"]
    assert len(ours) <= 60, ours
    heavy = {"commlib.server", "commlib.pipeline", "commlib.placement", "commlib.fsdp", "commlib.cli", "commlib.bench"}
    assert [m for m in ours if ".".join(m.split(".")[:2]) in heavy] == []
    assert {"typer", "rich", "numba", "matplotlib", "zmq"} & {m.partition(".")[0] for m in loaded} == set()


@pytest.mark.alone
def test_importing_commlib_takes_little_beside_torch() -> None:
    clocked = "import time; t = time.perf_counter(); import commlib; t -= time.perf_counter()"
    timed = BARE.replace("import commlib", clocked)
    runs = [
        subprocess.run([sys.executable, "-c", timed + "print(-t)"], capture_output=True, text=True, check=True)
        for _ in range(5)
    ]
    assert statistics.median(float(run.stdout.split()[-1]) for run in runs) <= 0.15


@pytest.mark.parametrize("name", getattr(commlib, "__all__", []))
def test_public_name_is_importable_and_documented(name: str) -> None:
    value = getattr(commlib, name)
    if inspect.isclass(value) or callable(value):
        assert (inspect.getdoc(value) or "").strip(), f"commlib.{name} has no docstring"


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ImportError as e:
        if (e.name or "commlib").partition(".")[0] == "commlib":
            raise
        pytest.skip(f"needs {e.name}")
    assert module.__doc__, f"{name} does not say what it is for"
    assert doctest.testmod(module).failed == 0
