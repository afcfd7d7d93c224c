"""Predictor of rank 0: what it knows of link, cores and backward pass, and what follows from that. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from commlib.messaging.link_model import Link
from commlib.planning.cost.choose import RouteChoice
from commlib.planning.cost.overlap import TrainingPass, undisturbed
from commlib.planning.cost.route_cost import Candidate
from commlib.planning.manager.candidates import CandidateModel, routes
from commlib.planning.manager.codec_cost import CodecCost
from commlib.planning.manager.measurements import Measurements


class Predictor:
    """Grows with every review.

    Args:
        model: prices what may be chosen.

    Attributes:
        dense: the last steps that were all dense; on another link since, only their time is made up.
    """

    def __init__(self, model: CandidateModel) -> None:
        self.dense: Measurements | None = None
        self._model = model
        self._link: Link | None = None
        self._pass: TrainingPass | None = None
        self._slower, self._missing_s = 1.0, 0.0  # Model.calibrate
        self._surplus: dict[_Key, float] = {}  # plan → seconds its trial took beyond its prediction
        self._products: dict[str, tuple[float, float]] = {}
        self._codecs: dict[str, CodecCost] = {}

    @property
    def link(self) -> Link | None:
        """As last probed."""
        return self._link

    @link.setter
    def link(self, link: Link) -> None:
        self._link = link
        if self._pass is not None:
            self._pass = dataclasses.replace(self._pass, drag=link.drag)

    def computed(self, f: Measurements) -> None:
        """Take over the measurements of arithmetic."""
        self._products |= f.products
        self._codecs |= f.codecs

    def dense_steps(self, f: Measurements, *, watched: bool) -> None:
        """Steps that were all dense; ``watched``: of which the pass is to be known anew."""
        self.dense = f
        if watched:
            self._pass = self._model.seen(f)
        if self._link is None or self._pass is None:
            return
        self._calibrate()
        if watched:  # by the link as it really was: so that the same step comes out of what its pass would have been
            self._undo(self._pass, self._model.dense(self._pass, self._link.slower(self._slower)))

    def trial_steps(self, f: Measurements, ways: Mapping[str, Candidate]) -> None:
        """Steps in which units took these ways: their pass was held up by other transfers than a dense one."""
        self._undo(self._model.seen(f), ways)
        self._calibrate()
        self._surplus = {}

    def choose(self, barred: Mapping[str, str]) -> RouteChoice:
        """The routes for what is known; ``barred``: units that stay dense, and why."""
        assert self.dense is not None
        assert self._pass is not None
        assert self._link is not None
        link, costs = self._link.slower(self._slower), (self._products, self._codecs)
        choice = self._model.choose(self._pass, self.dense, link, *costs, barred, self._missing_s)
        surplus = self._surplus.get(self._key(choice), 0.0)
        return dataclasses.replace(choice, seconds=max(choice.seconds + surplus, choice.seconds / 2))

    def took(self, choice: RouteChoice, seconds: float) -> RouteChoice:
        """The choice as its trial came out; remembered, for as long as the pass is."""
        self._surplus[self._key(choice)] = seconds - choice.seconds
        return dataclasses.replace(choice, seconds=seconds)

    def least_s(self, ways: Mapping[str, Candidate], link: Link) -> float:
        """Seconds that the bytes of these ways take on a link at the least."""
        return link.slower(self._slower).least_beta * sum(w.sent for w in ways.values())

    def _undo(self, seen: TrainingPass, ways: Mapping[str, Candidate]) -> None:
        assert self._link is not None
        self._pass = undisturbed(seen, ways, self._link.drag)

    def _calibrate(self) -> None:
        assert self.dense is not None
        assert self._pass is not None
        assert self._link is not None
        self._slower, self._missing_s = self._model.calibrate(self._pass, self.dense.span, self._link)

    def _key(self, choice: RouteChoice) -> _Key:
        return tuple(routes(choice, {} if self.dense is None else self.dense.seen).items())


_Key = tuple[tuple[str, str], ...]
