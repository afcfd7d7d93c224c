"""Which implementation of the codecs' loops runs: numba's for the CPU, Triton's for CUDA, or the reference."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from typing import Protocol, cast

import torch
from torch import Tensor

from commlib.codecs.slots import Carry
from commlib.compressors.kernels.reference import codecs
from commlib.errors import MissingDependency

VARIABLE = "COMMLIB_KERNELS"
_MODULES = {"reference": "reference.codecs", "numba": "cpu.codecs", "triton": "gpu.codecs"}
_FASTEST = {"cpu": "numba", "cuda": "triton"}
_log = logging.getLogger("commlib")


class Kernels(Protocol):
    """Contract of every implementation of the kernels; see ``reference`` for what each does."""

    name: str

    def cast_encode(self, x: Tensor, payload: Tensor, wire: torch.dtype, carry: Carry | None = None) -> None: ...
    def cast_decode(self, payloads: Tensor, out: Tensor, wire: torch.dtype, *, add: bool, scale: float) -> None: ...
    def two_means_encode(self, x: Tensor, payload: Tensor, column: int, carry: Carry | None = None) -> None: ...
    def two_means_decode(self, payloads: Tensor, out: Tensor, column: int, *, add: bool, scale: float) -> None: ...
    def sign_encode(self, x: Tensor, payload: Tensor, carry: Carry | None = None) -> None: ...
    def sign_decode(self, payloads: Tensor, out: Tensor, *, add: bool, scale: float) -> None: ...
    def linear_encode(
        self, x: Tensor, payload: Tensor, block: int, levels: int, carry: Carry | None = None
    ) -> None: ...
    def norm_encode(
        self, x: Tensor, payload: Tensor, block: int, levels: int, seed: int, carry: Carry | None = None
    ) -> None: ...
    def levels_decode(
        self, payloads: Tensor, out: Tensor, block: int, levels: int, *, add: bool, scale: float
    ) -> None: ...
    def ternary_encode(self, x: Tensor, payload: Tensor, block: int, seed: int, carry: Carry | None = None) -> None: ...
    def ternary_decode(self, payloads: Tensor, out: Tensor, block: int, *, add: bool, scale: float) -> None: ...
    def natural_encode(self, x: Tensor, payload: Tensor, seed: int, carry: Carry | None = None) -> None: ...
    def natural_decode(self, payloads: Tensor, out: Tensor, *, add: bool, scale: float) -> None: ...
    def places_encode(self, indices: Tensor, n: int, payload: Tensor) -> None: ...
    def places_decode(self, payload: Tensor, n: int, k: int) -> Tensor: ...
    def places_add(self, payload: Tensor, values: Tensor, scale: float, out: Tensor) -> None: ...
    def largest(self, x: Tensor, k: int, carry: Carry | None = None) -> tuple[Tensor, Tensor]: ...
    def largest_moved(
        self, g: Tensor, k: int, m: float, old: Tensor, u: Tensor, carry: Carry, *, nesterov: bool
    ) -> tuple[Tensor, Tensor]: ...
    def orthonormal(self, p: Tensor, spare: Tensor) -> None: ...
    def strata(self, n: int, k: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]: ...


def kernels(like: Tensor) -> Kernels:
    """The implementation for tensors on this device; subclasses of Tensor, which may be anything, get the reference.

    The environment variable ``COMMLIB_KERNELS`` forces one.

    Raises:
        ValueError: it names none, or Triton's for CPU tensors, where Triton does not interpret its kernels.
        MissingDependency: it names one that is not installed.
    """
    plain = type(like) in (Tensor, torch.nn.Parameter)
    return implementation(like.device.type, os.environ.get(VARIABLE, "")) if plain else cast(Kernels, codecs)


@functools.cache
def implementation(device: str, forced: str = "") -> Kernels:
    """As :func:`kernels`, for a kind of device; one that is forced for other devices leaves these to the reference."""
    if forced and forced not in _MODULES:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(_MODULES)}, got {forced!r}")
    wanted = _FASTEST.get(device, "reference")
    if (device, forced) == ("cpu", "triton"):
        wanted = forced
    elif forced and forced != wanted:
        wanted = "reference"
    if wanted == "reference":
        return cast(Kernels, codecs)
    try:
        if importlib.util.find_spec(wanted) is None:
            raise ImportError
        module = importlib.import_module(f"commlib.compressors.kernels.{_MODULES[wanted]}")
    except ImportError as e:
        because = f" ({e})" if str(e) else ""
        if forced:
            message = f"{VARIABLE}={forced} needs {wanted}{because}: pip install 'torch-commlib[{wanted}]'"
            raise MissingDependency(message) from e
        _log.warning("codecs run slowly on %s tensors%s: pip install 'torch-commlib[%s]'", device, because, wanted)
        return cast(Kernels, codecs)
    if device == "cpu" and wanted == "triton" and not module.interpreted():
        raise ValueError(f"{VARIABLE}=triton needs TRITON_INTERPRET=1 for cpu tensors, set before Python starts")
    return cast(Kernels, module)
