"""The contract of a codec: what goes in, what comes out, what it remembers.

A :class:`Compressor` is an immutable configuration. Whatever it must remember between steps
(an error-feedback residual, a momentum, a warm-start basis) it *declares* as :class:`Slot`\\ s, and
the caller hands it in as a :class:`Memory`; whatever it draws at random follows from the ``seed``
it is given. So a codec is a pure function, and resuming, rolling a step back and moving a layer to
other ranks are the business of one place only (``memory_store.py``).
"""

from __future__ import annotations

import dataclasses
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from commlib.codecs.slots import Carry as Carry
from commlib.codecs.slots import Memory as Memory
from commlib.codecs.slots import Slot as Slot
from commlib.codecs.slots import init_slot as init_slot
from commlib.runtime.layers import Kind as Kind
from commlib.runtime.layers import LayerSpec as LayerSpec
from commlib.runtime.scratch import scratch


class Compressor(ABC):
    """Base of all codecs: a way of writing a gradient in fewer bytes.

    Subclasses are frozen dataclasses whose fields are the options of the spec string
    (``topk:ratio=0.01`` is ``TopK(ratio=0.01)``); they validate them in ``__post_init__`` with
    ``ValueError``. They implement :meth:`nbytes`, :meth:`encode` and :meth:`decode`, which see
    checked arguments; callers use :meth:`compress` and :meth:`decompress`.

    What the class promises, each promise tested by :mod:`commlib.testing`:

    * the payload has exactly ``nbytes(spec)`` bytes, known before compressing;
    * the same arguments (``seed`` included) give the same bytes;
    * a non-finite value anywhere in ``x`` makes some decoded value non-finite;
    * an all-zero ``x`` without memory decodes to finite values;
    * ``x`` is never modified.

    Class data (an option may decide it: ``randomk:scaled=on`` is unbiased), read when a route is built:

    Attributes:
        name: what the spec string calls it.
        unbiased: E[decode(encode(x))] = x over seeds. Biased codecs get error feedback by default.
        lossless: decodes to ``x`` itself (or to what its slots make of it); such a codec sees ``x`` in
            its own dtype, all others see float32.
        random: draws from ``seed``.
        shared_seed: all ranks must be given the same seed, and decoding needs it too.
        elementwise: the payload of several layers side by side is their payloads side by side, and slots have the
            layers' shapes and begin as zeros; so a bucket's layers may be coded as one.
        min_size: layers of fewer values go uncompressed where the user has not said how many.
        default_exchange: which exchange a plain spec string gets; None picks by world size.
    """

    name: str
    unbiased: bool = False
    lossless: bool = False
    random: bool = False
    shared_seed: bool = False
    elementwise: bool = False
    min_size: int = 1024
    default_exchange: str | None = None

    # -- what a codec author writes -------------------------------------------------------------

    @abstractmethod
    def nbytes(self, spec: LayerSpec) -> int:
        """Exact payload length in bytes for a gradient of this spec."""

    @abstractmethod
    def encode(self, x: Tensor, payload: Tensor, *, memory: Memory, seed: int) -> None:
        """Write ``x`` (contiguous, float32 unless ``lossless``) into ``payload`` (uint8, exact, 8-byte aligned)."""

    @abstractmethod
    def decode(self, payload: Tensor, out: Tensor, *, add: bool, scale: float, seed: int) -> None:
        """Write (or add) ``scale`` times the decoded values to ``out`` (contiguous, dtype as in encode)."""

    def encode_feedback(self, x: Tensor, carry: Carry, payload: Tensor, *, memory: Memory, seed: int) -> None:
        """Encode x + carry.old, and leave in carry.new what was *not* sent of it. Fused codecs override this."""
        v = torch.add(x, carry.old, out=carry.new)
        self.encode(v, payload, memory=memory, seed=seed)
        self.decode(payload, v, add=True, scale=-1.0, seed=seed)

    def carries(self, held: Tensor) -> bool:
        """Whether :meth:`encode_feedback` takes a residual of this format as it is. In float32 every codec does."""
        return held.dtype == torch.float32

    def encode_over(self, x: Tensor, payload: Tensor, *, memory: Memory, seed: int) -> None:
        """As :meth:`encode`, and ``x`` may be overwritten: where that saves memory."""
        self.encode(x, payload, memory=memory, seed=seed)

    def decode_sum(self, payloads: Tensor, out: Tensor, *, scale: float, seeds: Sequence[int]) -> None:
        """Write ``scale`` times the sum of what payloads, shape (P, nbytes), decode to, added in their order."""
        for p, payload in enumerate(payloads):
            self.decode(payload, out, add=p > 0, scale=scale, seed=seeds[p])

    def slots(self, spec: LayerSpec) -> dict[str, Slot]:
        """Slots that the codec needs for a layer; none by default."""
        return {}

    def contraction(self, spec: LayerSpec) -> float | None:
        """δ with E‖C(x) − x‖² ≤ (1 − δ)‖x‖² for every x, or None where there is none to promise."""
        return None

    def reduce_dtype(self, spec: LayerSpec) -> torch.dtype | None:
        """The dtype as which payloads of several ranks may be summed element by element, or None."""
        return None

    def stripe_rows(self, spec: LayerSpec) -> int:
        """Stripes of this layer must be cut at multiples of so many rows of dimension 0."""
        return 1

    def part_rows(self, spec: LayerSpec) -> int | None:
        """Cut at multiples of so many rows, a layer is coded as it is in one piece; None if it is never so.

        But for what is drawn at random. Large layers travel in such parts, one coded while another is on its way.
        """
        return None

    def scale_bytes(self, spec: LayerSpec) -> int:
        """A payload begins with so many bytes of float32 numbers, by the largest of which decoded values are bounded.

        In magnitude, by twice as much at most: so values are finite if the numbers are. 0: only values themselves say.
        """
        return 0

    def refuse(self, spec: LayerSpec) -> str | None:
        """Why this layer should not be compressed with it (a reason in words), or None."""
        return None

    def at(self, step: int) -> Compressor:
        """The configuration in force at a step, for codecs with a schedule."""
        return self

    def kernels(self, like: Tensor) -> str:
        """Which implementation runs for tensors like this one: as ``COMMLIB_KERNELS`` names it, or ``torch``."""
        return "torch"

    def dense_form(self) -> Compressor | None:
        """The codec for layers and steps sent uncompressed under its rule; None is the identity."""
        return None

    # -- what a caller uses ---------------------------------------------------------------------

    def compress(
        self,
        x: Tensor,
        payload: Tensor,
        *,
        memory: Memory | None = None,
        seed: int | None = None,
        overwrite: bool = False,
    ) -> None:
        """Compress a gradient.

        Args:
            x: contiguous, float32 (any float dtype for a lossless codec), any shape; not modified.
            payload: contiguous uint8, shape ``(nbytes(spec),)``, starting at an 8-byte boundary.
            memory: the slots this codec declared, required if it declared any.
            seed: required if ``random``; a pure function of it and ``x`` is written.
            overwrite: ``x`` may be overwritten, which saves a residual of a shorter format memory of its size.

        Raises:
            TypeError: ``x`` or ``payload`` has the wrong dtype.
            ValueError: ``payload`` has the wrong length, or memory or seed is missing.
        """
        spec = LayerSpec.of(x)
        self._check(x, payload, spec, seed)
        missing = [k for k in self.slots(spec) if memory is None or k not in memory.old]
        if missing:
            raise ValueError(f"{self} needs memory for {', '.join(missing)}: pass memory=Memory.zeros(codec, spec)")
        encode = self.encode_over if overwrite else self.encode
        encode(x, payload, memory=memory or Memory({}, {}), seed=seed or 0)

    def decompress(
        self, payload: Tensor, out: Tensor, *, add: bool = False, scale: float = 1.0, seed: int | None = None
    ) -> None:
        """Decode a payload into ``out`` (contiguous; dtype and shape of the compressed ``x``).

        Args:
            payload: uint8, exactly ``nbytes`` of ``out``'s spec.
            out: overwritten, or added to with ``add=True``.
            scale: factor applied to the decoded values.
            seed: the one used to compress, needed if ``shared_seed``.

        Raises:
            TypeError, ValueError: as :meth:`compress`.
        """
        self._check(out, payload, LayerSpec.of(out), seed if self.shared_seed else 0)
        self.decode(payload, out, add=add, scale=float(scale), seed=seed or 0)

    def decompress_sum(
        self, payloads: Tensor, out: Tensor, *, scale: float = 1.0, seeds: Sequence[int] | None = None
    ) -> None:
        """Decode the payloads of several ranks and write their sum, equal to the last bit to adding them one by one.

        Args:
            payloads: uint8, shape (P, nbytes), each row at an 8-byte boundary: rows of a gathered buffer may be longer.
            out: overwritten.
            scale: factor applied to the decoded values.
            seeds: those used to compress, needed if ``shared_seed``.

        Raises:
            TypeError, ValueError: as :meth:`compress`, or there is no payload.
        """
        rows = len(payloads) if payloads.dim() == 2 else 0
        if not rows or (rows > 1 and payloads.numel() and payloads.stride(0) % 8):
            raise ValueError(
                f"payloads of {self} must be at least one row of bytes at 8-byte boundaries, got shape "
                f"{tuple(payloads.shape)} strides {payloads.stride()}"
            )
        self._check(out, payloads[0], LayerSpec.of(out), (seeds[0] if seeds else None) if self.shared_seed else 0)
        self.decode_sum(payloads, out, scale=float(scale), seeds=seeds or [0] * len(payloads))

    def _check(self, x: Tensor, payload: Tensor, spec: LayerSpec, seed: int | None) -> None:
        if not self.lossless and x.dtype != torch.float32:
            raise TypeError(f"{self} works on float32, got {x.dtype}: convert first")
        if not x.is_contiguous():
            raise ValueError(f"{self} needs a contiguous tensor, got shape {tuple(x.shape)} strides {x.stride()}")
        need = self.nbytes(spec)
        if payload.dtype != torch.uint8 or payload.dim() != 1 or payload.numel() != need:
            raise ValueError(
                f"payload of {self} for shape {spec.shape} must be {need} bytes of uint8, "
                f"got {tuple(payload.shape)} of {payload.dtype}"
            )
        if payload.storage_offset() % 8 or not payload.is_contiguous():
            raise ValueError(f"payload of {self} must be contiguous and start at an 8-byte boundary of its storage")
        if self.random and seed is None:
            raise ValueError(f"{self} draws at random: pass seed=")

    # -- names ----------------------------------------------------------------------------------

    @property
    def is_feedback(self) -> bool:
        """Whether this is the error-feedback wrapper."""
        return False

    @property
    def takes_feedback(self) -> bool:
        """Whether error feedback around it means anything: not if lossless or keeping its own residual."""
        return not self.lossless and "residual" not in self.slots(LayerSpec("probe", (8, 8)))

    def options(self) -> dict[str, object]:
        """The options that differ from their defaults, by name."""
        fields = dataclasses.fields(cast(Any, self)) if dataclasses.is_dataclass(type(self)) else ()
        changed = {f.name: getattr(self, f.name) for f in fields if f.init and getattr(self, f.name) != f.default}
        # a biased codec without feedback is not what its bare name means
        return {**changed, "ef": False} if self.takes_feedback and not self.unbiased else changed

    def __str__(self) -> str:
        opts = ",".join(f"{k}={format_option(v)}" for k, v in self.options().items())
        return f"{self.name}:{opts}" if opts else self.name


