"""Picture of a run from its logs (:mod:`commlib.monitoring.log`). Pure: entries and ages in, rows
out.

An :class:`RankAccount` takes the entries of one rank, one after another. :func:`picture` makes of several accounts what
``commlib top`` shows, as values that JSON has.

Files that others write, read along line by line.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from commlib.monitoring.log import VERSION

PATIENCE = 5.0
"""A rank stands still if it has written nothing for so many times as long as its entries take,"""
AT_LEAST = 10.0
"""and for so many seconds."""


_OF_BEGIN = ("rank", "ranks", "step", "every")
_OF_STEP = ("step", "steps", "skipped", "seconds", "bytes", "exposed_ms")


@dataclasses.dataclass
class RankAccount:
    """Account of one rank: what its file says by now. A run that was resumed goes on in its file, and its last part
    counts.

    Attributes:
        begun: its first entry; empty before it comes.
        last: the last entry of steps; empty before there is one.
        skipped: steps, since it began.
        errors: layer → relative error, as it was last known.
        residuals: layer → norm.
        routes: layer → route.
        changes: of the plan, the latest last.
        diverged: the entry that says so; empty if none does.
        ended: whether it has ended in order.
        strange: lines that are no entries.
    """

    begun: dict[str, Any] = dataclasses.field(default_factory=dict)
    last: dict[str, Any] = dataclasses.field(default_factory=dict)
    skipped: int = 0
    error: float | None = None
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    residuals: dict[str, float] = dataclasses.field(default_factory=dict)
    routes: dict[str, str] = dataclasses.field(default_factory=dict)
    changes: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    diverged: dict[str, Any] = dataclasses.field(default_factory=dict)
    ended: bool = False
    strange: int = 0

    @property
    def step(self) -> int:
        """How far it is."""
        found: int = (self.last or self.begun).get("step", 0)
        return found

    def take(self, line: str) -> None:
        """Take another line of the rank's file; what is none of ours is counted, and left."""
        try:
            entry = json.loads(line)
            self._take(entry)
        except (ValueError, KeyError, TypeError, AttributeError):
            self.strange += 1

    def _take(self, entry: dict[str, Any]) -> None:
        kind = entry["kind"]
        if kind == "begin" and entry["commlib"] == VERSION:
            _check(entry, _OF_BEGIN)
            fresh = RankAccount(begun=entry, routes=dict(entry["plan"]), strange=self.strange)
            vars(self).update(vars(fresh))
        elif not self.begun:
            self.strange += 1
        elif kind == "step":
            self._step(entry)
        elif kind == "diverged":
            self.diverged = entry
        elif kind == "end":
            self.ended = True

    def _step(self, entry: dict[str, Any]) -> None:
        _check(entry, _OF_STEP)
        layers = entry["layers"].items()
        errors = {name: held["error"] for name, held in layers if held["error"] is not None}
        self.residuals = {name: held["residual"] for name, held in layers}
        self.errors, self.error = (errors, entry["error"]) if errors else (self.errors, self.error)
        self.errors = {name: error for name, error in self.errors.items() if name in self.residuals}
        self.changes = [*self.changes, *entry["changes"]][-100:]
        self.routes |= {c["layer"]: c["to"] for c in entry["changes"]}
        self.skipped += entry["skipped"]
        self.last = entry


def _check(entry: Mapping[str, Any], numbers: Iterable[str]) -> None:
    """Raises KeyError or TypeError if these are not in it, or are no numbers."""
    for name in numbers:
        if not isinstance(entry[name], int | float):
            raise TypeError(f"{name} is no number: {entry[name]!r}")


def picture(accounts: Sequence[tuple[RankAccount, float]], layers: int = 5, changes: int = 5) -> dict[str, Any]:
    """Picture of all ranks.

    Args:
        accounts: of ranks, each with the seconds since it has written something.
        layers: so many of the worst are in it.
        changes: so many of the latest.

    Returns:
        ``ranks``, ``layers``, ``changes``: lists of rows; ``notes``: what is to be looked at, in words.
    """
    known = sorted(((a, age) for a, age in accounts if a.begun), key=lambda each: int(each[0].begun["rank"]))
    return {
        "ranks": [_row(account, age) for account, age in known],
        "layers": _worst([a for a, _ in known], layers),
        "changes": max((a.changes for a, _ in known), key=_newest, default=[])[-changes:][::-1],
        "notes": _notes(known),
    }


def _row(account: RankAccount, age: float) -> dict[str, Any]:
    begun, last = account.begun, account.last
    steps, seconds = last.get("steps", 0), last.get("seconds", 0.0)
    return {
        "rank": begun["rank"],
        "host": begun.get("host"),
        "step": account.step,
        "steps_per_s": steps / seconds if seconds else None,
        "bytes_per_step": last["bytes"] / steps if steps else None,
        "ratio": last.get("ratio"),
        "exposed_ms": last["exposed_ms"] / steps if steps else None,
        "skipped": account.skipped,
        "error": account.error,
        "replicas": "differ" if account.diverged else last.get("checked"),
        "state": "ended" if account.ended else "still" if _still(account, age) else "runs",
        "age_s": age,
    }


