"""Numbers for the values of a click log, made by all cores and equal to those of one: resource-adaptive preprocessing.

python examples/preprocess.py clicks.tsv numbered.tsv

A line has fields between tabs: a label, which stays as it is, and values. A value is numbered by its column when it
first appears, from 0, in the order of lines; an empty one has no number. So the result depends on what came before,
and cannot simply be divided. RAP divides it all the same (X units × Y chunks, bounded by memory and cores)::

    unit 0  index chunk 0 ─┐ keys, in order   ┌▶ numbers ─▶ write chunk 0 ─┐   index chunk 2 …
    unit 1  index chunk 1 ─┼▶ main: merge 0, ─┼▶ numbers ─▶ write chunk 1 ─┼▶ main: 0, then 1
                           ┘  then 1          ┘                            ┘

Why it is the same: a key first appears in the first chunk that has it, and there behind the keys that its chunk has
earlier. The main process takes chunks in their order, and a chunk's keys in theirs: it meets keys as one process does.

Why nobody waits for ever: with each unit the main process has one conversation, keys, numbers, text, and both go
through it in that order. It waits for one unit at a time, and a unit for nobody but it. One that dies is seen.

Beside the output, ``numbered.tsv.index`` has a line for each number: column, tab, value.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO

SMALLEST = 1 << 18
"""Bytes of a chunk for which a process of its own is worth while."""

LARGEST = 1 << 24
"""Bytes of a chunk above which nothing is gained any more."""

PER_BYTE = 48
"""Bytes of memory that a chunk takes for each of its own: 37 were seen where no value came twice."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a file is divided.

    Attributes:
        units: X, processes at work at once.
        chunks: Y, of each.
    """

    units: int
    chunks: int


def plan(size: int, free_bytes: int, cores: int) -> Plan:
    """The fewest chunks of a file of ``size`` bytes that fit into half of the memory.

    Raises:
        ValueError: a number out of range, or not even one small chunk fits.
    """
    if size < 0 or cores < 1:
        raise ValueError(f"a file has 0 bytes or more and a machine 1 core or more, got {size} and {cores}")
    bytes_at_once = free_bytes // 2 // PER_BYTE
    if bytes_at_once < SMALLEST:
        raise ValueError(f"{free_bytes} bytes of memory are free, and {2 * PER_BYTE * SMALLEST} are needed")
    units = max(1, min(cores, -(-size // SMALLEST), bytes_at_once // SMALLEST))
    return Plan(units, max(1, -(-size // (units * min(LARGEST, bytes_at_once // units)))))


def spans(size: int, count: int) -> list[tuple[int, int]]:
    """So many parts of a file, in bytes; they differ by one at most."""
    return [(size * i // count, size * (i + 1) // count) for i in range(count)]


def lines_of(file: BinaryIO, begin: int, end: int) -> Iterator[bytes]:
    """The lines that begin in [begin, end), without their ends: every line is in just one of several parts."""
    at = file.seek(max(begin - 1, 0))
    if begin:
        at += len(file.readline())  # begun before; or nothing but the end of the one before
    while at < end and (line := file.readline()):
        at += len(line)
        yield line.removesuffix(b"\n").removesuffix(b"\r")


class Chunk:
    """Lines with numbers of their own, by first appearance among them.

    Args:
        lines: in order.
        width: fields of each.

    Raises:
        BadLine: one has more fields, or fewer.
    """

    def __init__(self, lines: Iterable[bytes], width: int) -> None:
        known: list[dict[bytes, int]] = [{b"": 0} for _ in range(width)]  # by column; 0: missing
        self.width = width
        self.keys: list[bytes] = []
        self._labels: list[bytes] = []
        self._own = array("I")
        for line in lines:
            label, *values = line.split(b"\t")
            if len(values) != width - 1:
                raise BadLine(len(self._labels), f"has {len(values) + 1} fields, and the first {width}")
            self._labels.append(label)
            for column, value in enumerate(values, 1):
                own = known[column].get(value)
                if own is None:
                    self.keys.append(b"%d\t%s" % (column, value))
                    own = known[column][value] = len(self.keys)
                self._own.append(own)

    def __len__(self) -> int:
        return len(self._labels)

    def text(self, numbers: Sequence[int]) -> bytearray:
        """Lines with the numbers that its keys have for all."""
        names, n = [b"", *(b"%d" % number for number in numbers)], self.width - 1
        text = bytearray()
        for i, label in enumerate(self._labels):
            text += b"\t".join([label, *(names[own] for own in self._own[i * n : (i + 1) * n])]) + b"\n"
        return text


class BadLine(ValueError):
    """How many lines of its chunk are before it, and what is wrong with it."""


class Index:
    """Numbers of keys, in the order in which it meets them."""

    def __init__(self) -> None:
        self.numbers: dict[bytes, int] = {}

    def merge(self, keys: Iterable[bytes]) -> array[int]:
        """Of these, new or not."""
        return array("L", (self.numbers.setdefault(key, len(self.numbers)) for key in keys))


def work(pipe: Connection, source: Path, width: int, parts: Sequence[tuple[int, int]]) -> None:
    """A unit: for each of its chunks keys go out, their numbers come in, and text goes out."""
    with source.open("rb") as file:
        for begin, end in parts:
            try:
                chunk = Chunk(lines_of(file, begin, end), width)
            except BadLine as e:
                pipe.send(e)
                return
            pipe.send((len(chunk), b"\n".join(chunk.keys)))
            numbers = array("L")
            numbers.frombytes(pipe.recv_bytes())
            pipe.send_bytes(chunk.text(numbers))


class Unit:
    """A process that works, as the main process sees it."""

    def __init__(self, number: int, *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.number = number
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    def keys(self, lines: int) -> tuple[int, list[bytes]]:
        """Of its next chunk, with so many lines before it: how many lines, and keys."""
        said = self._said(self.pipe.recv)
        if isinstance(said, BadLine):
            raise ValueError(f"line {lines + said.args[0] + 1} {said.args[1]}")
        count, keys = said
        return count, keys.split(b"\n") if keys else []

    def give(self, numbers: array[int]) -> None:
        """Those that its keys have."""
        self._said(lambda: self.pipe.send_bytes(numbers))

    def text(self) -> bytes:
        """Of that chunk."""
        return bytes(self._said(self.pipe.recv_bytes))

    def end(self) -> None:
        """Whether or not it is done."""
        self.pipe.close()
        self.process.kill()
        self.process.join()

    def _said(self, talk: Callable[[], Any]) -> Any:
        try:
            return talk()
        except (EOFError, OSError) as e:
            self.process.join(10)
            raise RuntimeError(
                f"unit {self.number} has died (exit code {self.process.exitcode}; -9 often means that memory ran out: "
                "--memory makes chunks smaller)"
            ) from e


def preprocess(
    source: Path, target: Path, how: Plan, progress: Callable[[int, int], None] = lambda done, keys: None
) -> dict[str, int]:
    """Writes the numbered lines and the index: the target is there once both are whole.

    Args:
        source: what to read.
        target: what to write.
        how: to divide it.
        progress: is told of how many chunks of each unit are done, and how many keys known.

    Returns:
        How many lines, and keys.

    Raises:
        ValueError: a line has more fields than the first, or fewer.
        RuntimeError: a unit died.
    """
    parts = spans(source.stat().st_size, how.units * how.chunks)
    with source.open("rb") as file:
        width = next(lines_of(file, 0, 1), b"").count(b"\t") + 1
    index, lines = Index(), 0
    beside = {path: path.with_name(f".{path.name}.{os.getpid()}") for path in (_index_of(target), target)}
    units: list[Unit] = []
    try:
        for x in range(how.units):
            units.append(Unit(x, source, width, parts[x :: how.units]))
        with beside[target].open("wb") as out:
            for y in range(how.chunks):
                for unit in units:
                    count, keys = unit.keys(lines)
                    unit.give(index.merge(keys))
                    lines += count
                for unit in units:
                    out.write(unit.text())
                progress(y + 1, len(index.numbers))
        with beside[_index_of(target)].open("wb") as out:
            out.writelines(key + b"\n" for key in index.numbers)
        for path, written in beside.items():
            written.replace(path)
    finally:
        for unit in units:
            unit.end()
        for written in beside.values():
            written.unlink(missing_ok=True)
    return {"lines": lines, "keys": len(index.numbers)}


def _index_of(target: Path) -> Path:
    return target.with_name(target.name + ".index")


def free_memory() -> int:
    """Bytes that this machine, and this process's cgroup, would give."""
    known = dict(line.split(":") for line in Path("/proc/meminfo").read_text("ascii").splitlines())
    free, limit = int(known["MemAvailable"].split()[0]) << 10, Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (most := limit.read_text().strip()) != "max":
        free = min(free, int(most) - int(limit.with_name("memory.current").read_text()))
    return free


