"""Training by local steps once, on one rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import commlib

from .ddp_run import DdpRun, make_optimizer
from .result import Result, RunTraffic
from .run_specs import LOCAL_PREFIX, LocalSpec
from .tasks import BadInput, cross_entropy


class LocalRun(DdpRun):
    """As :class:`DdpRun`, with ranks that meet now and then: ``spec`` is ``local`` and what :class:`LocalSpec`
    reads."""

    def train(self, on_step: Callable[[int, int], None]) -> Result:
        """Train to the end.

        Args:
            on_step: called after every step with (steps done, steps in all).

        Raises:
            ReplicasDiffer: the ranks ended with different weights.
            PeerLost: a rank did not come to a meeting.
        """
        optimizer = make_optimizer(self.recipe, self.model)
        given = LocalSpec.of(self.spec.removeprefix(LOCAL_PREFIX))
        total = self.shards.steps_until(self.settings.epochs) if self.settings.epochs else self.recipe.steps
        total = max(1, round(given.times * total))
        options: dict[str, Any] = {"tau": given.tau, "optimizer": optimizer, **dict(given.streaming)}
        options |= {"min_size": self.settings.min_size, "seed": self.seed}
        try:
            local = commlib.LocalSteps(self.model, given.rule, given.codec, **options)
        except ValueError as e:
            raise BadInput(f"--local {self.spec.removeprefix(LOCAL_PREFIX)}: {e}") from e
        with self.curve.running(), local:
            while self.step < total:
                start = time.perf_counter()
                x, y = self._begin_step(optimizer, total)
                loss = cross_entropy(self.model(x), y)
                self._pause()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                self.step += 1
                met = local.step()
                self.seconds.append(time.perf_counter() - start)
                if met:
                    with local.shared():
                        self.curve.look(self.step, local.bytes_sent)
                on_step(self.step, total)
        local.take_shared()
        values = sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)
        dense = round(2 * (self.ranks - 1) / self.ranks * values * self.step)
        self.traffic = RunTraffic(wire=local.bytes_sent, dense=dense, steps=self.step)
        self.note = local.pace
        return self._result()
