"""An integration whose package is not installed says what to install, when it is imported and not before."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from typing import Any

import pytest

from commlib.errors import MissingDependency


class Nowhere:
    """Finds a package that is not there."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name.partition(".")[0] == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


@pytest.mark.parametrize(
    ("module", "package", "install"),
    [
        ("lightning", "lightning", "pip install 'torch-commlib[lightning]'"),
        ("pytorch_lightning", "pytorch_lightning", "pip install pytorch-lightning"),
        ("transformers", "transformers", "pip install 'transformers[torch]'"),
    ],
)
def test_it_names_what_installs_it(module: str, package: str, install: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == package or n == f"commlib.integrations.{module}"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Nowhere(package), *sys.meta_path])
    with pytest.raises(MissingDependency) as caught:
        importlib.import_module(f"commlib.integrations.{module}")
    assert str(caught.value) == f"commlib.integrations.{module} needs {package!r}: {install}"