def _still(account: RankAccount, age: float) -> bool:
    return not account.ended and age > max(AT_LEAST, PATIENCE * account.last.get("seconds", 0.0))


def _newest(changes: Sequence[Mapping[str, Any]]) -> int:
    return max((c["step"] for c in changes), default=-1)


def _worst(accounts: Iterable[RankAccount], count: int) -> list[dict[str, Any]]:
    """Layers by relative error, of the rank where it is largest; then those of which only residuals are known."""
    rows: dict[str, dict[str, Any]] = {}
    for account in accounts:
        for name, residual in account.residuals.items():
            row = {"layer": name, "rank": account.begun["rank"], "route": account.routes.get(name)}
            row |= {"error": account.errors.get(name), "residual": residual}
            if name not in rows or _size(row) > _size(rows[name]):
                rows[name] = row
    return sorted(rows.values(), key=_size, reverse=True)[:count]


def _size(row: Mapping[str, Any]) -> tuple[float, float]:
    return (-1.0 if row["error"] is None else row["error"], row["residual"] or 0.0)


def _notes(known: Sequence[tuple[RankAccount, float]]) -> list[str]:
    notes = []
    for account, _ in known[:1]:
        missing = sorted(set(range(account.begun["ranks"])) - {a.begun["rank"] for a, _ in known})
        if missing:
            notes.append(f"no file of {_ranks(missing)}, of {account.begun['ranks']} in all")
    for account, _ in known:
        if account.diverged:
            d = account.diverged
            held = " and ".join(_ranks(ranks) for ranks in d["holders"])
            notes.append(f"replicas differ after {d['step']} steps, first in {d['layer']}: {held} hold other values")
            break  # all say the same
    running = [(a, age) for a, age in known if not a.ended]
    for account, age in running:
        if _still(account, age):
            usual = f", which it did every {account.last['seconds']:.3g} s" if account.last else " at all"
            rank, at = account.begun["rank"], account.step
            notes.append(f"rank {rank} stands still at step {at}: it has written nothing for {age:.0f} s{usual}")
    steps = {a.begun["rank"]: a.step for a, _ in running}
    between = max((a.begun["every"] for a, _ in running), default=0)
    if steps and max(steps.values()) - min(steps.values()) > between:  # by one entry they may be apart at any moment
        by_step: dict[int, list[int]] = {}
        for rank, step in steps.items():
            by_step.setdefault(step, []).append(rank)
        notes.append(
            "ranks are at different steps: " + "; ".join(f"{_ranks(r)} at {s}" for s, r in sorted(by_step.items()))
        )
    strange = sum(a.strange for a, _ in known)
    if strange:
        notes.append(f"{strange} {'line is' if strange == 1 else 'lines are'} no entry of a log, and left out")
    return notes


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


class LogTail:
    """Tail of one file: the lines that have come since it was last asked. Half a line waits for its other half.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read, self._rest = 0, b""

    def lines(self) -> Iterator[str]:
        """Lines that are whole by now; from the beginning again if the file has become shorter.

        Raises:
            OSError: it cannot be read.
        """
        with self.path.open("rb") as file:
            if self.path.stat().st_size < self._read:
                self._read, self._rest = 0, b""
            file.seek(self._read)
            found = file.read()
        self._read += len(found)
        *whole, self._rest = (self._rest + found).split(b"\n")
        for line in whole:
            if line.strip():
                yield line.decode(errors="replace")

    @property
    def age(self) -> float:
        """Seconds since it was written, by the clock of this machine."""
        return max(0.0, time.time() - self.path.stat().st_mtime)


class LogTails:
    """Tails of the files of all ranks of a run.

    Args:
        paths: files, or folders: of a folder, what ends in ``.jsonl``, whenever it comes.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        self._known: dict[Path, tuple[LogTail, RankAccount]] = {}

    def read(self) -> tuple[list[tuple[RankAccount, float]], list[str]]:
        """The accounts of all ranks, each with the seconds since its file was written; and what to say of files.

        Of two files of one rank, the one that was written last is taken.
        """
        notes, newest = [], dict[int, tuple[RankAccount, float, Path]]()
        for path in self._files():
            tail, account = self._known.setdefault(path, (LogTail(path), RankAccount()))
            try:
                for line in tail.lines():
                    account.take(line)
                age = tail.age
            except OSError as e:
                notes.append(f"{path} cannot be read: {e.strerror}")
                continue
            if not account.begun:
                notes.append(f"{path} has no log in it" + (" yet" if not account.strange else ""))
                continue
            rank = account.begun["rank"]
            one = (account, age, path)
            if rank in newest:
                older, one = sorted((newest[rank], one), key=lambda each: -each[1])
                notes.append(f"{older[2]} is left out: {one[2]} is of rank {rank}, too, and newer")
            newest[rank] = one
        return [(account, age) for account, age, _ in newest.values()], notes

    def _files(self) -> list[Path]:
        found: dict[Path, None] = {}
        for path in self._paths:
            found |= dict.fromkeys(sorted(path.glob("*.jsonl")) if path.is_dir() else [path])
        return list(found)