def main() -> None:
    parser = argparse.ArgumentParser(description="Number the values of a click log, in order of first appearance.")
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--units", type=int, help="processes [as many as cores and memory allow]")
    parser.add_argument("--memory", type=int, help="bytes to plan with [what is free]")
    parser.add_argument("--json", action="store_true", help="the result as one line of JSON")
    args = parser.parse_args()
    begun = time.monotonic()

    def progress(done: int, keys: int) -> None:
        line = f"\r{how.units} × {done} of {how.chunks} chunks, {keys} keys, {time.monotonic() - begun:.1f} s"
        print(line, end="", file=sys.stderr, flush=True)

    try:
        if args.source.resolve() in (args.target.resolve(), _index_of(args.target).resolve()):
            raise ValueError(f"{args.source} would be read and written: name another target")
        cores = args.units or len(os.sched_getaffinity(0))
        how = plan(args.source.stat().st_size, args.memory or free_memory(), cores)
        found = preprocess(args.source, args.target, how, progress)
    except (OSError, RuntimeError, ValueError) as e:
        print(f"\nerror: {e}", file=sys.stderr)
        sys.exit(2)
    print(file=sys.stderr)
    result = {**found, "units": how.units, "chunks": how.chunks, "seconds": round(time.monotonic() - begun, 3)}
    print(json.dumps(result) if args.json else ", ".join(f"{k} {v}" for k, v in result.items()))


if __name__ == "__main__":
    main()
