"""A recorder of what happens when, as a file that Perfetto (ui.perfetto.dev) and chrome://tracing open.

::

    trace = Trace(rank=0)
    with trace.measure("compute", "backward", layer="fc1"):
        ...
    trace.span("wire", "push", begin, trace.now(), bytes=4096)
    trace.save("rank-0.json")
    merge(["rank-0.json", "rank-1.json"], "all.json")

What takes a ``Trace`` and got none takes :data:`NONE`, and asks ``trace.enabled`` before it works anything out for it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from commlib.errors import CommlibError

_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


class TraceFailed(CommlibError):
    """A trace that cannot be saved, read or merged; it says which file, and why."""


class _Event(NamedTuple):
    number: int
    track: str
    name: str
    begin: float
    end: float | None  # None: an instant
    details: Mapping[str, object]


class Trace:
    """Spans and instants on tracks, the newest of them. Any thread may add to it, without a lock.

    Args:
        rank: whose; the process that viewers show.
        limit: events that are kept; of more, the oldest are dropped and counted.
        clock: seconds; what it says is ``now()``.
        origin: of the clock, a moment that is the same for all ranks, and zero in their files. None: the first event's,
            and its time of day is written down, by which :func:`merge` brings ranks together as well as their hosts'
            clocks agree.
        wall: the time of day, in seconds since 1970.

    Raises:
        ValueError: a rank below 0, or a limit below 1.
    """

    enabled = True
    """Whether anything is recorded."""

    def __init__(
        self,
        rank: int = 0,
        *,
        limit: int = 1 << 18,
        clock: Callable[[], float] = time.perf_counter,
        origin: float | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        if rank < 0 or limit < 1:
            raise ValueError(f"a trace needs a rank ≥ 0 and a limit ≥ 1, got {rank} and {limit}")
        self.rank, self.now = rank, clock
        self._origin, self._to_wall = origin, wall() - clock()
        # Both are one step of the interpreter: no event is lost or counted twice, whoever adds at the same time.
        self._events: deque[_Event] = deque(maxlen=limit)
        self._number = itertools.count()

    def span(self, track: str, name: str, begin: float, end: float, /, **details: object) -> None:
        """Something that took from ``begin`` to ``end``, of the clock.

        The details are shown with it: numbers and texts; of anything else, what ``str`` makes of it when it is saved.

        Raises:
            ValueError: it ends before it begins, or a time is not finite.
        """
        if not -math.inf < begin <= end < math.inf:
            raise ValueError(f"span {name!r} from {begin} to {end}")
        self._events.append(_Event(next(self._number), track, name, begin, end, details))

    def instant(self, track: str, name: str, at: float | None = None, /, **details: object) -> None:
        """Something that happened at a moment of the clock; None: now.

        Raises:
            ValueError: the time is not finite.
        """
        at = self.now() if at is None else at
        if not -math.inf < at < math.inf:
            raise ValueError(f"instant {name!r} at {at}")
        self._events.append(_Event(next(self._number), track, name, at, None, details))

    def measure(self, track: str, name: str, /, **details: object) -> contextlib.AbstractContextManager[None]:
        """A span from entering to leaving; with ``error`` among its details if it is left by one."""
        return _Measure(self, track, name, details)

    @property
    def dropped(self) -> int:
        """Events that had to make room."""
        return _lost(self._copy())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes what is kept, at once: whoever reads the file finds the old one or the new one.

        Raises:
            TraceFailed: it cannot be written; what was there before still is.
        """
        events = self._copy()
        zero = self._origin if self._origin is not None else min((e.begin for e in events), default=self.now())
        since = None if self._origin is not None else zero + self._to_wall
        _write(Path(path), _rows(events, self.rank, zero), {str(self.rank): {"dropped": _lost(events)}}, since)

    def _copy(self) -> list[_Event]:
        while True:
            with contextlib.suppress(RuntimeError):  # another thread added one meanwhile
                return list(self._events)


class _Measure(contextlib.AbstractContextManager[None]):
    __slots__ = ("_begin", "_details", "_name", "_trace", "_track")

    def __init__(self, trace: Trace, track: str, name: str, details: dict[str, object]) -> None:
        self._trace, self._track, self._name, self._details = trace, track, name, details

    def __enter__(self) -> None:
        self._begin = self._trace.now()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        end = self._trace.now()
        details = self._details if kind is None else {**self._details, "error": kind.__name__}
        self._trace.span(self._track, self._name, self._begin, end, **details)


class _Off(Trace):
    enabled = False

    def span(self, track: str, name: str, begin: float, end: float, /, **details: object) -> None:
        pass

    def instant(self, track: str, name: str, at: float | None = None, /, **details: object) -> None:
        pass

    def measure(self, track: str, name: str, /, **details: object) -> contextlib.AbstractContextManager[None]:
        return _NOTHING

    def save(self, path: str | os.PathLike[str]) -> None:
        pass


NONE: Trace = _Off()
"""For those that are not asked to record: the same methods, which do nothing."""


