"""A server: it waits for all workers' gradients of a block, moves the weights that it owns, and sends them back."""

from __future__ import annotations

import dataclasses
import math
import time

import torch
from torch import Tensor

from commlib.codecs.filter import Content
from commlib.errors import CommlibError, ProtocolError

from . import kkt_filter, proximal_step
from .byte_counters import Counted
from .mail import Mail
from .partition import SparsePartition
from .protocol import Kind, Line, Message


@dataclasses.dataclass(frozen=True)
class Pass:
    """What the leading server knows after a pass over all blocks.

    Args:
        objective: loss of all examples, as the workers know the weights, plus λ·Σ|w|.
        violation: largest of (|g| - λ)₊ over weights that were 0.
        active, nonzero: weights at the pass's end.
        theta: θ that the pass had.
        seconds: since the run began.
    """

    objective: float
    violation: float
    active: int
    nonzero: int
    theta: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Served:
    """A server's part of the result.

    Args:
        weights: float32, of the features it owns.
        sent: bytes it had sent after each pass.
        passes: of the server that leads; else empty.
        converged: whether the run ended because the objective changed too little, not because passes were used up.
        asked: how many times it had to ask for keys.
    """

    weights: Tensor
    sent: list[int]
    passes: list[Pass]
    converged: bool
    asked: int


