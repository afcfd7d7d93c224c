"""Memory of codecs: two buffers a slot, committed or forgotten a step at a time, keyed by parameter name."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from commlib.codecs import residuals
from commlib.codecs.base import LayerSpec, Memory, Slot, init_slot
from commlib.codecs.slots import NODE, OWNER
from commlib.runtime import scratch


@dataclasses.dataclass
class _Pair:
    """``tensors[live]`` is what was committed last; the other one is written by the step under way."""

    slot: Slot
    tensors: list[Tensor]
    live: int = 0
    written: bool = False
    start: int = 0  # first row of the layer, for an owner's stripe
    filled: list[bool] = dataclasses.field(default_factory=lambda: [False, False])  # or as good as zeros

    def take(self, other: _Pair) -> None:
        """Take what another of the same shape keeps, of whatever format."""
        if other.filled[other.live]:
            residuals.convert(other.tensors[other.live], self.tensors[self.live])
            self.filled[self.live] = True


class _Run(NamedTuple):
    """Slot of several layers, which lie side by side in two flat tensors."""

    names: tuple[str, ...]
    pairs: list[_Pair]
    tensors: list[Tensor]


class MemoryStore:
    """The slots of all layers of one rank.

    Each slot has two buffers used in turn: a step reads one and writes the other, and they change roles
    when the step is known to be finite (:meth:`commit`). A step that is not is forgotten by leaving the
    roles alone (:meth:`discard`). It costs memory but no traffic. A residual that is kept in another format than
    the step asks for is converted.

    Buffers are made when first asked for. Values in gradient units are multiples of ``unit``, the loss
    scale of the last step.

    Attributes:
        unit: the loss scale.
        step: number of the step under way, by which residuals of a shorter format are rounded.
    """

    def __init__(self) -> None:
        self.step = 0
        self._pairs: dict[str, dict[str, _Pair]] = {}
        self._runs: dict[tuple[tuple[str, ...], str], _Run] = {}
        self._pending: list[_Pair] = []
        self._committed: list[_Pair] = []
        self.unit = 1.0

    @property
    def empty(self) -> bool:
        """Whether nothing is kept, so nothing has to be drained either."""
        return not any(self._pairs.values())

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of what is held back, and of what else is kept: both buffers of each slot."""
        held = [0, 0]
        for layer in list(self._pairs.values()):  # a step may be under way
            for pair in list(layer.values()):
                held[pair.slot.role != "pending"] += sum(tensor.nbytes for tensor in pair.tensors)
        return held[0], held[1]

    def memory(self, spec: LayerSpec, slots: Mapping[str, Slot], *, prefix: str = "", start: int = 0) -> Memory:
        """The slots of a layer for the step under way, which must write all of them."""
        self._committed = []
        layer = self._pairs.setdefault(spec.name, {})
        for key in [k for k, p in layer.items() if not p.written and not p.filled[p.live]]:
            del layer[key]  # drained, or never committed
        old, new = {}, {}
        for key, slot in slots.items():
            pair = layer.get(prefix + key)
            if pair is not None and (pair.slot.shape, pair.start) != (slot.shape, start):
                self._set_aside(layer, prefix + key)
                pair = None
            if pair is None or pair.slot.dtype != slot.dtype:
                before, first = pair, init_slot(slot, spec, seed=_layer_seed(spec.name))
                pair = layer[prefix + key] = _Pair(
                    slot, [first, scratch.zeros(first.shape, first.dtype, first.device)], start=start
                )
                if before is not None:
                    pair.take(before)
            old[key], new[key] = pair.tensors[pair.live], pair.tensors[1 - pair.live]
            self._will_write(pair, filled=True)
        return Memory(old, new, residuals.bar(self.step))

    def run(self, names: tuple[str, ...], specs: Sequence[LayerSpec], slots: Mapping[str, Slot]) -> Memory:
        """The slots of layers side by side, as if of one, for the step under way, which must write all of them.

        What is kept is each layer's, as by :meth:`memory`.

        Args:
            names: of the layers, in order.
            specs: the layers.
            slots: what each has, of the layer's own shape, and zeros at first.
        """
        self._committed = []
        old, new = {}, {}
        for key, slot in slots.items():
            run = self._runs.get((names, key))
            if run is None or run.pairs[0].slot.dtype != slot.dtype or not self._fits(run, key):
                run = self._lay(names, key, slot, specs)
            live = run.pairs[0].live
            old[key], new[key] = run.tensors[live], run.tensors[1 - live]
            for pair in run.pairs:
                self._will_write(pair, filled=True)
        return Memory(old, new, residuals.bar(self.step))

    def _fits(self, run: _Run, key: str) -> bool:
        """Whether all layers' values are where they were laid, and in the same of the two tensors."""
        live, known = run.pairs[0].live, self._pairs
        return all(
            pair.live == live and known.get(name, {}).get(key) is pair
            for name, pair in zip(run.names, run.pairs, strict=True)
        )

    def _lay(self, names: tuple[str, ...], key: str, slot: Slot, specs: Sequence[LayerSpec]) -> _Run:
        """Makes room for a slot of layers side by side, and takes there what they keep."""
        sizes, device = [spec.numel for spec in specs], specs[0].device
        tensors = [scratch.zeros((sum(sizes),), slot.dtype, device) for _ in range(2)]
        parts = zip(*(torch.split(whole, sizes) for whole in tensors), strict=True)
        run = _Run(names, [], tensors)
        for spec, views in zip(specs, parts, strict=True):
            layer = self._pairs.setdefault(spec.name, {})
            before = layer.get(key)
            if before is not None and (before.slot.shape, before.start) != (spec.shape, 0):
                self._set_aside(layer, key)
                before = None
            pair = _Pair(dataclasses.replace(slot, shape=spec.shape), [view.view(spec.shape) for view in views])
            if before is not None:
                pair.take(before)
            layer[key] = pair
            run.pairs.append(pair)
        self._runs = {at: each for at, each in self._runs.items() if self._fits(each, at[1])}
        self._runs[names, key] = run
        return run

    def crowded(self, names: Sequence[str], slots: Collection[str]) -> list[int]:
        """Which of these layers have more than these slots: :meth:`drain` may have something for them."""
        return [i for i, name in enumerate(names) if len(self._pairs.get(name, ())) > len(slots)]

    def owner(self, spec: LayerSpec, slots: Mapping[str, Slot], start: int) -> Memory:
        """The slots for the stripe of the layer that this rank owns, from row ``start``."""
        return self.memory(spec, slots, prefix=OWNER, start=start)

    def drain(self, spec: LayerSpec, grad: Tensor, world: int, nodes: int) -> bool:
        """Adds to a layer's gradient what its earlier routes have held back, where this step's does not ask for it.

        Nothing is held then, once the step is committed. To be called when the step's own slots have been asked for.

        Args:
            spec: the layer.
            grad: its local gradient, of any shape.
            world: number of ranks. What a stripe's owner has held back is a part of the mean, so it counts P times.
            nodes: N under a hierarchy. What was held back of the mean over a node counts P/N times.

        Returns:
            Whether there was any.
        """
        held = self._held(spec.name)
        for key, pair in held:
            value, rows = residuals.widen(pair.tensors[pair.live]), grad.view(spec.shape or (1,))
            times = world if key.startswith(OWNER) else world / nodes if key.startswith(NODE) else 1
            value = value.view(-1, *rows.shape[1:])
            rows[pair.start : pair.start + len(value)].add_(value, alpha=times)
            pair.tensors[1 - pair.live].zero_()
            self._will_write(pair, filled=False)
        return bool(held)

    def holds(self, name: str) -> bool:
        """Whether :meth:`drain` would have anything for a layer."""
        return bool(self._held(name))

    def _held(self, name: str) -> list[tuple[str, _Pair]]:
        return [
            (key, pair)
            for key, pair in self._pairs.get(name, {}).items()
            if pair.slot.role == "pending" and not pair.written and pair.filled[pair.live]
        ]

    def _set_aside(self, layer: dict[str, _Pair], key: str) -> None:
        """Retire a residual of another route, whose stripes differ; what it holds back is for :meth:`drain`."""
        pair = layer.pop(key)
        if pair.slot.role == "pending" and pair.filled[pair.live]:
            while (key := key + "'") in layer:
                pass
            layer[key] = pair

    def _will_write(self, pair: _Pair, *, filled: bool) -> None:
        pair.filled[1 - pair.live] = filled
        if not pair.written:
            pair.written = True
            self._pending.append(pair)

    def commit(self) -> None:
        """Commit the step: the buffers that it wrote are those that the next step reads."""
        for pair in self._pending:
            pair.live = 1 - pair.live
        self._committed = self._pending
        self.discard()

    def undo(self) -> None:
        """Takes the last commit back; nothing may have been written since."""
        for pair in self._committed:
            pair.live = 1 - pair.live
        self._committed = []

    def discard(self) -> None:
        """The step under way never happened."""
        for pair in self._pending:
            pair.written = False
        self._pending = []

    def held(self) -> Iterator[tuple[str, str, Tensor]]:
        """Layer, slot and committed values, float32, of all that is held back; in units of ``unit``."""
        for name, layer in self._pairs.items():
            for key, pair in layer.items():
                if pair.slot.role == "pending" and pair.filled[pair.live]:
                    yield name, key, residuals.widen(pair.tensors[pair.live])

    def rescale(self, unit: float) -> None:
        """Brings all values in gradient units to a new loss scale (exact for powers of two)."""
        if unit == self.unit or not 0 < unit < float("inf"):
            return
        factor = unit / self.unit
        for layer in self._pairs.values():
            for pair in layer.values():
                if pair.slot.role != "replicated":
                    residuals.scale(pair.tensors[pair.live], factor)
        self.unit = unit

    def forget(self, needed: Mapping[str, Collection[str]]) -> None:
        """Drops what only an earlier route could read (a momentum, a basis): what is pending stays, for any route.

        Args:
            needed: layer → slots of its routes from now on.
        """
        for name, layer in self._pairs.items():
            for key in [k for k, p in layer.items() if p.slot.role != "pending" and k not in needed[name]]:
                del layer[key]

    # -- to and from checkpoints ----------------------------------------------------------------

    def export(self) -> dict[str, dict[str, dict[str, object]]]:
        """Layer → slot → {value: float32 copy in unscaled units, role, start}; committed values only."""
        exported: dict[str, dict[str, dict[str, object]]] = {
            name: {
                key: {"value": self._unscaled(p), "role": p.slot.role, "start": p.start}
                for key, p in layer.items()
                if p.filled[p.live]
            }
            for name, layer in self._pairs.items()
        }
        return {name: slots for name, slots in exported.items() if slots}

    def restore(self, name: str, key: str, slot: Slot, value: Tensor, *, start: int = 0) -> None:
        """Puts a committed value back, given in unscaled units."""
        pair = self._pairs.setdefault(name, {}).get(key)
        if pair is None or (pair.slot.shape, pair.slot.dtype) != (slot.shape, slot.dtype):
            pair = _Pair(slot, [scratch.zeros(slot.room, slot.dtype, value.device) for _ in range(2)], start=start)
            self._pairs[name][key] = pair
        live = pair.tensors[pair.live]
        residuals.convert(value, live)
        pair.filled[pair.live] = True
        if slot.role != "replicated" and self.unit != 1.0:
            residuals.scale(live, self.unit)

    def clear(self) -> None:
        """Forget the slots of all layers."""
        self._pairs, self._runs, self._pending = {}, {}, []

    def _unscaled(self, pair: _Pair) -> Tensor:
        held = pair.tensors[pair.live]
        value = torch.empty(pair.slot.shape, dtype=torch.float32, device=held.device)
        residuals.convert(held, value)
        return value if pair.slot.role == "replicated" or self.unit == 1.0 else value.div_(self.unit)


def _layer_seed(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
