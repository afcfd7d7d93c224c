"""Threads that wait take turns at reading: each gets what it waits for, in time, and one at a time reads."""

from __future__ import annotations

import collections
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from commlib.messaging.shared_reader import SharedReader


class Wire:
    """A queue of numbers, sorted into boxes by the last digit."""

    def __init__(self) -> None:
        self.wire: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.boxes: dict[int, collections.deque[int]] = collections.defaultdict(collections.deque)
        self.readers = 0
        self.turns: SharedReader[int] = SharedReader(self.read, lambda n: self.boxes[n % 10].append(n))

    def read(self, seconds: float) -> list[int]:
        self.readers += 1
        assert self.readers == 1
        try:
            return [self.wire.get(timeout=seconds)]
        except queue.Empty:
            return []
        finally:
            self.readers -= 1

    def get(self, box: int, seconds: float = 120.0) -> int | None:
        return self.turns.wait(
            lambda: self.boxes[box].popleft() if self.boxes[box] else None, time.monotonic() + seconds
        )

    def get_all(self, box: int, count: int) -> list[int | None]:
        return [self.get(box) for _ in range(count)]


def test_each_thread_gets_its_own_in_order_whatever_the_others_wait_for() -> None:
    wire = Wire()
    with ThreadPoolExecutor(10) as pool:
        asked = [pool.submit(wire.get_all, box, 50) for box in range(10)]
        for n in range(500):
            wire.wire.put(n)
        for box, got in enumerate(asked):
            assert got.result() == list(range(box, 500, 10))


def test_a_deadline_is_kept_by_who_reads() -> None:
    now, asked = [100.0], []

    def read(seconds: float) -> list[int]:
        asked.append(seconds)
        now[0] += seconds
        return []

    turns: SharedReader[int] = SharedReader(read, lambda n: None, clock=lambda: now[0])
    assert turns.wait(lambda: None, 100.35) is None
    assert asked == pytest.approx([0.1, 0.1, 0.1, 0.05])


def test_a_deadline_is_kept_by_who_does_not_read() -> None:
    """One that waits while another reads, for as long as it likes, is back before that one is."""
    reads, over = threading.Event(), threading.Event()

    def read(seconds: float) -> list[int]:
        reads.set()
        assert over.wait(120)
        return [1]

    wire = Wire()
    wire.turns = SharedReader(read, lambda n: wire.boxes[n].append(n))
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(wire.get, 1)
        assert reads.wait(120)
        deadline = time.monotonic() + 0.05
        assert wire.turns.wait(lambda: None, deadline) is None
        assert time.monotonic() >= deadline
        over.set()
        assert reader.result() == 1


def test_an_error_of_one_is_not_the_others() -> None:
    wire = Wire()
    failing = threading.Event()

    def deliver(n: int) -> None:
        if n == 7:
            failing.set()
            raise ValueError("seven")
        wire.boxes[n % 10].append(n)

    wire.turns = SharedReader(wire.read, deliver)
    wire.wire.put(7)
    with pytest.raises(ValueError, match="seven"):
        wire.get(1)
    assert failing.is_set()
    wire.wire.put(11)
    assert wire.get(1) == 11


def test_once_ended_nobody_reads_any_more() -> None:
    wire = Wire()
    assert wire.turns.end(timeout=1.0)
    wire.wire.put(1)
    assert wire.get(1, 0.2) is None
