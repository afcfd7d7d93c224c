"""Rank 0's head: from figures to decisions. A pure state machine, which sees neither clocks nor other ranks.

::

    watch ── some dense steps ──▶ proof: a layer whose rows do not make its gradient stays dense
                 │                  │
                 │                  ▼
                 │                trial ── clearly faster ──▶ steady ── steps take longer or shorter ──▶ probe
                 │                 │  ▲                         ▲  ▲                                        │
                 │       not clear ▼  │                         │  └── the link is as it was, or the plan ───┤
                 │               dense again  ── it lost ──▶ trial of the better half, or dense             │
                 └── nothing is worth changing ──▶ steady            trial of another plan ◀── the link ────┘

A plan that takes little over half of the time is believed at once, one that wins clearly when it does so after further
dense steps (those before may have been the first of all, which take longer). One that wins by little must do so in the
median of three rounds, dense and planned in turn: so it is never kept if it is slower than DDP.
"""

from __future__ import annotations

import dataclasses
import math
import statistics

from commlib.exchange.registry import BY_ROWS
from commlib.messaging.link_model import Link
from commlib.planning.cost.choose import RouteChoice, mbit, ms, some
from commlib.planning.manager.candidates import CandidateModel, by_gain, routes
from commlib.planning.manager.decision import Decision
from commlib.planning.manager.measurements import Measurements
from commlib.planning.manager.predictor import Predictor

_FIRST = 0.6  # of the dense step's time: faster than that is believed at once, though a job's first steps are slow
_CLEAR = 0.9  # the same where dense steps were made between two trials: faster than that needs no further round
_WON = 0.98
_ROUNDS = 3
_REFINEMENTS = 2
_DRIFT = 1.2  # steps this much longer or shorter are a reason to look at the link
_SURE = 1.4  # so much is no chance, if it is so again in the next few steps
_AGAIN = 5  # so many
_WIRE_DRIFT = 1.4  # the same of the time on the wire, which varies more
_WIRE_SHARE = 0.05  # of a step, below which nobody looks at it
_OTHER_LINK = 1.2
_PROBE_SHARE = 0.01  # of all time, for probes
_RESERVE = 2  # probes that may be made in advance of it, the second only where steps have changed for sure


def _unproved(off: float) -> str:
    """Why a layer stays dense for good."""
    if off < 0:
        return "stays dense: in a step that was to prove it, it had gradient besides that of its rows"
    return f"stays dense: its rows made another gradient than it has, {off:.3g} times as far off as rounding explains"


def _samples(span: float, seconds: float, least: int, most: int) -> int:
    """Steps that take about so many seconds."""
    return max(least, min(most, int(seconds / span))) if span > 0 else most


