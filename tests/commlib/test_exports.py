"""The public names: sorted, importable, documented; and the examples in docstrings are true."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil

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
