"""Files of traces: whether they keep the rules of their format, and what is in them."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

FIELDS = {
    "M": {"ph", "name", "pid", "tid", "args"},
    "X": {"ph", "name", "pid", "tid", "args", "ts", "dur"},
    "i": {"ph", "name", "pid", "tid", "args", "ts", "s"},
}
META = {"process_name": str, "thread_name": str, "process_labels": str}


def no_constant(name: str) -> object:
    raise AssertionError(f"{name} is not JSON")


def checked(path: Path) -> list[dict[str, Any]]:
    """The events of a file, if they keep the rules of the Trace Event format.

    Those of the document "Trace Event Format": the object's form, fields by phase, times in µs, metadata for every
    process and thread, one name each; and that the spans of a thread nest.
    """
    found = json.loads(path.read_text(), parse_constant=no_constant)
    assert found["displayTimeUnit"] == "ms"
    events: list[dict[str, Any]] = found["traceEvents"]
    named = defaultdict(list)
    spans = defaultdict(list)
    for e in events:
        assert set(e) == FIELDS[e["ph"]]
        assert isinstance(e["name"], str)
        assert type(e["pid"]) is type(e["tid"]) is int
        assert isinstance(e["args"], dict)
        if e["ph"] == "M":
            ((key, value),) = e["args"].items()
            assert key == {"process_labels": "labels"}.get(e["name"], e["name"].partition("_")[2])
            assert isinstance(value, META.get(e["name"], int))
            named[e["name"], e["pid"], e["tid"]].append(value)
        else:
            assert isinstance(e["ts"], int | float)
            assert "thread_name" in {what for what, pid, tid in named if (pid, tid) == (e["pid"], e["tid"])}
            assert ("process_name", e["pid"], 0) in named
        if e["ph"] == "X":
            assert e["dur"] >= 0
            begin = round(e["ts"] * 1000)
            spans[e["pid"], e["tid"]].append((begin, begin + round(e["dur"] * 1000)))
        assert e.get("s", "t") == "t"
    assert all(len(values) == 1 for values in named.values())
    for those in spans.values():
        for (b1, e1), (b2, e2) in itertools.combinations(those, 2):
            assert e1 <= b2 or e2 <= b1 or b1 <= b2 <= e2 <= e1 or b2 <= b1 <= e1 <= e2
    return events


def shown(path: Path) -> list[tuple[str, str, float, float | None, dict[str, Any]]]:
    """Thread, name, begin and duration in µs (None: an instant) and details, in the order of the file."""
    events = checked(path)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    return [(names[e["pid"], e["tid"]], e["name"], e["ts"], e.get("dur"), e["args"]) for e in events if e["ph"] != "M"]


Spans = dict[str, dict[str, list[tuple[int, int]]]]
"""Of a file: row → name → (begin, end) in ns."""


def spans(path: str | Path) -> Spans:
    """All of it; an instant ends as it begins, and what overlaps in a row is in it all the same."""
    found: Spans = defaultdict(lambda: defaultdict(list))
    for thread, name, begin, seconds, _ in shown(Path(path)):
        at = round(1000 * begin)
        found[thread.partition(" (")[0]][name].append((at, at + round(1000 * (seconds or 0.0))))
    for row in found.values():
        for those in row.values():
            those.sort()
    return found


def inside(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


class Clock:
    """One that stands until it is set."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
