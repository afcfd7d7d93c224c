"""Messages under way: each from when it left first until it is answered; of questions, the last."""

from __future__ import annotations

from pathlib import Path

import torch

from commlib.server.protocol.messages import Ack, Observe, Pull, Push, Values
from commlib.server.worker.client import RequestTrace
from commlib.telemetry.trace import NONE, Trace
from tests.support.trace_reader import Clock, shown


def push(stamp: int, view: int = 0) -> Push:
    return Push(view, "k", 3, stamp, torch.ones(2))


def ack(stamp: int, view: int = 0, *, refused: bool = False) -> Ack:
    return Ack(view, "k", 3, stamp, refused)


def pull(clock: int, within: int | None = None, view: int = 0) -> Pull:
    return Pull(view, "k", 3, clock, within)


def values(clock: int, within: int | None = None, view: int = 0) -> Values:
    return Values(view, "k", 3, clock, torch.ones(2), {}, within)


class Case:
    """One message a second."""

    def __init__(self) -> None:
        self.clock = Clock(0.0)
        self.trace = Trace(clock=self.clock)
        self.flights = RequestTrace()
        self.flights.trace = self.trace

    def __call__(self, message: Push | Pull | Ack | Values | Observe) -> None:
        self.clock.now += 1
        if isinstance(message, Ack | Values):
            self.flights.came(message)
        else:
            self.flights.leave([("shard", message)])

    def found(self, folder: Path) -> list[tuple[str, float, float, int]]:
        """What, when, and for how long, and the step."""
        self.trace.instant("zero", "zero", 0.0)
        self.trace.save(folder / "t.json")
        return [(name, at / 1e6, s / 1e6, d["step"]) for _, name, at, s, d in shown(folder / "t.json") if s is not None]


def test_a_push_is_under_way_until_it_is_acknowledged_and_a_question_until_its_values_come(tmp_path: Path) -> None:
    case = Case()
    for message in (push(0), pull(1), Observe(0, 3, 0.5), push(1), ack(0), values(1), ack(1, refused=True)):
        case(message)
    assert sorted(case.found(tmp_path)) == [("pull", 2, 4, 1), ("push", 1, 4, 0), ("push", 4, 3, 1)]


def test_what_is_sent_again_in_a_new_view_left_when_it_did_so_first(tmp_path: Path) -> None:
    case = Case()
    for message in (push(0), pull(1), push(0, view=1), pull(1, view=1), ack(0, view=1), values(1, view=1)):
        case(message)
    assert sorted(case.found(tmp_path)) == [("pull", 2, 4, 1), ("push", 1, 4, 0)]


def test_only_a_keys_last_question_is_answered_and_once(tmp_path: Path) -> None:
    case = Case()
    for message in (pull(1), pull(1, within=0), values(1), values(1, within=0), values(1, within=0)):
        case(message)
    assert case.found(tmp_path) == [("pull", 2, 2, 1)]


def test_what_left_before_it_was_recorded_is_not_known_nor_what_comes_afterwards(tmp_path: Path) -> None:
    case = Case()
    case.flights.trace = NONE
    case(push(0))
    case(pull(0))
    case.flights.trace = case.trace
    case(push(1))
    case(ack(0))
    case(values(0))
    case.flights.trace = NONE
    case(ack(1))
    case.flights.trace = case.trace
    case(ack(1))
    assert case.found(tmp_path) == []
