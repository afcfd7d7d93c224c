"""The shared base of the codecs that send the largest values and where they are."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from commlib.codecs import residuals
from commlib.codecs.base import Carry, Compressor, LayerSpec, Memory
from commlib.codecs.registry import make_plain
from commlib.compressors.kernels.dispatch import kernels
from commlib.compressors.kernels.reference.bitpack import elias_fano_nbytes
from commlib.runtime.scratch import scratch


class SparseCodec(Compressor):
    """k = ⌈ratio·n⌉ values of largest magnitude (at least one), the rest is zero.

    Payload: the values in the order of their places, as the codec ``values`` writes a vector of k;
    then the ascending indices in Elias–Fano code, about 2 + log₂(n/k) bits each.

    Options of ``values`` follow it as in any spec string, further ones separated by ``;``
    (``values=qsgd:levels=3;block=64``); ``fp32`` is the values themselves.
    """

    ratio: float
    values: str
    default_exchange = "gather"
    _codec: Compressor  # what ``values`` names

    def __post_init__(self) -> None:
        check_ratio(self.name, self.ratio)
        if "," in self.values:
            raise ValueError(f"{self.name}: separate the options of values={self.values!r} by ';', not ','")
        codec = make_plain("none" if self.values == "fp32" else self.values.replace(";", ","))
        if codec.shared_seed or codec.slots(LayerSpec("values", (8, 8))):
            raise ValueError(f"{self.name}: values={self.values!r} keeps memory or shares a seed: take a plain codec")
        object.__setattr__(self, "_codec", codec)
        object.__setattr__(self, "random", codec.random)

    def kernels(self, like: Tensor) -> str:
        return kernels(like).name

    def _count(self, n: int) -> int:
        """Number k of values that are sent of n."""
        return kept(self.ratio, n)

    def _largest(self, x: Tensor, carry: Carry | None) -> tuple[Tensor, Tensor]:
        """The places of the largest, ascending, and the values there, of ``x``, or x + carry.old into carry.new."""
        return kernels(x).largest(x.view(-1), self._count(x.numel()), carry)

    def _values_nbytes(self, n: int) -> int:
        return self._codec.nbytes(LayerSpec("values", (self._count(n),)))

    def nbytes(self, spec: LayerSpec) -> int:
        n = spec.numel
        return self._values_nbytes(n) + elias_fano_nbytes(n, self._count(n))

    def _encode_largest(
        self, x: Tensor, payload: Tensor, seed: int, carry: Carry | None = None
    ) -> tuple[Tensor, Tensor]:
        """Write the payload for ``x``, or x + carry.old, which is left in carry.new.

        Returns:
            The places sent, int64, shape (k,), ascending, and the values there. Whatever is not finite is among them,
            if there is room.
        """
        places, values = self._largest(x, carry)
        self._write(places, values, x.numel(), payload, seed)
        return places, values

    def _write(self, places: Tensor, values: Tensor, n: int, payload: Tensor, seed: int) -> None:
        head = self._values_nbytes(n)
        self._codec.encode(values, payload[:head], memory=Memory({}, {}), seed=seed)
        if n:
            kernels(values).places_encode(places, n, payload[head:])

    def _take_out(self, carry: Carry, places: Tensor, values: Tensor, payload: Tensor, seed: int) -> None:
        """Subtract from carry.new, where there are these values, what the payload decodes to."""
        flat = carry.new.view(-1)
        if self._codec.lossless:
            flat.index_fill_(0, places, 0.0)
            return
        sent = self._decode_values(payload, flat, seed)
        if not carry.short:
            flat.index_add_(0, places, sent, alpha=-1.0)
            return
        left = torch.empty_like(values, dtype=flat.dtype)
        residuals.shorten(values - sent, left, carry.up)
        flat.index_copy_(0, places, left)

    def _decode_values(self, payload: Tensor, flat: Tensor, seed: int) -> Tensor:
        """Values of a payload, float32, in it or in memory that the next call overwrites."""
        head = payload[: self._values_nbytes(flat.numel())]
        if self._codec.lossless:
            return head.view(torch.float32)
        values = scratch("values", (self._count(flat.numel()),), torch.float32, flat.device)
        self._codec.decode(head, values, add=False, scale=1.0, seed=seed)
        return values

    def decode(self, payload: Tensor, out: Tensor, *, add: bool, scale: float, seed: int) -> None:
        flat = out.view(-1)
        if not add:
            flat.zero_()
        if n := flat.numel():
            values = self._decode_values(payload, flat, seed)
            kernels(flat).places_add(payload[self._values_nbytes(n) :], values, scale, flat)

    def contraction(self, spec: LayerSpec) -> float | None:
        """k/n times that of the values: ‖C(x) − x‖² = (what was left out) + (1 − δ)·(what was sent), at most."""
        k = self._count(spec.numel)
        inner = self._codec.contraction(LayerSpec("values", (k,)))
        return None if inner is None else inner * k / max(1, spec.numel)


def kept(ratio: float, n: int) -> int:
    """⌈ratio·n⌉, at least 1 and at most n."""
    return min(n, max(1, math.ceil(ratio * n)))


def check_ratio(name: str, ratio: float) -> None:
    """Raises ValueError unless 0 < ratio ≤ 1."""
    if not 0 < ratio <= 1:
        raise ValueError(f"{name}: ratio must be in (0, 1], got {ratio!r}")