def merge(paths: Sequence[str | os.PathLike[str]], into: str | os.PathLike[str]) -> None:
    """Several ranks' files as one, on one time: that of their origins, or of their hosts' clocks.

    Args:
        paths: what :meth:`Trace.save` or this wrote.
        into: a file that may be one of them.

    Raises:
        TraceFailed: one cannot be read or is no trace, two have the same rank, or only some had an origin given.
    """
    whose: dict[int, object] = {}
    files = []
    for path in map(str, paths):
        events, ranks, since = _load(path)
        for pid in {event["pid"] for event in events}:
            if pid in whose:
                raise TraceFailed(f"{whose[pid]} and {path} are both of rank {pid}: give each rank's file once")
            whose[pid] = path
        files.append((events, ranks, since))
    starts = [since for _, _, since in files if since is not None]
    if starts and len(starts) < len(files):
        odd = [path for path, (_, _, since) in zip(map(str, paths), files, strict=True) if since is None]
        raise TraceFailed(f"{', '.join(odd)}: with an origin that was given, and the others without: no common time")
    first = min(starts, default=None)
    rows = (
        {**e, "ts": (round(1e3 * e["ts"]) + round(1e9 * ((since or 0) - (first or 0)))) / 1e3} if "ts" in e else e
        for events, _, since in files
        for e in events
    )
    _write(Path(into), rows, {rank: said for _, ranks, _ in files for rank, said in ranks.items()}, first)


def _lost(events: Sequence[_Event]) -> int:
    return max((e.number for e in events), default=-1) + 1 - len(events)


def _rows(events: Sequence[_Event], rank: int, zero: float) -> Iterator[dict[str, Any]]:
    """Events of the format; times in µs, rounded to nanoseconds before anything is compared."""

    def about(what: str, tid: int, **args: object) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": rank, "tid": tid, "args": args}

    yield about("process_name", 0, name=f"rank {rank}")
    yield about("process_sort_index", 0, sort_index=rank)
    if _lost(events):
        yield about("process_labels", 0, labels=f"{_lost(events)} older events dropped")
    tracks: dict[str, list[_Event]] = {}
    for event in sorted(events):  # as they came
        tracks.setdefault(event.track, []).append(event)
    tid = 0
    for track, those in tracks.items():
        timed = [
            (round((e.begin - zero) * 1e9), round(((e.begin if e.end is None else e.end) - zero) * 1e9), e)
            for e in those
        ]
        for number, lane in enumerate(_lanes(timed)):
            tid += 1  # not 0, which is the idle thread to some viewers
            yield about("thread_name", tid, name=f"{track} ({number + 1})" if number else track)
            yield about("thread_sort_index", tid, sort_index=tid)
            for begin, end, e in lane:
                args = {key: _plain(value) for key, value in e.details.items()}
                row = {"name": e.name, "pid": rank, "tid": tid, "ts": begin / 1000, "args": args}
                yield row | ({"ph": "i", "s": "t"} if e.end is None else {"ph": "X", "dur": (end - begin) / 1000})


_Timed = tuple[int, int, _Event]


def _lanes(events: list[_Timed]) -> list[list[_Timed]]:
    """Spans of a lane nest: of any two, one contains the other or they do not meet.

    Viewers draw a thread's spans ("X") as calls of each other, and what overlaps otherwise wrongly or not at all. Async
    events ("b", "e") may overlap, but every viewer groups them in its own way, and apart from their thread. So a span
    that does not nest goes to the first further lane where it does, a thread of its own below the track's: transfers
    at the same time are seen side by side. Instants stay on the first.
    """
    lanes: list[list[_Timed]] = [[]]
    open_: list[list[int]] = [[]]  # of each lane, ends of spans around the present, the outermost first
    for timed in sorted(events, key=lambda each: (each[0], -each[1], each[2].number)):
        begin, end, event = timed
        if event.end is None:
            lanes[0].append(timed)
            continue
        for ends in open_:
            while ends and ends[-1] <= begin:
                ends.pop()
        fits = next((i for i, ends in enumerate(open_) if not ends or end <= ends[-1]), len(lanes))
        if fits == len(lanes):
            lanes.append([])
            open_.append([])
        lanes[fits].append(timed)
        open_[fits].append(end)
    return lanes


def _plain(value: object) -> object:
    """As JSON has it, which has no infinity; its whole numbers are exact up to 2⁵³ for viewers."""
    if value is None or isinstance(value, bool | str) or (isinstance(value, int) and abs(value) <= 1 << 53):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else str(value)


def _load(path: str) -> tuple[list[dict[str, Any]], dict[str, Any], float | None]:
    """Events, what is said of ranks, and when it began, in seconds since 1970."""
    try:
        found = json.loads(Path(path).read_bytes())
        events, other = found["traceEvents"], found["otherData"]
        good = all(type(e["pid"]) is int and math.isfinite(e.get("ts", 0)) for e in events)
        ranks, since = dict(other["ranks"]), other["since"]
        if good and (since is None or math.isfinite(since)):
            return events, ranks, since
    except OSError as e:
        raise TraceFailed(f"the trace {path} cannot be read: {e.strerror}") from e
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        pass
    raise TraceFailed(f"{path} is no trace that was saved here")


def _write(path: Path, rows: Iterable[Mapping[str, Any]], ranks: Mapping[str, Any], since: float | None) -> None:
    other = json.dumps({"ranks": ranks, "since": since})
    part = path.parent / f".trace-{uuid.uuid4().hex}"
    try:
        with part.open("x", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "otherData": ' + other + ', "traceEvents": [')
            for number, row in enumerate(rows):  # a line each, for they may be many
                file.write((",\n" if number else "\n") + json.dumps(row))
            file.write("\n]}\n")
        os.replace(part, path)
    except OSError as e:
        raise TraceFailed(f"the trace cannot be saved to {path}: {e.strerror}; name a file in a folder there is") from e
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
