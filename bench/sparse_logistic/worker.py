"""A worker: it computes a block's gradient and curvature from its examples, sends them, and takes what comes back."""

from __future__ import annotations

import collections
import dataclasses

import torch
from torch import Tensor

from commlib.codecs.filter import Content
from commlib.errors import ProtocolError

from .byte_counters import Counted
from .mail import Mail
from .partition import SparsePartition
from .protocol import Kind, Line, Message
from .rows import Rows
from .server import check_finite, verdict_from
from .sparse_worker import ExampleShard


@dataclasses.dataclass(frozen=True)
class Worked:
    """A worker's part of the result.

    Args:
        sent: bytes it had sent after each pass.
        asked: how many times it had to ask for keys.
    """

    sent: list[int]
    asked: int


class Worker:
    """Worker of one rank, for one run.

    Args:
        endpoint: connected to all servers.
        plan: the same on all ranks.
        examples: this worker's.
    """

    def __init__(self, endpoint: Counted, plan: SparsePartition, examples: Rows) -> None:
        me, filters = endpoint.rank, plan.chain()
        self._endpoint, self._plan, self._shard = endpoint, plan, ExampleShard(examples)
        self._owned = [plan.owned(s) for s in range(plan.servers)]
        self._lines = {
            s: Line(endpoint, s, high - low, filters, plan.draws(me, s)) for s, (low, high) in enumerate(self._owned)
        }
        self._mail = Mail(endpoint, self._lines, plan.timeout)
        self._active: dict[tuple[int, int], Tensor] = {}  # (server, block) → features, int64 (n,), ascending
        self._all_active()

    def run(self) -> Worked:
        """Work until the end.

        Raises:
            PeerLost: a server is missing; it is named.
            ProtocolError: what came cannot be; or a gradient of these examples is not finite.
        """
        sent, task = [], 0
        for number in range(self._plan.passes):
            under_way: collections.deque[tuple[int, int]] = collections.deque()
            for block in self._plan.order(number):
                while under_way and under_way[0][0] <= task - self._plan.delay - 1:
                    self._finish(*under_way.popleft(), number)
                self._push(task, block)
                under_way.append((task, block))
                task += 1
            while under_way:
                self._finish(*under_way.popleft(), number)
            self._lines[0].send(Kind.REPORT, number, numbers=[self._shard.loss()])
            verdict = verdict_from(self._mail, number)
            sent.append(self._endpoint.sent)
            if verdict.stop:
                break
            if verdict.reactivate:
                self._all_active()
        return Worked(sent, sum(line.asked for line in self._lines.values()))

    def _all_active(self) -> None:
        """Make all weights active that occur here."""
        for s in range(self._plan.servers):
            for b in range(self._plan.blocks):
                self._active[s, b] = self._shard.between(*self._plan.slice(s, b))

    def _push(self, task: int, block: int) -> None:
        keys = [self._active[s, block] for s in self._lines]
        sizes, together = [k.numel() for k in keys], torch.cat(keys)
        slopes = self._shard.slopes(together)
        for what, values in zip(("gradient", "curvature"), slopes, strict=True):
            check_finite(f"rank {self._endpoint.rank} has a {what}", values, together)
        for s, own, g, u in zip(self._lines, keys, *(torch.split(each, sizes) for each in slopes), strict=True):
            local = own - self._owned[s][0]
            self._lines[s].send(Kind.PUSH, task, [Content(local, g), Content(local, u)])

    def _finish(self, task: int, block: int, number: int) -> None:
        pulls = self._mail.gather(Kind.PULL, task, self._lines, f"weights of block {block} in pass {number}")
        for s, pull in enumerate(pulls):
            pushed = self._active[s, block]
            keys, weights = self._weights(s, pull)
            if not bool(torch.isin(keys, pushed).all()) or bool((keys[1:] == keys[:-1]).any()):
                raise ProtocolError(f"rank {s} sent weights of features that it was not asked for, or twice")
            check_finite(f"rank {s} sent a weight", weights, keys)
            now = torch.zeros(pushed.numel())  # what does not come is 0, and not active any more
            now[torch.searchsorted(pushed, keys)] = weights
            self._shard.change(pushed, now)
            self._active[s, block] = keys

    def _weights(self, server: int, pull: Message) -> tuple[Tensor, Tensor]:
        """Active features, int64 (n,), ascending, and their weights, float32 (n,)."""
        parts = [pull.content(0), pull.content(1)]
        keys, order = torch.cat([p.keys for p in parts if p.keys is not None]).sort()
        return keys + self._owned[server][0], torch.cat([p.values for p in parts])[order]