def format_option(value: object) -> str:
    """An option's value as a spec string writes it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    return str(value)


def store(values: Tensor, out: Tensor, *, add: bool, scale: float) -> None:
    """The last line of most decoders: ``out = scale·values`` or ``out += scale·values``."""
    flat, values = out.view(-1), values.view(-1)
    if add and scale != 1:  # two roundings: add_(…, alpha) has one on some devices
        flat.add_(torch.mul(values, scale, out=scratch("store", values.shape, values.dtype, values.device)))
    elif add:
        flat.add_(values)
    elif scale != 1 and values.dtype == flat.dtype:
        torch.mul(values, scale, out=flat)
    else:
        flat.copy_(values if scale == 1 else values * scale)


@dataclasses.dataclass(frozen=True)
class Seeds:
    """Seeds of one layer in one step: a pure function of (seed, step, layer, rank, stage)."""

    seed: int
    step: int
    layer: str

    def of(self, codec: Compressor, rank: int, stage: str = "") -> int:
        """63 bits; the same for all ranks if the codec shares its seed, and 0 if it draws nothing."""
        if not codec.random:
            return 0
        who = "all" if codec.shared_seed else str(rank)
        text = f"{self.seed}/{self.step}/{self.layer}/{who}/{stage}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def scales_of(codec: Compressor, payload: Tensor, spec: LayerSpec) -> Tensor:
    """The scales in a payload, float32; empty if its codec has none."""
    return payload[: codec.scale_bytes(spec)].view(torch.float32)
