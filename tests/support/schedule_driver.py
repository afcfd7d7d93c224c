"""Drives the schedules of all ranks in one process, at random, with messages that arrive as late as they may."""

from __future__ import annotations

import collections
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from commlib.transports.process_group.algorithms.steps import Free, Recv, Schedule, Send


def drive(schedules: Sequence[Schedule], seed: int) -> int:
    """Carries all out to their end; returns the number of messages.

    A message's values are read when it is received, not when it is sent: a schedule that writes to what it has sent
    too early sends something else.

    Raises:
        AssertionError: they wait for each other, a message is of another size or dtype, or is never received.
    """
    draw = random.Random(seed)
    wires: dict[tuple[int, int], collections.deque[Tensor]] = collections.defaultdict(collections.deque)
    answers: dict[int, Tensor | None] = dict.fromkeys(range(len(schedules)))
    waiting: dict[int, Recv] = {}
    live, count = set(answers), 0
    while live:
        able = [r for r in sorted(live) if r not in waiting or wires[waiting[r].source, r]]
        assert able, f"ranks wait for each other: {waiting}"
        rank = draw.choice(able)
        if rank in waiting:
            recv = waiting.pop(rank)
            came = wires[recv.source, rank].popleft()
            assert (came.shape, came.dtype) == (recv.like.shape, recv.like.dtype)
            answers[rank] = came.clone()
        answer, answers[rank] = answers[rank], None
        try:
            step = schedules[rank].send(answer)
        except StopIteration:
            live.remove(rank)
            _free(wires, rank)
            continue
        if isinstance(step, Send):
            assert step.tensor.numel()
            assert step.tensor.is_contiguous()
            wires[rank, step.to].append(step.tensor)
            count += 1
        elif isinstance(step, Recv):
            waiting[rank] = step
        else:
            assert isinstance(step, Free)
            _free(wires, rank)
    assert not any(wires.values()), "messages that nobody received"
    return count


def _free(wires: dict[tuple[int, int], collections.deque[Tensor]], rank: int) -> None:
    for (source, _), wire in wires.items():
        if source == rank:
            wire.extend([t.clone() for t in (wire.popleft() for _ in range(len(wire)))])


def values(seed: int, shape: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers, whose sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 4, (shape,), generator=generator).to(dtype)
