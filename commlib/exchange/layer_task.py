"""Task that every exchange works on: one layer's gradient on its way through one step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from commlib.codecs.base import Compressor, LayerSpec, Memory, Seeds, scales_of
from commlib.codecs.error_feedback import ErrorFeedback
from commlib.codecs.residuals import relative, widen
from commlib.errors import WrongGradient
from commlib.exchange.buffers import StepBuffers
from commlib.exchange.collectives import Payers
from commlib.runtime.scratch import scratch
from commlib.telemetry.stats import Meter

if TYPE_CHECKING:
    from commlib.exchange.factors.rounds import FactorRounds


@dataclasses.dataclass(frozen=True)
class Stripe:
    """Rows ``start:stop`` of a layer's dimension 0, and their spec."""

    start: int
    stop: int
    spec: LayerSpec


@functools.lru_cache(maxsize=4096)  # every step asks the same of every layer
def cut(spec: LayerSpec, count: int, unit: int) -> tuple[Stripe, ...]:
    """A layer's rows in so many stripes, at multiples of ``unit``.

    What does not divide goes to the first ones; some may be empty. A scalar is one row.
    """
    spec = spec if spec.shape else dataclasses.replace(spec, shape=(1,))
    height = spec.shape[0]
    units = -(-height // unit)
    cuts = [min(height, unit * (units // count * p + min(p, units % count))) for p in range(count + 1)]
    return tuple(Stripe(a, b, spec.row_slice(a, b)) for a, b in pairwise(cuts))


@dataclasses.dataclass(frozen=True)
class ChunkIndex:
    """Index of a chunk among so many of a layer, which travel one after another (:mod:`commlib.exchange.chunking`)."""

    index: int = 0
    count: int = 1

    def of(self, codec: Compressor, spec: LayerSpec) -> Stripe:
        """Rows of a layer that this chunk has, where the codec lets a layer be cut."""
        return cut(spec, self.count, codec.part_rows(spec) or 1)[self.index]


WHOLE = ChunkIndex()


@dataclasses.dataclass(eq=False, slots=True)  # not frozen: to make such a one takes as long as to code a small layer
class LayerTask:
    """Task of exchanging one layer in one step. It is not changed once it is made.

    Args:
        spec: the layer.
        codec: in force at this step (``Compressor.at`` has been applied).
        grad: its local gradient, contiguous; overwritten by the mean over ranks.
        memory: the codec's slots on this rank.
        seeds: for random codecs.
        meter: where its bytes and seconds are counted.
        owner: slots for re-encoding the stripe this rank owns (scatter_gather only).
        trip: the rows of its layer in this step (factors and owners only).
        arena: the layer's; the first layer's is also for what a bucket has once.
        part: which of it travels; of an item that is cut, ``spec``, ``grad`` and slots are still the whole layer's.
        scales: what bounds the values of ``grad`` once they are decoded, if its codec says so (``scale_bytes``): of
            none of them, or of all, whatever its parts. None: nobody asks for it.
        faults: where the layer is verified in this step, what is found wrong; else None.
        layers: of several that are coded as one, which begins at which value; empty for one layer.
        overwrite: whether the gradient may be overwritten before the mean is there: not if the user still has it.
    """

    spec: LayerSpec
    codec: Compressor
    grad: Tensor
    memory: Memory
    seeds: Seeds
    meter: Meter
    owner: Memory
    trip: FactorRounds | None = None
    arena: StepBuffers = dataclasses.field(default_factory=StepBuffers)
    part: ChunkIndex = WHOLE
    scales: list[Tensor] | None = None
    faults: list[WrongGradient] | None = None
    layers: Sequence[tuple[int, str]] = ()
    overwrite: bool = False

    def encode(self, x: Tensor, payload: Tensor, *, memory: Memory, seed: int, first: int = 0) -> None:
        """Compress a part of the gradient; with ``faults``, see that what is sent and held back is what was given.

        Exchanges make payload and memory as the codec asks for: so nothing of them is checked, neither here nor where
        they are decoded (``Compressor.compress`` does, for other callers).

        Args:
            x: the part.
            payload: what it becomes.
            memory: the part of the codec's slots.
            seed: for a random codec.
            first: value of the gradient at which it begins, where several layers are coded as one.
        """
        given = None if self.faults is None else owed(x, memory.old, self.codec)
        (self.codec.encode_over if self.overwrite else self.codec.encode)(x, payload, memory=memory, seed=seed)
        if given is not None:
            out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
            self.codec.decode(payload, out, add=True, scale=1.0, seed=seed)
            kept = owed(out, memory.new, self.codec, before=False)
            if kept is not None:
                self._check(kept, given, rounding(memory.new), first)

    def _check(self, kept: Tensor, given: Tensor, bound: float, first: int) -> None:
        assert self.faults is not None
        off = (kept - given).abs()
        if off.numel() and bool(given.isfinite().all()) and not float(off.max()) <= bound * float(given.abs().max()):
            at = int(off.argmax())
            self.fault(
                next((name for start, name in reversed(self.layers) if start <= first + at), self.spec.name),
                f"{self.codec} was given {float(given.view(-1)[at]):g} at value {at} of a part of it "
                f"(gradient and residual), and has sent and kept {float(kept.view(-1)[at]):g}: the codec loses or adds "
                'gradient; give the layer another one, as "none"',
            )

    def fault(self, layer: str, what: str) -> None:
        """Note what is wrong with a layer's exchange: it is an error once the step's exchanges are through."""
        if self.faults is not None:
            self.faults.append(WrongGradient(f"{layer}: {what}", layer))

    def alone(self) -> LayerTask:
        """Chunk of this task as a layer of its own: consecutive rows."""
        if self.part == WHOLE:
            return self
        rows = self.part.of(self.codec, self.spec)
        memory = self.memory.rows(rows.start, rows.stop)
        layers = [(start - rows.start, name) for start, name in self.layers]
        return dataclasses.replace(self, spec=rows.spec, grad=self.rows(rows), memory=memory, part=WHOLE, layers=layers)

    def rows(self, stripe: Stripe | None = None) -> Tensor:
        """The gradient, spec-shaped, or some rows of it."""
        grad = self.grad if self.grad.shape == self.spec.shape else self.grad.view(self.spec.shape)
        return grad if stripe is None else grad[stripe.start : stripe.stop]

    def work_grad(self, stripe: Stripe | None = None) -> Tensor:
        """:meth:`rows` in the dtype the codec works on; in :func:`scratch` if they must be converted."""
        grad = self.rows(stripe)
        return grad if self._works_in_place else self._float32(grad).copy_(grad)

    def work_out(self, stripe: Stripe | None = None) -> Tensor:
        """Where to decode to: :meth:`rows` themselves, or :func:`scratch` to be handed to :meth:`finish`."""
        grad = self.rows(stripe)
        return grad if self._works_in_place else self._float32(grad)

    def finish(self, out: Tensor, stripe: Stripe | None = None) -> None:
        """Brings decoded values into the gradient's dtype."""
        if not self._works_in_place:
            self.rows(stripe).copy_(out)

    def vouch(self, payloads: Iterable[Tensor], spec: LayerSpec) -> None:
        """Notes the scales of payloads that have been decoded to it, or to those of its rows that ``spec`` is."""
        if self.scales is not None:
            self.scales.extend(s for s in (scales_of(self.codec, p, spec) for p in payloads) if s.numel())

    @property
    def _works_in_place(self) -> bool:
        return self.codec.lossless or self.grad.dtype == torch.float32

    def _float32(self, like: Tensor) -> Tensor:
        return scratch("item", like.shape, torch.float32, like.device)


def owed(x: Tensor, slots: Mapping[str, Tensor], codec: Compressor, *, before: bool = True) -> Tensor | None:
    """A gradient and all that a codec holds back, float64 of its shape; None if the codec promises nothing of the sum.

    Args:
        x: the gradient, or what is decoded.
        slots: the codec's, before or after it has encoded.
        codec: with its error feedback.
        before: whether it decays what it has held back when it encodes next.
    """
    roles = {key: slot.role for key, slot in codec.slots(LayerSpec.of(x)).items()}
    pending = [slots[key] for key, role in roles.items() if role == "pending"]
    if not pending or "local" in roles.values():
        return None
    decay = codec.decay if before and isinstance(codec, ErrorFeedback) else 1.0
    return sum((decay * widen(held).double().view(x.shape) for held in pending), start=x.double())


def rounding(slots: Mapping[str, Tensor]) -> float:
    """By how much of the largest value what is sent and held back may differ from what was given, once."""
    return max([1e-4, *(2 * relative(held.dtype) for held in slots.values())])


class SharedMeters:
    """Meters of layers that travel as one: one for each set of them, for good, of which every layer has a share."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, ...], Meter] = {}

    def of(self, items: Sequence[LayerTask]) -> Meter:
        """The one of these layers."""
        key = tuple(item.spec.name for item in items)
        if key not in self._made:
            parts = [(item.meter, item.spec.numel) for item in items]
            self._made[key] = Meter.of_all(items[0].spec.device, parts)
        return self._made[key]


def payers(items: Sequence[LayerTask], lengths: Sequence[int]) -> Payers:
    """Shares of a collective by payload length."""
    return [(item.meter, n) for item, n in zip(items, lengths, strict=True)]
