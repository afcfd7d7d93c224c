"""Training with a parameter server once, on one rank."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

import commlib
from commlib.server.job.consistency import make as make_rule

from .ddp_run import DdpRun, make_optimizer
from .evaluate import accuracy
from .result import Result, RunTraffic
from .run_specs import SERVER_PREFIX, ServerSpec
from .tasks import BadInput, cross_entropy

_EVALUATIONS, _EXAMPLES = 30, 256  # for rules that follow the learning


class ServedRun(DdpRun):
    """As :class:`DdpRun`, with shards that keep the model: ``spec`` is ``server`` and what :class:`ServerSpec`
    reads."""

    def train(self, on_step: Callable[[int, int], None]) -> Result:
        """Train to the end.

        Args:
            on_step: called after every step with (steps done, steps in all).

        Raises:
            ReplicasDiffer: the ranks ended with different weights.
            PeerLost: a rank or a shard is gone; which.
        """
        optimizer = make_optimizer(self.recipe, self.model)
        total = self.shards.steps_until(self.settings.epochs) if self.settings.epochs else self.recipe.steps
        served = ServerSpec.of(self.spec.removeprefix(SERVER_PREFIX))
        rule = make_rule(served.rule)
        observes = isinstance(rule, commlib.DTSSP) and self.rank == 0
        try:
            server = commlib.ParameterServer(
                self.model, optimizer, rule, push=served.push, pull=served.pull, background=served.background
            )
        except ValueError as e:
            raise BadInput(f"--server {self.spec.removeprefix(SERVER_PREFIX)}: {e}") from e
        every = max(1, total // _EVALUATIONS)
        with self.curve.running(), server:
            while self.step < total:
                self._served_step(server, optimizer, total)
                if observes and self.step % every == 0:
                    server.observe(accuracy(self.model, self.task, _EXAMPLES))
                on_step(self.step, total)
            server.sync()
        values = sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)
        dense = round(2 * (self.ranks - 1) / self.ranks * values * self.step)
        self.traffic = RunTraffic(wire=server.sent, dense=dense, steps=self.step)
        return self._result()

    def _served_step(self, server: commlib.ParameterServer, optimizer: torch.optim.Optimizer, total: int) -> None:
        start = time.perf_counter()
        x, y = self._begin_step(optimizer, total)
        loss = cross_entropy(self.model(x), y)
        self._pause()
        loss.backward()  # type: ignore[no-untyped-call]
        server.step()
        self.step += 1
        self.seconds.append(time.perf_counter() - start)
