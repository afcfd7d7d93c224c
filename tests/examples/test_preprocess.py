"""Numbers made by many processes are those that one would make, byte for byte; and what is wrong has a name."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.preprocess import LARGEST, PER_BYTE, SMALLEST, Chunk, Index, Plan, Unit, lines_of, plan, preprocess, spans

SCRIPT = Path(__file__).parents[2] / "examples" / "preprocess.py"
# Few values, so that they come again; a carriage return within a value is a part of it.
VALUES = st.lists(st.sampled_from([b"", b"a", b"b", b"aa", b"0", b"a\rb", "ü".encode()]), min_size=3, max_size=3)
LOGS = st.lists(VALUES, max_size=25)


def serial(lines: list[list[bytes]]) -> tuple[bytes, list[bytes]]:
    """The oracle: one dictionary, line by line."""
    known: dict[tuple[int, bytes], int] = {}
    text = b""
    for label, *values in lines:
        numbers = [b"%d" % known.setdefault((i, v), len(known)) if v else b"" for i, v in enumerate(values, 1)]
        text += b"\t".join([label, *numbers]) + b"\n"
    return text, [b"%d\t%s" % key for key in known]


@given(LOGS, st.integers(1, 9), st.sampled_from([b"\n", b"\r\n"]), st.booleans())
def test_chunks_merged_in_order_are_the_serial_result(
    lines: list[list[bytes]], count: int, end: bytes, ended: bool
) -> None:
    data = end.join(map(b"\t".join, lines)) + (end if ended and lines else b"")
    file, index, text = io.BytesIO(data), Index(), b""
    for begin, to in spans(len(data), count):
        chunk = Chunk(lines_of(file, begin, to), 3)
        text += chunk.text(index.merge(chunk.keys))
    assert (text, list(index.numbers)) == serial(lines)


@given(st.binary(max_size=60), st.integers(1, 70))
def test_every_line_is_in_one_part(data: bytes, count: int) -> None:
    parts = spans(len(data), count)
    found = [line for begin, end in parts for line in lines_of(io.BytesIO(data), begin, end)]
    assert found == [line.removesuffix(b"\n").removesuffix(b"\r") for line in io.BytesIO(data).readlines()]


@given(st.integers(0, 1 << 45), st.integers(2 * PER_BYTE * SMALLEST, 1 << 42), st.integers(1, 256))
def test_a_plan_keeps_to_memory_and_cores_and_to_no_more_chunks_than_that_takes(
    size: int, free: int, cores: int
) -> None:
    found = plan(size, free, cores)

    def chunk(units: int, chunks: int) -> int:
        return -(-size // (units * chunks))

    assert 1 <= found.units <= cores
    assert chunk(found.units, found.chunks) <= LARGEST
    assert found.units * chunk(found.units, found.chunks) * PER_BYTE <= free // 2 + found.units * PER_BYTE
    if found.chunks > 1:  # one less would be too large, or more than memory takes
        larger = chunk(found.units, found.chunks - 1)
        assert larger > LARGEST or found.units * larger * PER_BYTE > free // 2
    if found.units < cores:  # one more would have too little to do, or too little memory
        assert size <= found.units * SMALLEST or (found.units + 1) * SMALLEST * PER_BYTE > free // 2


@pytest.mark.parametrize(
    ("size", "free", "cores", "said"),
    [
        (-1, 1 << 40, 1, "0 bytes or more"),
        (1, 1 << 40, 0, "1 core or more"),
        (1, 2 * PER_BYTE * SMALLEST - 1, 1, "bytes of memory are free, and 25165824 are needed"),
    ],
)
def test_what_cannot_be_planned_is_told(size: int, free: int, cores: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan(size, free, cores)


def clicks(lines: int) -> list[list[bytes]]:
    """Ever new values among some that come again."""
    return [[b"%d" % (i % 2), b"u%d" % (i * i % 97), b"" if i % 5 else b"a%d" % i, b"x"] for i in range(lines)]


def test_real_processes_make_what_one_would(tmp_path: Path) -> None:
    lines = clicks(5000)
    (tmp_path / "in").write_bytes(b"".join(b"\t".join(line) + b"\n" for line in lines))
    told: list[tuple[int, int]] = []
    found = preprocess(tmp_path / "in", tmp_path / "out", Plan(3, 4), lambda *now: told.append(now))
    text, keys = serial(lines)
    assert (tmp_path / "out").read_bytes() == text
    assert (tmp_path / "out.index").read_bytes().splitlines() == keys
    assert found == {"lines": 5000, "keys": len(keys)}
    assert [done for done, _ in told] == [1, 2, 3, 4]
    assert told[-1][1] == len(keys)

    lines[4000].append(b"one more")
    (tmp_path / "in").write_bytes(b"".join(b"\t".join(line) + b"\n" for line in lines))
    with pytest.raises(ValueError, match="line 4001 has 5 fields, and the first 4"):
        preprocess(tmp_path / "in", tmp_path / "bad", Plan(2, 3))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out", "out.index"]


def test_a_unit_that_dies_is_missed_with_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"1\ta\n")
    unit = Unit(7, tmp_path / "in", 2, [(0, 4), (4, 4)])
    try:
        assert unit.keys(0) == (1, [b"1\ta"])
        os.kill(int(unit.process.pid or 0), signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"unit 7 has died \(exit code -9"):
            unit.text()
    finally:
        unit.end()


def test_the_command_says_what_it_did_and_what_is_wrong(tmp_path: Path) -> None:
    source, target = tmp_path / "clicks.tsv", tmp_path / "numbered.tsv"
    source.write_bytes(b"1\ta\tb\n0\tb\tb\n")

    def run(*args: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, SCRIPT, *map(str, args)], capture_output=True, text=True, timeout=300)

    done = run(source, target, "--json", "--units", 2)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["lines"], result["keys"], result["units"], result["chunks"]) == (2, 3, 1, 1)
    assert target.read_bytes() == b"1\t0\t1\n0\t2\t1\n"
    assert "1 × 1 of 1 chunks, 3 keys" in done.stderr

    for args, said in [
        ((source, source), "would be read and written"),
        ((tmp_path / "none", target), "No such file"),
        ((source, target, "--memory", 1000), "are needed"),
        ((source, target, "--units", -1), "1 core or more"),
    ]:
        done = run(*args)
        assert done.returncode == 2
        assert said in done.stderr
