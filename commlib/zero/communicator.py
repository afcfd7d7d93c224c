"""Communication of a sharded step: each bucket's gradients when it is due, its values when they are new.

Ordering: all collectives are first rounds, issued by the thread that trains (or autograd's, while that one waits for
it), over one process group: the buckets' gradients in bucket order (:mod:`commlib.zero.bucket_order`), then the
verdict, then the buckets' values in bucket order, then whatever a checkpoint gathers. Whether a step counts is the same
on all ranks, so all issue the same. Lane 1 of the sequencer only decodes what has come; nothing is issued there.

The two halves of an all-reduce, with time between them: gradients to their owners, owners' values to all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from commlib.codecs.base import Memory, Seeds
from commlib.codecs.memory_store import MemoryStore
from commlib.exchange.buffers import StepBuffers, rows
from commlib.exchange.collectives import AllGather, Rounds
from commlib.exchange.lanes import Siblings, lay, make_sequencer
from commlib.exchange.layer_task import LayerTask
from commlib.exchange.peer_wait import PeerWait
from commlib.exchange.scatter_gather import mean_of_stripe, scatter
from commlib.exchange.throttled_group import Throttle
from commlib.groups.world import World
from commlib.runtime.autograd import wait
from commlib.runtime.exit import close_at_exit
from commlib.telemetry.stats import HeldBytes, Meter
from commlib.zero.partition import LayerCut, flat, rows_of


def to_owners(items: Sequence[LayerTask], world: World, means: Sequence[Tensor]) -> Rounds:
    """Fills ``means``, (n,) each, with the mean over ranks of this rank's stripe of every layer.

    Decoded and added in rank order, so that it does not matter to the result who owns what.
    """
    parts, _, incoming, _ = yield from scatter(items, world)
    for item, part, payloads, mean in zip(items, parts, incoming, means, strict=True):
        found = mean_of_stripe(item, part[world.rank], payloads, world)
        mean.copy_(found.view(-1))


def to_all(
    cuts: Sequence[LayerCut], wholes: Sequence[Tensor], world: World, arena: StepBuffers, meters: Sequence[Meter]
) -> Rounds:
    """Every rank gets the others' parts of ``wholes``, (n,) each, bit for bit; this rank's own are there already."""
    packings, device = rows_of(cuts, world.size), wholes[0].device
    mine = packings[world.rank]
    got, send = arena.gathered(max(p.total for p in packings), world, device)
    for cut, whole, place in zip(cuts, wholes, mine.slices(send), strict=True):
        place.view(whole.dtype).copy_(whole[cut.owned(world.rank, world.size)])
    yield [AllGather(got, send, list(zip(meters, mine.lengths, strict=True)))]
    for p, (packing, row) in enumerate(zip(packings, rows(got, world.size), strict=True)):
        if p != world.rank:
            for cut, whole, came in zip(cuts, wholes, packing.slices(row), strict=True):
                whole[cut.owned(p, world.size)] = came.view(whole.dtype)


def exchanged(part: Tensor, got: Tensor) -> Rounds:
    """All ranks' ``part``, (n,), one after another in ``got``, (P·n,); uint8."""
    yield [AllGather(got, part)]


def gathered(part: Tensor, world: int) -> Tensor:
    """Room for what :func:`exchanged` fills, (P, n)."""
    return torch.empty((world, len(part)), dtype=torch.uint8, device=part.device)


