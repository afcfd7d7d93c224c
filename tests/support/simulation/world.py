"""Simulated world: processes whose threads run one at a time, a clock that jumps, and one seed for all that is random.

Each simulated thread is a thread of Python's, for autograd keeps state by thread. But only the one that has the *turn*
runs. It keeps the turn until it waits, or until it comes to a place where the seed says that another goes on: at each
lock, queue or event (:mod:`tests.support.simulation.primitives`). If nobody can run, the clock jumps to the next event:
a message that arrives, a wait that is over, a fault. So a history follows from its seed alone, and hours of deadlines
take no time.

Who waits without a deadline for something that never comes is found: the world comes to an end while he waits.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import random
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

_TICK = 1e-6  # seconds that go by whenever somebody asks what time it is: who polls gets on


def _closed() -> threading.Lock:
    """A gate that one thread waits at, and another opens once. (A semaphore of Python's takes ten times as long.)"""
    gate = threading.Lock()
    gate.acquire()
    return gate


class Ended(BaseException):
    """Unwinds a thread of a process that is gone."""


class Violation(AssertionError):
    """Something that must never happen has happened in a history."""


class Waiters(list["Task"]):
    """Tasks that wait for one thing, in the order in which they came."""


class Process:
    """Simulated process.

    Args:
        name: of it.
        host: on which it runs.

    Attributes:
        result: what its function returned.
        error: what it raised.
        over: whether its function has ended, or it was killed.
    """

    def __init__(self, name: str, host: str) -> None:
        self.name, self.host = name, host
        self.tasks: list[Task] = []
        self.result: Any = None
        self.error: BaseException | None = None
        self.over = self.killed = self.stopped = False
        self.ended_at = 0.0
        self.at_end: list[Callable[[], None]] = []
        """Called when it is over, as the kernel closes what a process has open."""
        self.held: list[Callable[[], None]] = []
        """Called when it goes on after a stop."""
        self.state: dict[str, Any] = {}
        """What belongs to a process, and is a global variable in reality."""


class Task:
    """Thread of a simulated process.

    Args:
        process: whose.
        run: what it does.
        name: of it.
    """

    def __init__(self, process: Process, run: Callable[[], None], name: str) -> None:
        self.process, self.name, self._run = process, name, run
        self.turn = _closed()
        self.waits: Waiters | None = None
        self.woken = self.over = self.doomed = False
        self.count = 0  # of its waits: a deadline that is of an earlier one wakes nobody
        self.joined = Waiters()
        self.thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"{self.process.name}/{self.name}"


class World:
    """One history.

    Args:
        seed: of all that is random in it.
        restless: chance that another thread goes on at a place where it may.
        late: chance that a thread that could go on does so only after a while, as on a busy machine.
    """

    def __init__(self, seed: int, *, restless: float = 0.1, late: float = 0.05) -> None:
        self.seed, self.random = seed, random.Random(seed)
        self.now = 1000.0
        self._restless, self._late = restless, late
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._ready: list[Task] = []
        self._driver = _closed()
        self._end = float("inf")
        self.closing = False
        self.current: Task | None = None
        self.processes: list[Process] = []
        self.lines: list[str] = []
        self.switches = 0
        self._failure: BaseException | None = None

    # -- what histories do ------------------------------------------------------------------------

    def start(self, name: str, run: Callable[[], Any], *, host: str | None = None) -> Process:
        """Begin a process, on a host of its own if none is given."""
        process = Process(name, host or name)
        self.processes.append(process)

        def main() -> None:
            try:
                process.result = run()
            except Exception as e:
                process.error = e
                self.note(f"raised {type(e).__name__}: {e}")
            self.note("ends")
            self._over(process)

        self.spawn(process, main, "main")
        return process

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Call something at a time; it must not wait."""
        heapq.heappush(self._events, (when, next(self._numbers), call))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call something in so many seconds; it must not wait."""
        self.at(self.now + seconds, call)

    def kill(self, process: Process) -> None:
        """SIGKILL."""
        if not process.over:
            process.killed = True
            self.note("is killed", process)
            self._over(process)

    def stop(self, process: Process) -> None:
        """SIGSTOP."""
        self.note("is stopped", process)
        process.stopped = True

    def resume(self, process: Process) -> None:
        """SIGCONT."""
        self.note("goes on", process)
        process.stopped = False
        calls, process.held = process.held, []
        for call in calls:
            self.after(0.0, call)

    def run(self, seconds: float) -> None:
        """Run until all processes are over, those that stand still excepted; at most so many simulated seconds.

        Raises:
            Violation: a thread waits without end.
        """
        self._end = self.now + seconds
        gc.disable()  # what it calls would come at another moment in each run
        try:
            if (task := self._pick()) is not None:
                self._hand_to(task)
                self._driver.acquire()
        finally:
            gc.enable()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Unwind all threads that there still are."""
        self.closing = True
        for process in self.processes:
            process.over = True
            for task in process.tasks:
                if not task.over:
                    task.doomed = True
                    self._hand_to(task)
                    self._driver.acquire()
        self.current = None

    def note(self, text: str, process: Process | None = None) -> None:
        """Write down what happens."""
        who = process.name if process is not None else repr(self.current) if self.current is not None else "-"
        self.lines.append(f"{self.now - 1000.0:10.4f} {who}: {text}")

    def new_number(self) -> int:
        """Number that nothing else in this world has."""
        return next(self._numbers)

    def waiting(self) -> dict[str, str]:
        """Where each thread of a process that lives is."""
        found = {}
        for process in self.processes:
            for task in process.tasks if not process.over else ():
                if not task.over and task.thread is not None:
                    found[repr(task)] = _stack(task.thread)
        return found

    # -- what primitives do -----------------------------------------------------------------------

    def spawn(self, process: Process, run: Callable[[], None], name: str) -> Task:
        """One more thread of a process."""
        task = Task(process, run, name)
        process.tasks.append(task)
        task.thread = threading.Thread(target=self._live, args=(task,), name=repr(task), daemon=True)
        task.thread.start()
        self._wake(task)
        return task

    def clock(self) -> float:
        """What time it is."""
        self.now += _TICK
        return self.now

    def step(self) -> None:
        """A place where another thread may go on."""
        task = self.current
        if task is None:
            return
        self._alive(task)
        if self.random.random() < self._restless:
            self._ready.append(task)
            self._pass_on(task)

    def wait(self, queue: Waiters, timeout: float | None) -> bool:
        """Wait to be woken, for so many seconds at most; whether it was."""
        task = self.current
        if task is None:
            raise Violation("something waits outside of all simulated threads")
        self._alive(task)
        task.waits, task.woken = queue, False
        task.count += 1
        queue.append(task)
        if timeout is not None:
            count = task.count
            self.at(self.now + max(0.0, timeout), lambda: self._expire(task, count))
        self._pass_on(task)
        return task.woken

    def wake(self, queue: Waiters, most: int = 1 << 30) -> None:
        """Wake those that wait, the first ones."""
        for _ in range(min(most, len(queue))):
            task = queue.pop(0)
            task.waits, task.woken = None, True
            self._wake(task)

    def sleep(self, seconds: float) -> None:
        """Wait, and do not be woken."""
        self.wait(Waiters(), seconds)

    # -- turns ------------------------------------------------------------------------------------

    def _alive(self, task: Task) -> None:
        if task.doomed or task.process.over:
            if not task.doomed:  # it has the turn, and its process is gone: it gives it back for good
                self._pass_on(task)
            raise Ended

    def _expire(self, task: Task, count: int) -> None:
        if task.waits is not None and task.count == count:
            task.waits.remove(task)
            task.waits = None
            self._wake(task)

    def _wake(self, task: Task) -> None:
        if self.random.random() < self._late:
            self.after(self.random.expovariate(1 / 0.02), lambda: self._ready.append(task))
        else:
            self._ready.append(task)

    def _over(self, process: Process) -> None:
        process.over, process.ended_at = True, self.now
        calls, process.at_end = process.at_end, []
        for call in calls:
            call()

    def _pick(self) -> Task | None:
        """Task whose turn it is next; None if there is none, or no time left."""
        self.current = None
        try:
            while True:
                able = [t for t in self._ready if not t.process.stopped and not t.process.over]
                if able:
                    task = able[self.random.randrange(len(able))] if len(able) > 1 else able[0]
                    self._ready.remove(task)
                    return task
                if all(p.over or p.stopped for p in self.processes) or not self._events:
                    return None
                when, _, call = heapq.heappop(self._events)
                if when > self._end:
                    self.now = self._end
                    return None
                self.now = max(self.now, when)
                call()
        except BaseException as e:
            self._failure = e
            return None

    def _pass_on(self, task: Task) -> None:
        """Give the turn to another, and wait until it comes back."""
        chosen = None if self.closing else self._pick()
        if chosen is task:
            self.current = task
            return
        self.switches += 1
        if chosen is None:
            self._driver.release()
        else:
            self._hand_to(chosen)
        task.turn.acquire()
        self.current = task
        if task.doomed:
            raise Ended

    def _hand_to(self, task: Task) -> None:
        self.current = task
        task.turn.release()

    def _live(self, task: Task) -> None:
        task.turn.acquire()
        self.current = task
        try:
            if not task.doomed:
                task._run()
        except Ended:
            pass
        except BaseException as e:  # as Python does with a thread's error
            if not task.doomed:
                self.note(f"a thread ends by {type(e).__name__}: {e}")
        task.over = True
        if task.doomed or self.closing:
            self._driver.release()
            return
        self.wake(task.joined)
        chosen = self._pick()
        if chosen is None:
            self._driver.release()
        else:
            self._hand_to(chosen)


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    own = [f for f in traceback.extract_stack(frame) if "simulation" not in f.filename] if frame else []
    return " < ".join(f"{f.filename.rpartition('/')[2]}:{f.lineno} {f.name}" for f in reversed(own[-6:]))
