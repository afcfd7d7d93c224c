"""The manager on one rank: it notes down steps, comes to reviews, and does what was decided.

All in the thread of the backward pass. A review is held when an exchange has come through, so nothing of this model is
under way; what it measures travels on process groups that nothing else uses then: that of the rows' first rounds, and
under a hierarchy those of its levels (:meth:`commlib.exchange.sequencer.GroupTable.first`). The
exchanges until the next review are part of the decision, so all ranks come to it after the same one.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from commlib.errors import CommlibError
from commlib.exchange.factors.layers import FactorLayers
from commlib.groups.coordinator import Coordinator
from commlib.groups.world import World
from commlib.planning.manager.candidates import CandidateModel
from commlib.planning.manager.codec_cost import CodecCost, measure
from commlib.planning.manager.controller import Controller
from commlib.planning.manager.decision import Decision
from commlib.planning.manager.link_probe import LinkProbe, measure_product
from commlib.planning.manager.measurements import Measurements, StepMeasurements, slowest
from commlib.planning.plan import Plan
from commlib.planning.route import Route, resolve
from commlib.runtime.layers import LayerSpec
from commlib.runtime.streams import Moment, moment, when_done
from commlib.telemetry.stats import Meter
from commlib.telemetry.trace import NONE, Trace

log = logging.getLogger("commlib")
_FAILED = Decision(steps=1 << 62, watch=False, probe=False, phase="failed")
_ALL_DENSE = "dense: measuring has failed (a rank's log says why)"


class RouteOptions(Protocol):
    """The routes that a manager chooses among, and for which parameters: the part of ``Setup`` that it uses."""

    @property
    def specs(self) -> Sequence[LayerSpec]:
        """Specs of all trained parameters."""

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""

    @property
    def choice(self) -> Mapping[str, Plan]:
        """Route → the plan in which everything goes by it that can."""

    @property
    def policy(self) -> str:
        """The policy in words."""


class Manager:
    """Chooses routes for the layers that have several.

    Args:
        options: the parameters, and the routes to choose among.
        factors: taps on the linear layers whose rows can be sent; it makes none of them active until it has decided.
        board: for its reviews.
        probe: of the link, on process groups that carry nothing else while no exchange is under way.
        world: this rank.
        meters: of all parameters.
        note: what there is to say of its plans besides.
    """

    def __init__(
        self,
        options: RouteOptions,
        factors: FactorLayers,
        board: Coordinator,
        probe: LinkProbe,
        world: World,
        meters: Mapping[str, Meter],
        note: str = "",
    ) -> None:
        self._factors, self._board, self._probe, self._world = factors, board, probe, world
        self._meters, self._note = meters, note
        self._choice, self._policy, self._device = options.choice, options.policy, options.device
        self._routes = {name: resolve(name, world.size) for name in options.choice}
        compressed = {name: plan for name, plan in options.choice.items() if not self._routes[name].codec.lossless}
        self._model = CandidateModel(options.specs, factors.names, compressed, options.choice.get("push_pull"))
        self._dtypes = {s.layer: s.dtype for s in options.specs}
        self._codecs: dict[str, CodecCost] = {}
        self._pilot = Controller(self._model)
        self._sheet = StepMeasurements(functools.partial(moment, options.device))
        self._rows: dict[str, int] = {}
        self._count = 0
        self._before = 0, {name: _seconds(meter) for name, meter in meters.items()}
        self.decision = self._pilot.first()
        factors.observer = self._sheet
        self.trace: Trace = NONE
        self._take(self.decision)

    # -- what the hook tells --

    def bucket(self, parameters: Sequence[str]) -> None:
        """DDP hands over a bucket of these parameters."""
        if parameters[0] in self._model.unit_of:  # a sparse one is by itself, and has no choice of routes
            self._sheet.bucket(tuple(parameters))

    def backward_ended(self) -> None:
        """But the exchange has not."""
        self._sheet.backward_ended()

    def saw(self, ended: Moment, buckets: Sequence[tuple[Moment | None, tuple[str, ...]]]) -> None:
        """Take note of an exchange that DDP has made by itself, as of one by a hook."""
        for at, names in buckets:
            self._sheet.bucket(names, at)
        self._sheet.backward_ended(ended)

    def exchanged(self) -> bool:
        """Everything of this step has come through. At a review, waits for all ranks.

        Returns:
            Whether the decision is another one.

        Raises:
            PeerLost: a rank did not come to the review.
        """
        self._sheet.end()
        self._count += 1
        self._left -= 1
        if self._left > 0:
            return False
        before = self.decision
        with self.trace.measure("manager", "review"):
            self._take(Decision.from_wire(self._board.review(self._posted(), self._decide)))
        if self.decision.said:
            self.trace.instant("manager", self.decision.phase, said=self.decision.said)
        self._sheet.resume()
        return not self.decision.plans_as(before)

    @property
    def settled(self) -> bool:
        """Whether it has chosen, and only watches now."""
        return self.decision.phase in ("steady", "failed")

    @property
    def predicted_s(self) -> float | None:
        """Seconds of a step with the routes as they are."""
        return self.decision.step_s and self.decision.step_s[0]

    def plan(self, now: Plan) -> Plan:
        """The plan as decided, from the one so far. From here on the time of its routes is counted."""
        d = self.decision
        unsaid = _ALL_DENSE if d.phase == "failed" else "measuring"
        self._before = self._count, {name: _seconds(m) for name, m in self._meters.items()}
        layers = {}
        for name, p in now.layers.items():
            if p.spec.sparse:
                layers[name] = p
                continue
            unit = self._model.unit_of[name]
            own = unit == name or p.spec.kind == "linear.weight"
            why = d.why.get(unit, unsaid) if own else "goes with its weight"
            seconds = d.predicted.get(unit) if own else None
            spec = dataclasses.replace(p.spec, rows=d.rows.get(unit)) if own else p.spec
            route = p.dense
            if unit in d.routes:
                by = self._choice[d.routes[unit]].layers[name]
                left = not own and by.route.exchange == "dense" and by.route.codec.lossless
                route, why = by.route, by.reason if left else why
            layers[name] = dataclasses.replace(p, spec=spec, route=route, reason=why, predicted_s=seconds)
        return dataclasses.replace(now, layers=layers, about=self.about())

    def measured(self, now: Plan) -> Plan:
        """The plan with the time that each layer's exchange has taken since its routes were chosen."""
        count, before = self._before
        if count == self._count:
            return now
        layers = {}
        for name, p in now.layers.items():
            seconds = (_seconds(self._meters[name]) - before.get(name, 0.0)) / (self._count - count)
            layers[name] = dataclasses.replace(p, measured_s=seconds)
        return dataclasses.replace(now, layers=layers)

    def about(self) -> str:
        """The state of affairs in a line."""
        d = self.decision
        said = f"{self._policy}: {_ALL_DENSE if d.phase == 'failed' else 'measuring dense steps'}"
        if d.step_s is not None:
            planned, dense = (f"{seconds * 1e3:.4g} ms" for seconds in d.step_s)
            said = f"{self._policy} ({d.phase}): predicted {planned} a step, all dense {dense}"
        return "; ".join(filter(None, [said, self._note]))

    # -- a review --

    def _posted(self) -> dict[str, Any]:
        """This rank's figures; none if it cannot measure, for which no training shall end.

        The link is measured first, and by all ranks: a rank that failed before it would leave the others waiting.
        """
        probed: dict[str, Any] = {}
        began = time.perf_counter()
        if self.decision.probe:
            probed["link"] = self._probe.link()
        try:
            return self._figures(began, probed).to_wire()
        except Exception:
            log.exception("rank %d cannot measure; from here on all layers are dense", self._world.rank)
            return {}

    def _figures(self, began: float, measured: dict[str, Any]) -> Measurements:
        steps = self._sheet.take()[self.decision.skip :]
        for step in steps:
            for name, count in step.rows.items():
                self._rows[name] = max(count, self._rows.get(name, 0))
        measured["wire"] = (self._wire() - self._wire_before) / self.decision.steps
        if self.decision.probe:
            measured["products"] = self._products()
            measured["probe_s"] = time.perf_counter() - began
            measured["codecs"] = self._codecs = self._codecs or self._costs()  # they do not depend on the link
        if self.decision.phase == "proof":
            measured["differs"] = self._factors.differences()
        terms = self._factors.terms()
        return Measurements.of(steps, arithmetic="; ".join(terms.values()), **measured)

    def _products(self) -> dict[str, tuple[float, float]]:
        found = {}
        for name, (n, m, rows) in self._model.worth_measuring(self._rows, self._world.size).items():
            dtype = self._dtypes.get(name, torch.float32)
            counts = (rows, self._world.size * rows)
            local, rebuilt = (measure_product(n, m, k, dtype, self._device) for k in counts)
            found[name] = (local, rebuilt)
        return found

    def _costs(self) -> dict[str, CodecCost]:
        found = {}
        for name, route in self._routes.items():
            if not route.codec.lossless:
                timed = Route("gather", route.codec) if route.by_rows else route  # every rank decodes them all
                found[name] = measure(timed, self._world, self._device, functools.partial(when_done, self._device))
        return found

    def _wire(self) -> float:
        """Seconds that collectives were under way since attach, one after another."""
        return sum(m.seconds()["wire"] for m in self._meters.values())

    def _decide(self, posts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Decide, on rank 0 only."""
        if not all(posts):
            return _FAILED.to_wire()
        try:
            decision = self._pilot.review(slowest([Measurements.from_wire(p) for p in posts]))
        except CommlibError:
            raise
        except Exception:  # the others wait for an answer, and dense is always one
            log.exception("the manager failed; from here on all layers are dense")
            decision = _FAILED
        if decision.said:
            log.info("after %d exchanges: %s", self._count, decision.said)
        return decision.to_wire()

    def _take(self, decision: Decision) -> None:
        self.decision = decision
        self._left = decision.steps
        self._wire_before = self._wire()
        self._factors.watch = decision.watch
        routes = {name: self._routes[r] for name, r in decision.routes.items()}
        by_rows = {name: r for name, r in routes.items() if r.by_rows}
        prove = [name for name, r in by_rows.items() if r.codec.lossless] if decision.phase == "proof" else []
        self._factors.activate(by_rows, decision.rows, prove)


def _seconds(meter: Meter) -> float:
    return sum(meter.seconds().values())