class Controller:
    """Controller of the bandwidth manager: the states above.

    Args:
        model: prices what it may choose.
    """

    def __init__(self, model: CandidateModel) -> None:
        self._known = Predictor(model)
        self._refined = 0  # times that a trial has shown a better plan
        self._choice: RouteChoice | None = None
        self._barred: dict[str, str] = {}
        self._never: dict[str, str] = {}  # layers whose rows do not make their gradient
        self._proved: set[tuple[str, str]] = set()  # (layer, route)
        self._ratios: list[float] = []  # planned / dense, of this trial's rounds
        self._reference: Measurements | None = None  # what steady steps have been like
        self._doubted: Measurements | None = None  # the reference before a probe, until one is believed
        self._now = Decision()
        self._looked_again = False
        self._suspected = False  # the last review has found steps to be others for sure
        self._credit = float(_RESERVE)  # probes that may be made
        self._probe_s = math.inf  # seconds that the last probe took, products and all

    def first(self) -> Decision:
        """Before any review; the same on every rank."""
        return self._now

    def review(self, f: Measurements) -> Decision:
        """The next decision.

        Args:
            f: the slowest rank's figures of the steps since the last.
        """
        if f.link is not None and self._now.phase != "steady":
            self._known.link = f.link
        if f.link is not None:
            self._probe_s = f.probe_s
        self._known.computed(f)
        if f.steps == 0:  # they broke off, or no forward pass went through DDP
            self._now = dataclasses.replace(self._now, steps=max(2, self._now.steps), said="")
            return self._now
        turn = {
            "watch": self._watched,
            "proof": self._compared,
            "trial": self._tried,
            "dense again": self._dense_again,
        }
        self._now = turn.get(self._now.phase, self._steady)(f)
        return self._now

    # -- one method a state --

    def _watched(self, f: Measurements) -> Decision:
        self._known.dense_steps(f, watched=True)
        self._refined = 0
        more = _samples(f.span, 2.0, 1, 20)
        if more > f.steps and not self._looked_again:
            self._looked_again = True
            return Decision(steps=more, skip=0, probe=False)
        return self._plan("", None)  # they may have been the first of all: nothing to hold later ones against

    def _compared(self, f: Measurements) -> Decision:
        """After a step in which rows were exchanged beside the true gradients, by which the model was trained."""
        wrong = {name: off for name, off in f.differs.items() if not 0 <= off <= 1}
        self._proved |= {(n, r) for n, r in self._now.routes.items() if n not in wrong}
        if not wrong:
            return self._try("")
        self._never |= {n: _unproved(off) for n, off in wrong.items()}
        return self._plan(f"stays dense, for its rows do not make its gradient: {some(sorted(wrong))}", None)

    def _tried(self, f: Measurements) -> Decision:
        assert self._known.dense is not None
        assert self._choice is not None
        self._ratios.append(f.span / self._known.dense.span)
        better = self._refine(f)
        if better is not None:
            return better
        if self._ratios[-1] < (_CLEAR if len(self._ratios) > 1 else _FIRST):
            return self._settle(f"the plan takes {ms(f.span)} a step, dense took {ms(self._known.dense.span)}", f)
        if len(self._ratios) < _ROUNDS and statistics.median(self._ratios) < 1.1:
            n = _samples(self._known.dense.span, 1.0, 2, 20)
            return dataclasses.replace(self._say(None), phase="dense again", steps=n + 1, watch=True)
        ratio = statistics.median(self._ratios)
        if ratio < _WON:
            return self._settle(f"the plan takes {ratio:.2f} of dense's time, in the median of {_ROUNDS} rounds", f)
        return self._retreat(ratio, f)

    def _dense_again(self, f: Measurements) -> Decision:
        assert self._known.dense is not None
        if len(self._ratios) == 1:  # what came before it may have been the first steps of all, which take longer
            self._ratios[0] *= self._known.dense.span / f.span
        self._known.dense_steps(f, watched=False)
        return self._try("")

    def _steady(self, f: Measurements) -> Decision:
        now = dataclasses.replace(self._now, said="", probe=False, skip=0, steps=_samples(f.span, 2.0, 10, 30))
        if f.link is not None:
            return self._probed(f, f.link)
        earned = _PROBE_SHARE * f.steps * (f.span + f.rest) / max(self._probe_s, 1e-9)
        self._credit = min(_RESERVE, self._credit + earned)
        ref = self._reference
        if ref is None:
            self._reference = f
            return now
        slower = not 1 / _DRIFT < f.span / ref.span < _DRIFT
        wire = min(f.wire, ref.wire) > 0 and max(f.wire, ref.wire) > _WIRE_SHARE * f.span
        drifted = slower or (wire and not 1 / _WIRE_DRIFT < f.wire / ref.wire < _WIRE_DRIFT)
        sure = not 1 / _SURE < f.span / ref.span < _SURE
        suspected, self._suspected = self._suspected, sure
        if drifted and self._credit >= (1 if sure and suspected else _RESERVE):
            self._credit -= 1
            self._suspected = False
            self._doubted = ref if self._doubted is None else None
            self._reference = f  # if it is not the link, this is what steps are like now
            said = f"steps take {ms(f.span)} instead of {ms(ref.span)}: measuring the link"
            return dataclasses.replace(now, probe=True, steps=1, said=said)
        return dataclasses.replace(now, steps=_AGAIN) if sure else now

    def _probed(self, f: Measurements, link: Link) -> Decision:
        dense_now, before, dense = not self._now.routes, self._known.link, self._known.dense
        assert before is not None
        was, now = before.all_reduce.beta, link.all_reduce.beta
        change = now / was if was else math.inf if now else 1.0  # of none that shows, one that does is another
        if (least := self._least_s(link)) > _SURE * f.span:
            if self._doubted is not None:  # something was in the way: the next review measures again, but once
                self._reference = self._doubted
            return self._stay(f"not believed: {mbit(link)}, with which a step could not take less than {ms(least)}")
        self._doubted = None
        if 1 / _OTHER_LINK < change < _OTHER_LINK:
            if dense_now or dense is None or f.span < _CLEAR * dense.span:
                return self._stay("the link is as it was")
            self._looked_again = False  # arithmetic has become slower: does the plan still win?
            return Decision(probe=False, said="the link is as it was, but steps take longer: all dense for a while")
        self._known.link, self._barred = link, {}
        if dense is not None:
            if dense_now:
                self._known.dense_steps(dataclasses.replace(dense, span=f.span), watched=False)
            else:  # nobody has seen a dense step on this link
                self._known.dense = dataclasses.replace(dense, span=self._known.choose({}).dense_s)
        return self._plan(f"the link has {mbit(link)} instead of {mbit(before)}", f)

    def _least_s(self, link: Link) -> float:
        """Seconds that a step's bytes take on a link by the routes as they are."""
        if self._choice is None:
            return 0.0
        return self._known.least_s(self._choice.ways if self._now.routes else self._choice.dense, link)

    # -- what they decide --

    def _plan(self, said: str, f: Measurements | None) -> Decision:
        """Choose for what is known, and try it unless it is what is done already.

        ``f``: what steps are like now, if that is known.
        """
        assert self._known.dense is not None
        if self._known.link is None:
            return self._settle("nothing was measured", f)
        self._choice = self._known.choose(self._barred | self._never)
        self._ratios = []
        changed = routes(self._choice, self._known.dense.seen)
        predicted = f"predicted {ms(self._choice.seconds)} a step, all dense {ms(self._choice.dense_s)}"
        what = f"{len(changed)} layers by other routes than dense" if changed else "all layers dense"
        said = "; ".join(filter(None, [said, f"{what} ({predicted})"]))
        if not changed or changed == dict(self._now.routes):
            return self._settle(said, f if changed == dict(self._now.routes) else None)
        return self._try(said)

    def _refine(self, f: Measurements) -> Decision | None:
        """Plan anew with what the trial has shown of the backward pass, which the dense exchange held up.

        Returns:
            The trial of a better plan, or None if there is none. The predictions are new in any case.
        """
        assert self._known.dense is not None
        assert self._choice is not None
        if len(self._ratios) > 1 or not f.buckets:
            return None
        self._known.trial_steps(f, self._choice.ways)
        choice = self._known.choose(self._barred | self._never)
        changed = routes(choice, self._known.dense.seen)
        if changed == routes(self._choice, self._known.dense.seen):
            self._choice = self._known.took(choice, f.span)
        elif changed and choice.seconds < _WON * f.span and self._refined < _REFINEMENTS:
            self._refined += 1
            self._choice, self._ratios = choice, []
            return self._try(
                f"a trial has shown more: now {len(changed)} layers (predicted {ms(choice.seconds)} a step)"
            )
        return None

    def _try(self, said: str) -> Decision:
        assert self._choice is not None
        planned = self._say(self._choice)
        unproved = set(planned.routes.items()) - self._proved
        if any(route.rpartition("@")[2] in BY_ROWS for _, route in unproved):
            return dataclasses.replace(planned, phase="proof", steps=1, skip=0, watch=True, said=said)
        n = _samples(self._choice.seconds, 1.0, 3, 20)  # of three one may be slow
        return dataclasses.replace(self._say(self._choice), phase="trial", steps=n + 1, watch=True, said=said)

    def _retreat(self, ratio: float, f: Measurements) -> Decision:
        """Leave the half that promises most, or nothing, after a plan that lost."""
        assert self._choice is not None
        planned = by_gain(self._choice)
        lost = planned[len(planned) // 2 :]
        why = f"lost in practice: with it a step took {ratio:.2f} of dense's time"
        self._barred |= dict.fromkeys(lost, why)
        return self._plan(f"back to dense, for it {why}: {some(lost)}", f)

    def _settle(self, said: str, f: Measurements | None) -> Decision:
        """Stay with what is chosen; ``f`` is what its steps are like, if any were made."""
        self._reference = f
        steps = 10 if f is None else _samples(f.span, 2.0, 10, 30)
        return dataclasses.replace(
            self._say(self._choice), phase="steady", steps=steps, skip=0, probe=False, watch=False, said=said
        )

    def _stay(self, said: str) -> Decision:
        return dataclasses.replace(self._now, said=said, probe=False, steps=10)

    def _say(self, choice: RouteChoice | None) -> Decision:
        """Routes, reasons and predictions of a choice; None is all dense."""
        if self._choice is None or self._known.dense is None:
            return Decision(probe=False)
        shown = self._choice
        changed = routes(choice, self._known.dense.seen) if choice is not None else {}
        rows = {n: self._known.dense.rows[n] for n in changed if n in self._known.dense.rows}
        seconds = (shown.seconds if changed else shown.dense_s) + self._known.dense.rest
        ways = shown.ways if changed else shown.dense
        return Decision(
            routes=changed,
            rows=rows,
            probe=False,
            watch=False,
            why={**shown.reasons, **self._barred, **self._never},
            predicted={n: way.alone_s for n, way in ways.items()},
            step_s=(seconds, shown.dense_s + self._known.dense.rest),
        )