class ZeroCommunicator:
    """Communication of one model's sharded step.

    Args:
        group: process group.
        key: that all ranks share, for a roll call.
        world: this rank.
        buckets: of all layers.
        seed: of random codecs.
    """

    def __init__(
        self, group: Any, key: str, world: World, buckets: Sequence[Sequence[LayerCut]], seed: int, device: torch.device
    ) -> None:
        self._world, self._seed, self._step = world, seed, 0
        self._buckets, self.device = buckets, device
        self.store = MemoryStore()
        self.meters = {cut.spec.name: Meter(device, cut.spec.name) for cuts in buckets for cut in cuts}
        self._arenas = {cut.spec.name: (StepBuffers(), StepBuffers()) for cuts in buckets for cut in cuts}
        self._under_way: list[torch.futures.Future[Tensor]] = []
        lanes: list[tuple[Any, ...]] = [("world",)]
        self._sequencer = make_sequencer(group, f"{key}/lost", world, device)
        self.peers = PeerWait([(group, key, world)], device, self._sequencer.give_up)
        lay(self._sequencer, lanes, group, Siblings(group, device), Throttle(None, 0))
        close_at_exit(self, self._sequencer.close)

    @property
    def sent(self) -> float:
        """Bytes of this rank."""
        return self._sequencer.tracks.wire_bytes

    @property
    def memory(self) -> HeldBytes:
        """Bytes that are held between steps, by kind."""
        return HeldBytes(*self.store.nbytes, sum(a.nbytes for pair in self._arenas.values() for a in pair))

    def gradients(self, bucket: int, found: Mapping[str, nn.Parameter], means: Sequence[Tensor], step: int) -> None:
        """A bucket's leave; what is missing leaves as zeros. ``means`` is filled when :meth:`settle` returns.

        Args:
            bucket: its number.
            found: name → parameter.
            means: (n,) each, this rank's part of every layer.
            step: how many came before it.
        """
        if bucket == 0:
            self.peers.number, self._step, self.store.step = self.peers.number + 1, step, step
            if self.peers.why:
                self.peers.begin(*self._place())
        items = [self._item(cut, found[cut.spec.name], step) for cut in self._buckets[bucket]]
        self._go(f"gradients of bucket {bucket} of step {step}", to_owners(items, self._world, means), means[0])

    def values(self, bucket: int, wholes: Sequence[Tensor], what: str) -> None:
        """This rank's part of every layer of a bucket goes to all; ``wholes``, (n,) each, are so after :meth:`settle`.

        ``what`` they are, for errors.
        """
        cuts = self._buckets[bucket]
        arena, meters = self._arenas[cuts[0].spec.name][1], [self.meters[cut.spec.name] for cut in cuts]
        arena.rewind()
        self._go(f"{what} of bucket {bucket}", to_all(cuts, wholes, self._world, arena, meters), wholes[0])

    def from_all(self, part: Tensor, what: str) -> Tensor:
        """All ranks' ``part``, (n,) uint8, as (P, n). Waits for everything."""
        got = gathered(part, self._world.size)
        self._go(what, exchanged(part, got.view(-1)), got)
        self.settle()
        return got

    def settle(self) -> None:
        """Wait until all is through.

        Raises:
            PeerLost: a rank did not come, which is named.
            PlanMismatch: ranks are at different steps.
        """
        under_way, self._under_way = self._under_way, []
        try:
            for future in under_way:
                wait(future, self._meanwhile)
        finally:
            self.peers.check()

    def close(self) -> None:
        """Ends the thread."""
        self._sequencer.close()

    def _go(self, label: str, rounds: Rounds, result: Tensor) -> None:
        self._under_way.append(self._sequencer.submit(label, rounds, result))

    def _item(self, cut: LayerCut, p: nn.Parameter, step: int) -> LayerTask:
        spec, codec, meter = cut.spec, cut.codec.at(step), self.meters[cut.spec.name]
        grad = torch.zeros_like(flat(p)) if p.grad is None else p.grad.detach().contiguous().view(-1)
        meter.would_send(spec.nbytes, self._world.size)
        memory = self.store.memory(spec, codec.slots(spec))
        arena = self._arenas[spec.name][0]
        arena.rewind()
        return LayerTask(
            spec, codec, grad, memory, Seeds(self._seed, step, spec.name), meter, Memory({}, {}), None, arena
        )

    def _meanwhile(self) -> None:
        self.peers.answer(*self._place())

    def _place(self) -> tuple[Mapping[str, str], str]:
        """Terms that must be the same on all ranks in this step, and its name in errors."""
        return {"step": str(self._step)}, f"exchange gradients of step {self._step}"