class Server:
    """Server of one rank, for one run.

    Args:
        endpoint: connected to all workers, and to the other servers or to the one that leads.
        plan: the same on all ranks.
    """

    def __init__(self, endpoint: Counted, plan: SparsePartition) -> None:
        me = endpoint.rank
        self._endpoint, self._plan, self._me = endpoint, plan, me
        self._low, high = plan.owned(me)
        size = high - self._low
        filters = plan.chain()
        self._lines = {p: Line(endpoint, p, size, filters, plan.draws(me, p)) for p in plan.peers(me)}
        self._mail = Mail(endpoint, self._lines, plan.timeout)
        self._w = torch.zeros(size)
        self._reach = torch.full((size,), proximal_step.FIRST_REACH, dtype=torch.float64)
        self._active = kkt_filter.Active(size, plan.l1)
        start = plan.examples * math.log(2.0)
        self._rule = kkt_filter.Rule(start, plan.examples, on=plan.kkt, tolerance=plan.tolerance, ratio=plan.ratio)
        self._passes: list[Pass] = []
        self._began = time.monotonic()

    def run(self) -> Served:
        """Serve until the end.

        Raises:
            PeerLost: a rank is missing; it is named.
            ProtocolError: what came cannot be, as a gradient that is not finite.
        """
        sent, verdict, task = [], kkt_filter.Verdict(), 0
        for number in range(self._plan.passes):
            for block in self._plan.order(number):
                self._task(task, number, block)
                task += 1
            verdict = self._end_of_pass(number)
            sent.append(self._endpoint.sent)
            if verdict.stop:
                break
            self._active.next_pass(verdict)
        asked = sum(line.asked for line in self._lines.values())
        return Served(self._w, sent, self._passes, verdict.stop, asked)

    def _task(self, task: int, number: int, block: int) -> None:
        workers = self._plan.worker_ranks
        pushes = self._mail.gather(Kind.PUSH, task, workers, f"push of block {block} in pass {number}")
        low, high = (edge - self._low for edge in self._plan.slice(self._me, block))
        g, u = torch.zeros(2, high - low, dtype=torch.float64)
        known = torch.zeros(high - low, dtype=torch.bool)
        theirs = []
        for worker, push in zip(workers, pushes, strict=True):
            keys, gradient, curvature = self._checked(worker, push, low, high)
            g.index_add_(0, keys - low, gradient.double())
            u.index_add_(0, keys - low, curvature.double())
            known[keys - low] = True
            theirs.append(keys)
        keys = known.nonzero().view(-1) + low
        g, u = g[known], u[known].clamp_(min=0.0)
        old = self._w[keys]
        self._active.decide(keys, old, g)
        self._w[keys], self._reach[keys] = proximal_step.step(
            old, g, u, self._reach[keys], l1=self._plan.l1, eta=self._plan.step
        )
        for worker, keys in zip(workers, theirs, strict=True):
            self._lines[worker].send(Kind.PULL, task, self._weights(keys[self._active.mask[keys]]))

    def _weights(self, keys: Tensor) -> list[Content]:
        """Weights of active keys, those that are 0, and the others: so 0 stays exactly that in whatever code of
        values."""
        w = self._w[keys]
        return [Content(keys[chosen], w[chosen]) for chosen in (w == 0, w != 0)]

    def _checked(self, worker: int, push: Message, low: int, high: int) -> tuple[Tensor, Tensor, Tensor]:
        (g, u), who = (push.content(0), push.content(1)), f"rank {worker}"
        if g.keys is None or u.keys is None or not torch.equal(g.keys, u.keys):
            raise ProtocolError(f"{who} pushed gradients and curvatures of different keys")
        keys = g.keys
        if keys.numel() and not (low <= int(keys[0]) and int(keys[-1]) < high and bool(self._active.mask[keys].all())):
            raise ProtocolError(f"{who} pushed keys that are not the block's, or not active")
        for what, values in (("gradient", g.values), ("curvature", u.values)):
            check_finite(f"{who} pushed a {what}", values, keys + self._low)
        return keys, g.values, u.values

    def _end_of_pass(self, number: int) -> kkt_filter.Verdict:
        numbers = [
            self._plan.l1 * float(self._w.double().abs().sum()),
            self._active.violation,
            int(self._active.mask.sum()),
            int(self._w.count_nonzero()),
        ]
        if self._me == 0:
            return self._lead(number, numbers)
        self._lines[0].send(Kind.REPORT, number, numbers=numbers)
        return verdict_from(self._mail, number)

    def _lead(self, number: int, own: list[float]) -> kkt_filter.Verdict:
        others = range(1, self._plan.servers)
        reports = self._mail.gather(Kind.REPORT, number, self._plan.peers(0), f"report of pass {number}")
        shares = [own, *(_numbers(r, 4) for r in reports[: len(others)])]
        losses = [_numbers(r, 1)[0] for r in reports[len(others) :]]
        penalties, violations, active, nonzero = zip(*shares, strict=True)
        objective = math.fsum([*losses, *penalties])
        if not math.isfinite(objective):
            raise CommlibError(f"the objective is {objective} after pass {number}: lower eta, or scale the features")
        verdict = self._rule.after(objective, max(violations))
        self._passes.append(
            Pass(
                objective,
                max(violations),
                int(sum(active)),
                int(sum(nonzero)),
                self._active.theta,
                time.monotonic() - self._began,
            )
        )
        for line in self._lines.values():
            line.send(Kind.VERDICT, number, numbers=[verdict.stop, verdict.reactivate, verdict.theta])
        return verdict


def verdict_from(mail: Mail, number: int) -> kkt_filter.Verdict:
    """What the server that leads says after a pass."""
    (message,) = mail.gather(Kind.VERDICT, number, [0], f"verdict on pass {number}")
    match message.numbers:
        case [bool(stop), bool(reactivate), float(theta)] if theta >= 0:
            return kkt_filter.Verdict(stop, reactivate, theta)
    raise ProtocolError(f"rank 0 sent what is no verdict on pass {number}")


def check_finite(what: str, values: Tensor, keys: Tensor) -> None:
    """Raises ProtocolError that names the first of the features, int64 (n,), whose value, (n,), is not finite."""
    bad = (~values.isfinite()).nonzero()
    if bad.numel():
        at = int(bad[0])
        raise ProtocolError(
            f"{what} of {float(values[at])} for feature {int(keys[at])}, from 0: no number can follow from that; "
            "look for very large values of it in the data"
        )


def _numbers(report: Message, count: int) -> list[float]:
    if len(report.numbers) != count or not all(type(n) in (int, float) for n in report.numbers):
        raise ProtocolError(f"a report that is not {count} numbers")
    return report.numbers
