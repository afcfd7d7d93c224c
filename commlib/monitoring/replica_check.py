"""Do all replicas hold the same parameters? A sum over the bits of each is compared, every so many steps.

:func:`checksum` is a sum of products with odd numbers, modulo 2⁶⁴, over the bits of a parameter as 4-byte words: so a
change of one word changes it for certain, whatever the change is, and where in the parameter a word stands counts.
Other changes go unseen with odds of less than 2⁻²⁶ (the multipliers are random, and differences of words are at most
31 times even). -0.0 and 0.0 differ, and NaNs are compared like any other bits.

Order, for what is compared in training. The sums travel on a process group that nothing else uses, made by all ranks
when they attach. A comparison is due after so many exchanges that have come through on this rank, and every rank makes
every exchange (a rank that has joined early shadows the others'), so all ranks come to the same comparisons, one after
another: one sequence on this group, everywhere. A rank that waits in one has issued all collectives of all exchanges up
to it, and so has every rank before it comes to it: nobody waits for what is behind a comparison, and there is no cycle.
It is made by the thread of the backward pass, at its end, before the optimizer changes anything.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from commlib.errors import PeerLost, ReplicasDiverged, check_numbers
from commlib.exchange.collectives import AllGather
from commlib.exchange.in_flight import through
from commlib.groups.handshake import agree, explained, meeting_place, publish_failure
from commlib.groups.process_groups import group_of, sibling, waits_on_stream
from commlib.groups.world import World
from commlib.runtime.autograd import LOOK_S
from commlib.runtime.layers import all_parameters, inside
from commlib.runtime.scratch import scratch

_BLOCK = 1 << 16
"""Words that are summed at once; as many blocks are as much as a parameter may have: 16 GiB."""


def check_replicas(module: nn.Module, group: Any = None, *, timeout: float = 300.0) -> None:
    """Compares the parameters of all ranks, bit for bit. Collective: call it between two steps.

    Buffers are left out: BatchNorm's statistics may differ, and DDP sends the first rank's along with each forward pass
    if it is to.

    Args:
        module: a model, wrapped in DDP or not, of whole parameters.
        group: process group; by default the DDP model's, or the default one.
        timeout: seconds to wait for the other ranks.

    Raises:
        ReplicasDiverged: they differ; the first layer, and which ranks hold the same. All ranks raise it.
        PlanMismatch: ranks have other models; all ranks raise it.
        PeerLost: a rank did not come.
        TypeError: a parameter is a part only (a DTensor).
    """
    group = group_of(module, group)
    world = World(dist.get_rank(group), dist.get_world_size(group))
    key = meeting_place(group, world)
    try:
        check_numbers(timeout)
        parameters = compared(module)
    except Exception as e:
        publish_failure(group, key, world, e)
        raise
    agree(group, key, {n: f"{tuple(p.shape)} {p.dtype}" for n, p in parameters.items()}, world, timeout)
    if parameters:
        Comparison(group, lambda: parameters, world, f"{key}/lost").make(None)


def compared(module: nn.Module) -> dict[str, Tensor]:
    """Name → parameter of all that DDP keeps equal: frozen ones too, but not those that it ignores.

    Raises:
        TypeError: one is a DTensor: of this, ranks hold parts.
    """
    ignored = getattr(module, "parameters_to_ignore", ()) if isinstance(module, DistributedDataParallel) else ()
    found = {n: p for n, p in all_parameters(inside(module)).items() if n not in ignored}
    for name, p in found.items():
        if hasattr(p, "full_tensor"):
            raise TypeError(f"{name} is a DTensor, of which each rank holds a part: there are no replicas to compare")
    return dict(found)


def checksum(values: Tensor) -> Tensor:
    """A sum over the bits, in their order; int64, of no dimension, on the device of the values.

    Args:
        values: of any dtype and shape; in any layout, which does not count.
    """
    raw = values.detach().contiguous().view(-1).view(torch.uint8)
    if len(raw) % 4 or raw.storage_offset() % 4:
        raw = nn.functional.pad(raw, (0, -len(raw) % 4)).clone()
    words = raw.view(torch.int32)
    lower, upper = _multipliers(values.device)
    sums = []
    for block in torch.split(words, _BLOCK):
        products = scratch("checksum", (len(block),), torch.int64, values.device)
        sums.append(torch.mul(block, lower[: len(block)], out=products).sum())
    return (torch.stack(sums) * upper[: len(sums)]).sum()


@functools.lru_cache(maxsize=16)
def _multipliers(device: torch.device) -> tuple[Tensor, Tensor]:
    """Odd numbers, (2, block) int64: for words, and for blocks; the same everywhere."""
    random = torch.Generator().manual_seed(0)
    numbers = torch.randint(-(1 << 63), (1 << 63) - 1, (2, _BLOCK), generator=random, dtype=torch.int64) | 1
    lower, upper = numbers.to(device)
    return lower, upper


def differing(names: Sequence[str], sums: Sequence[Sequence[int]]) -> dict[str, list[list[int]]]:
    """Layers that are not the same everywhere → the ranks that hold the same, most ranks first. Pure.

    Args:
        names: of the layers, in order.
        sums: of each rank that takes part its layers' sums; an empty row is of one that does not.
    """
    found: dict[str, list[list[int]]] = {}
    for i, name in enumerate(names):
        alike: dict[int, list[int]] = {}
        for rank, row in enumerate(sums):
            if row:
                alike.setdefault(row[i], []).append(rank)
        if len(alike) > 1:
            found[name] = sorted(alike.values(), key=lambda ranks: (-len(ranks), ranks))
    return found


def explain(found: Mapping[str, Sequence[Sequence[int]]], step: int | None) -> ReplicasDiverged:
    """The error for layers that differ, at least one."""
    layers = list(found)
    when = "" if step is None else f"after {step} steps "
    held = " and ".join(f"ranks {', '.join(map(str, r))}" if len(r) > 1 else f"rank {r[0]}" for r in found[layers[0]])
    more = f" (and {len(layers) - 1} more: {', '.join(layers[1:4])}{', …' * (len(layers) > 4)})" if layers[1:] else ""
    return ReplicasDiverged(
        f"{when}replicas differ in {layers[0]!r}{more}: {held} each hold values of their own. Exchanged gradients are "
        "the same on ranks that have taken as many steps (comm.stats().steps), so look at what else changes "
        "parameters: an optimizer with another state or learning rate on one rank, weights loaded or set on one rank "
        "after DDP was made, a step that one rank left out, other builds of PyTorch or kinds of device; or broken "
        "memory. Restart from a checkpoint, or make DDP anew: it sends the first rank's parameters to all",
        layers,
        found[layers[0]],
        step,
    )


class Comparison:
    """Comparison of some parameters over one process group; see the module for its order.

    Args:
        group: process group.
        parameters: those there are, by name, in the model's order: the same on all ranks.
        world: this rank.
        key: of the roll call after a failure.
    """

    def __init__(self, group: Any, parameters: Callable[[], Mapping[str, Tensor]], world: World, key: str) -> None:
        self._group, self._parameters, self._world, self._key = group, parameters, world, key
        device = next(iter(parameters().values())).device
        self._streams = waits_on_stream(group, device)
        self._device = device if self._streams else torch.device("cpu")

    def make(self, step: int | None, *, joined: bool = False, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Raises ReplicasDiverged if they are not the same; PeerLost if a rank does not come.

        Args:
            step: how many were taken, if that is known.
            joined: this rank has run out of inputs: it only makes its part of the collective.
            meanwhile: called every second while it waits.
        """
        parameters = self._parameters()
        sums = [torch.tensor(not joined, dtype=torch.int64, device=self._device)]
        sums += [checksum(p).to(self._device) for p in parameters.values()]
        mine = torch.stack(sums).view(torch.uint8)
        everyone = torch.empty(self._world.size * len(mine), dtype=torch.uint8, device=self._device)
        try:
            work = AllGather(everyone, mine).issue(self._group)
            if self._streams:
                work.wait()
            while not self._streams and not through(work, LOOK_S):
                meanwhile()
            rows = everyone.view(torch.int64).view(self._world.size, -1).tolist()
        except RuntimeError as e:
            if isinstance(e, PeerLost):
                raise
            about = f"rank {self._world.rank} of {self._world.size} could not compare replicas"
            raise PeerLost(f"{about}: {explained(self._group, self._key, self._world, e)}") from e
        found = differing(list(parameters), [row[1:] if row[0] else [] for row in rows])
        if found:
            raise explain(found, step)


class DriftGuard:
    """Compares replicas every so many exchanges. Making one is collective.

    Args:
        module: the model, wrapped in DDP or not.
        group: the model's process group; the comparison gets one of its own.
        world: this rank.
        key: of the roll call after a failure.
        every: exchanges.
        device: where the parameters are.

    Attributes:
        checked: how many steps had been taken when they were last found equal; None before.
    """

    def __init__(self, module: nn.Module, group: Any, world: World, key: str, every: int, device: torch.device) -> None:
        here = weakref.ref(
            module
        )  # which may go before its hook does; and who sets `p.data` changes what is to be read
        self._comparison = Comparison(sibling(group, device), lambda: _of(here()), world, key)
        self._every, self._exchanges = every, 0
        self.checked: int | None = None

    def exchanged(self, step: int, *, joined: bool, meanwhile: Callable[[], None]) -> None:
        """Another exchange has come through, after so many steps; other arguments as :meth:`Comparison.make`."""
        self._exchanges += 1
        if self._exchanges % self._every == 0:
            self._comparison.make(step, joined=joined, meanwhile=meanwhile)
            self.checked = step


def _of(module: nn.Module | None) -> dict[str, Tensor]:
    return {} if module is None else compared(module)
