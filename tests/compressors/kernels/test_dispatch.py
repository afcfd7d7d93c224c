"""Which implementation runs."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import logging
import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from commlib.compressors.kernels import dispatch
from commlib.errors import MissingDependency


def too_old() -> bool:
    """Whether the Triton that there is, as that of torch 2.7, is refused; one that is missing is no excuse here."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return tuple(map(int, importlib.metadata.version("triton").split(".")[:2])) < (3, 6)
    return False


needs_triton = pytest.mark.skipif(too_old(), reason="needs Triton 3.6 or newer")


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    dispatch.implementation.cache_clear()
    yield
    dispatch.implementation.cache_clear()


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == package else found(name, *a))


@needs_triton
def test_the_fastest_for_the_device_that_is_installed() -> None:
    assert dispatch.kernels(torch.zeros(1)).name == "numba"
    assert dispatch.implementation("meta").name == "reference"
    assert dispatch.implementation("cuda").name == "triton"


def test_without_numba_the_reference_runs_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without(monkeypatch, "numba")
    with caplog.at_level(logging.WARNING, "commlib"):
        assert [dispatch.kernels(torch.zeros(1)).name for _ in range(3)] == ["reference"] * 3
    assert [r.getMessage() for r in caplog.records] == [
        "codecs run slowly on cpu tensors: pip install 'torch-commlib[numba]'"
    ]


def test_without_triton_cuda_tensors_have_the_reference(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without(monkeypatch, "triton")
    with caplog.at_level(logging.WARNING, "commlib"):
        assert dispatch.implementation("cuda").name == "reference"
    assert caplog.messages == ["codecs run slowly on cuda tensors: pip install 'torch-commlib[triton]'"]


def test_one_that_cannot_be_imported_is_not_there_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(name: str) -> None:
        raise ImportError("Triton 2.0 is too old")

    monkeypatch.setattr(importlib, "import_module", broken)
    with caplog.at_level(logging.WARNING, "commlib"):
        assert dispatch.implementation("cuda").name == "reference"
    assert "on cuda tensors (Triton 2.0 is too old): pip install" in caplog.text
    with pytest.raises(MissingDependency, match=r"needs triton \(Triton 2.0 is too old\): pip install"):
        dispatch.implementation("cuda", "triton")


@needs_triton
def test_the_environment_forces_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.VARIABLE, "reference")
    assert dispatch.kernels(torch.zeros(1)).name == "reference"
    monkeypatch.setenv(dispatch.VARIABLE, "numba")
    assert dispatch.kernels(torch.zeros(1)).name == "numba"
    assert dispatch.implementation("cuda", "numba").name == "reference"
    assert dispatch.implementation("cuda", "triton").name == "triton"
    assert dispatch.implementation("meta", "triton").name == "reference"


FORCED = """
import torch
from commlib.codecs.registry import make
codec, x, y = make("onebit:ef=off"), torch.tensor([-1.0, 2.0, 4.0]), torch.empty(3)
payload = torch.zeros(9, dtype=torch.uint8)
codec.compress(x, payload)
codec.decompress(payload, y)
print(codec.kernels(x), y.tolist())
"""


@pytest.mark.full
@needs_triton
@pytest.mark.parametrize("interpret", ["0", "1"])
def test_triton_is_for_cpu_tensors_if_it_interprets(interpret: str) -> None:
    env = {**os.environ, dispatch.VARIABLE: "triton", "TRITON_INTERPRET": interpret}
    done = subprocess.run([sys.executable, "-c", FORCED], env=env, capture_output=True, text=True, check=False)
    if interpret == "1":
        assert done.stdout == "triton [-1.0, 3.0, 3.0]\n", done.stderr
    else:
        assert "ValueError: COMMLIB_KERNELS=triton needs TRITON_INTERPRET=1 for cpu tensors" in done.stderr


def test_one_that_is_forced_and_missing_or_unknown_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "numba")
    monkeypatch.setenv(dispatch.VARIABLE, "numba")
    with pytest.raises(MissingDependency, match=r"needs numba: pip install 'torch-commlib\[numba\]'"):
        dispatch.kernels(torch.zeros(1))
    monkeypatch.setenv(dispatch.VARIABLE, "fortran")
    with pytest.raises(ValueError, match="COMMLIB_KERNELS must be one of reference, numba, triton, got 'fortran'"):
        dispatch.kernels(torch.zeros(1))


def test_tensors_that_are_not_plain_get_the_reference() -> None:
    with FakeTensorMode():
        assert dispatch.kernels(torch.zeros(1)).name == "reference"
