"""Chooser of a sharded model's codecs, on one rank: it notes times, comes to reviews, and says what was decided.

All in the thread of the backward pass, at its end: nothing of this model is under way then, and the next forward pass
has not asked for parameters. The steps until the next review are part of the decision, so all ranks come to it after
the same one, and change codecs before the same one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from commlib.codecs.base import Compressor
from commlib.fsdp.param_groups import ParamGroup
from commlib.fsdp.plan import Choice
from commlib.fsdp.trials import CodecTrials, Turn, UnitTimes
from commlib.groups.coordinator import Coordinator
from commlib.planning.plan import Plan
from commlib.runtime.streams import Moment, moment

log = logging.getLogger("commlib")
_Parts = dict[str, list[tuple[Moment, Moment]]]  # unit → when its gradients were exchanged
_FAILED = Turn(steps=1 << 62, phase="failed")


class CodecChooser:
    """Chooser of one sharded model's codecs.

    Args:
        units: of the model.
        choice: what may be chosen.
        boards: for reviews of the ranks that share the parameters out, and of these ranks' first ones, over the
            replicas; the second only if there are some.
        device: of the parameters.
    """

    def __init__(
        self,
        units: Sequence[ParamGroup],
        choice: Choice,
        boards: Sequence[Coordinator],
        device: torch.device,
    ) -> None:
        self._units, self.choice, self._boards, self._device = units, choice, boards, device
        self._trials = CodecTrials(choice.units({u.name: u.specs for u in units}), list(choice.values))
        self._now = self._trials.first()
        self._left = self._now.steps
        self._step: _Parts = {}
        self._summed = False
        self._noted = list[tuple[Moment, _Parts]]()  # (end, units' parts) of steps, and before these their beginning
        self._begin()

    @contextlib.contextmanager
    def timed(self, unit: str) -> Iterator[None]:
        """A context in which a unit's gradients are exchanged."""
        began = moment(self._device)
        yield
        self._step.setdefault(unit, []).append((began, moment(self._device)))

    def exchanged(self) -> bool:
        """A step has come through. At a review, waits for all ranks.

        Returns:
            Whether there is another decision.

        Raises:
            PeerLost: a rank did not come to the review.
        """
        noted, self._step = self._step, {}
        if self._now.phase == "failed":  # for good: nothing is to be kept
            return False
        self._noted.append((moment(self._device), noted))
        self._summed = self._summed or any(unit.summed for unit in self._units)
        self._left -= 1
        if self._left > 0:
            return False
        before, self._now = self._now, Turn.from_wire(self._review())
        self._left = self._now.steps
        self._begin()  # a review is no part of a step
        return (before.routes, before.values, before.phase) != (self._now.routes, self._now.values, self._now.phase)

    @property
    def settled(self) -> bool:
        """Whether it has chosen, and only watches now."""
        return self._now.phase in ("steady", "failed")

    @property
    def predicted_s(self) -> float | None:
        """Seconds of a step by what is chosen, as the trials had it."""
        return self._now.step_s and self._now.step_s[0]

    def plan(self) -> Plan:
        """The plan as decided."""
        turn, choice = self._now, self.choice
        layers, exact = dict(choice.plain.layers), choice.exact[0]
        for unit in self._units if choice.gradients else ():  # else they go as they were named
            codec = turn.routes.get(unit.name, "")
            for name in unit.specs:
                p = choice.gradients[codec].layers[name] if codec else choice.plain.layers[name]
                why = {"steady": "measured", "failed": "measuring has failed"}.get(turn.phase, "measuring")
                if p.route.plain and codec:
                    why = p.reason
                elif codec and codec == exact:
                    why = f"{why}; nothing is lost: the gradient has no more bits"
                layers[name] = dataclasses.replace(p, reason=why)
        return dataclasses.replace(choice.plain, layers=layers, about="; ".join(self._about()))

    def values(self) -> Mapping[str, Compressor]:
        """Parameter → the codec by which its values come now; others come as they are."""
        return self.choice.values[self._now.values] if self._now.values else self.choice.kept

    def exact(self) -> frozenset[str]:
        """Units whose gradients go by a codec that loses nothing unless they were summed before."""
        codec, _ = self.choice.exact
        return frozenset(unit for unit, by in self._now.routes.items() if by == codec)

    def _about(self) -> Iterator[str]:
        turn, choice = self._now, self.choice
        state = "measuring"
        if turn.phase == "failed":
            state = "as it is: measuring has failed (a rank's log says why)"
        elif turn.step_s is not None:
            state = f"{turn.step_s[0] * 1e3:.4g} ms a step, {turn.step_s[1] * 1e3:.4g} ms without"
        yield f"{choice.policy}: {state}"
        yield from filter(None, [turn.values and f"parameters by {turn.values}", choice.plain.about])

    # -- a review --

    def _begin(self) -> None:
        self._noted, self._summed = [(moment(self._device), {})], False

    def _review(self) -> dict[str, Any]:
        board, *between = self._boards
        return board.review(self._posted(), functools.partial(self._meet, between[0]) if between else self._decide)

    def _posted(self) -> dict[str, Any]:
        """This rank's figures; none if it cannot measure, for which no training shall end."""
        try:
            return self._figures().to_wire()
        except Exception:
            log.exception("a rank cannot measure; from here on all goes as it is")
            return {}

    def _figures(self) -> UnitTimes:
        counted = self._noted[self._now.skip :]  # of the first one only the end is needed
        spans = [after.since(before) for (before, _), (after, _) in itertools.pairwise(counted)]
        units: dict[str, list[float]] = {}
        for _, step in counted[1:]:
            for unit, parts in step.items():
                units.setdefault(unit, []).append(sum(end.since(begin) for begin, end in parts))
        return UnitTimes.of(spans, units, summed=self._summed)

    def _meet(self, between: Coordinator, posts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """The first ranks of all replicas have the very first decide, each with the figures of its own replica."""
        mine = UnitTimes.of_all([UnitTimes(**post) for post in posts]).to_wire() if all(posts) else {}
        return between.review(mine, self._decide)

    def _decide(self, posts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Decide, on the first rank of all."""
        if not all(posts):
            return _FAILED.to_wire()
        try:
            found = UnitTimes.of_all([UnitTimes(**post) for post in posts])
            turn = self._trials.review(found)
            if found.summed:  # such steps go as they are, and maybe not on all ranks: none knows of the others' passes
                kept = {unit: codec for unit, codec in turn.routes.items() if codec != self.choice.exact[0]}
                turn = dataclasses.replace(turn, routes=kept)
        except Exception:  # the others wait for an answer, and to go as it is is always one
            log.exception("the choice of codecs failed; from here on all goes as it is")
            turn = _FAILED
        if turn.said:
            log.info("FSDP2: %s", turn.said)
        return turn.to_wire()
