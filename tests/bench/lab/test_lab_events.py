"""What a schedule says, and that every slip in one is named."""

from __future__ import annotations

import pytest

from commlib.bench.lab.events import Event, parse_event, parse_schedule


@pytest.mark.parametrize(
    ("text", "event"),
    [
        ("10:50mbit", Event(10.0, "rate", None, 5e7)),
        ("0.5:2=1gbit", Event(0.5, "rate", 2, 1e9)),
        ("3:h1=unlimited", Event(3.0, "rate", 1, None)),
        ("3:unlimited", Event(3.0, "rate", None, None)),
        ("20:cut=2", Event(20.0, "cut", 2)),
        ("30:heal=h2", Event(30.0, "heal", 2)),
        ("40:kill=0", Event(40.0, "kill", 0)),
    ],
)
def test_an_event_is_read(text: str, event: Event) -> None:
    assert parse_event(text, 3) == event


@pytest.mark.parametrize(
    "text",
    ["", "10", "50mbit", "x:50mbit", "-1:50mbit", "inf:50mbit", "1:", "1:cut", "1:cut=3", "1:3=50mbit", "1:melt=0"],
)
def test_what_is_no_event_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"--at|rate|link"):
        parse_event(text, 3)


def test_a_schedule_is_in_order_of_time_and_keeps_the_order_given_within_one() -> None:
    events = parse_schedule(["9:cut=1", "2:50mbit", "9:10mbit", "0:heal=0"], 2)
    assert [str(e) for e in events] == ["heal h0", "every link at 50mbit", "cut h1", "every link at 10mbit"]
