"""Simulated ``threading``, ``queue``, ``time`` and ``concurrent.futures``, as far as commlib uses them.

They take the place of the real ones in commlib's modules for as long as a history runs (:func:`installed`). What they
are called by outside of a world's threads, they do without waiting.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import functools
import gc
import importlib
import pkgutil
import queue
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tests.support.simulation.world import Task, Waiters, World

_worlds: list[World] = []


def world() -> World:
    """The world whose history runs."""
    return _worlds[-1]


def state() -> dict[str, Any]:
    """State of the process whose thread runs."""
    task = world().current
    assert task is not None
    return task.process.state


class Lock:
    """``threading.Lock``."""

    def __init__(self) -> None:
        self._world, self._waiters = world(), Waiters()
        self._held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self._world.step()
        while self._held:
            if not blocking:
                return False
            if not self._world.wait(self._waiters, timeout if timeout >= 0 else None):
                return False
        self._held = True
        return True

    def release(self) -> None:
        self._held = False
        self._world.wake(self._waiters, 1)

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock:
    """``threading.RLock``."""

    def __init__(self) -> None:
        self._lock, self._count, self._world = Lock(), 0, world()
        self._owner: Task | None = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = self._world.current
        if self._count and self._owner is me:
            self._count += 1
            return True
        if not self._lock.acquire(blocking, timeout):
            return False
        self._owner, self._count = me, 1
        return True

    def release(self) -> None:
        self._count -= 1
        if self._count <= 0:
            self._owner, self._count = None, 0
            self._lock.release()

    def drop(self) -> int:
        """Let go, however often it is held; :meth:`retake` takes as many."""
        count, self._count, self._owner = self._count, 0, None
        self._lock.release()
        return count

    def retake(self, count: int) -> None:
        """Take it again after :meth:`drop`."""
        self._lock.acquire()
        self._owner, self._count = self._world.current, count

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    """``threading.Condition``."""

    def __init__(self, lock: Any = None) -> None:
        self._lock = RLock() if lock is None else lock
        self._world, self._waiters = world(), Waiters()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return bool(self._lock.acquire())

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        if isinstance(self._lock, RLock):
            count = self._lock.drop()
            woken = self._world.wait(self._waiters, timeout)
            self._lock.retake(count)
        else:
            self._lock.release()
            woken = self._world.wait(self._waiters, timeout)
            self._lock.acquire()
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        end = None if timeout is None else self._world.clock() + timeout
        while not (result := predicate()):
            left = None if end is None else end - self._world.clock()
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        self._world.wake(self._waiters, n)

    def notify_all(self) -> None:
        self._world.wake(self._waiters)


class Event:
    """``threading.Event``."""

    def __init__(self) -> None:
        self._world, self._waiters, self._set = world(), Waiters(), False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._world.step()
        self._set = True
        self._world.wake(self._waiters)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        self._world.step()
        if not self._set:
            self._world.wait(self._waiters, timeout)
        return self._set


class Thread:
    """``threading.Thread``, of the process of whoever makes it."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., Any] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self.name: str = name or str(getattr(target, "__name__", "thread"))
        self.daemon = daemon
        self._call = functools.partial(target, *args, **(kwargs or {})) if target is not None else None
        self._task: Task | None = None
        self._number = world().new_number()

    def __hash__(self) -> int:
        return self._number  # by which a set has its order: an address would make another one in each run

    def run(self) -> None:
        if self._call is not None:
            self._call()

    def start(self) -> None:
        here = world()
        here.step()
        assert here.current is not None
        self._task = here.spawn(here.current.process, self._main, self.name)

    def _main(self) -> None:
        state().setdefault("threads", {})[world().current] = self
        self.run()

    def join(self, timeout: float | None = None) -> None:
        assert self._task is not None
        if not self._task.over:
            world().wait(self._task.joined, timeout)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.over

    @property
    def ident(self) -> int | None:
        return None if self._task is None else id(self._task)


class _Main(Thread):
    def is_alive(self) -> bool:
        return True


def current_thread() -> Thread:
    """``threading.current_thread``."""
    known: dict[Any, Thread] = state().setdefault("threads", {})
    return known.setdefault(world().current, _Main(name="main"))


class SimpleQueue:
    """``queue.SimpleQueue``."""

    def __init__(self) -> None:
        self._world, self._waiters = world(), Waiters()
        self._items: collections.deque[Any] = collections.deque()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._items.append(item)
        self._world.wake(self._waiters, 1)
        if not self._world.closing:  # a finalizer may put something yet
            self._world.step()

    put_nowait = put

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        self._world.step()
        end = None if timeout is None else self._world.clock() + timeout
        while not self._items:
            left = None if end is None else end - self._world.clock()
            if not block or (left is not None and left <= 0):
                raise queue.Empty
            self._world.wait(self._waiters, left)
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


class Future(concurrent.futures.Future[Any]):
    """``concurrent.futures.Future``."""

    def __init__(self) -> None:
        super().__init__()
        self._condition: Any = Condition()


def wait(
    fs: Iterable[Future], timeout: float | None = None, return_when: str = "ALL_COMPLETED"
) -> tuple[set[Future], set[Future]]:
    """``concurrent.futures.wait``, for all."""
    futures, here = list(fs), world()
    end = None if timeout is None else here.clock() + timeout
    for each in futures:
        with each._condition:
            left = None if end is None else end - here.clock()
            each._condition.wait_for(each.done, left)
    return {f for f in futures if f.done()}, {f for f in futures if not f.done()}


class ThreadPoolExecutor:
    """``concurrent.futures.ThreadPoolExecutor``; all its threads start with the first call."""

    def __init__(self, max_workers: int = 1, thread_name_prefix: str = "") -> None:
        self._name, self._queue = thread_name_prefix, SimpleQueue()
        self._threads = [Thread(target=self._serve, name=thread_name_prefix) for _ in range(max_workers)]
        self._started = False

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        future = Future()
        if not self._started:
            self._started = True
            for thread in self._threads:
                thread.start()
        self._queue.put((future, functools.partial(call, *args, **kwargs)))
        return future

    def _serve(self) -> None:
        while (job := self._queue.get()) is not None:
            future, call = job
            try:
                future.set_result(call())
            except Exception as e:
                future.set_exception(e)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads if wait and self._started else ():
            thread.join()

    def __enter__(self) -> ThreadPoolExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _module(real: types.ModuleType, **replaced: Any) -> types.ModuleType:
    made = types.ModuleType(real.__name__)
    vars(made).update(vars(real), **replaced)
    return made


def monotonic() -> float:
    """``time.monotonic`` and its like."""
    return world().clock()


def sleep(seconds: float) -> None:
    """``time.sleep``."""
    world().sleep(seconds)


_TIME = _module(time, monotonic=monotonic, perf_counter=monotonic, time=monotonic, sleep=sleep)
_THREADING = _module(
    threading,
    Lock=Lock,
    RLock=RLock,
    Condition=Condition,
    Event=Event,
    Thread=Thread,
    current_thread=current_thread,
)
_QUEUE = _module(queue, SimpleQueue=SimpleQueue)
_FUTURES = _module(concurrent.futures, Future=Future, wait=wait, ThreadPoolExecutor=ThreadPoolExecutor)
_CONCURRENT = _module(concurrent, futures=_FUTURES)
_REPLACED: dict[int, Any] = {
    id(real): replacement
    for real, replacement in (
        (time, _TIME),
        (threading, _THREADING),
        (queue, _QUEUE),
        (concurrent, _CONCURRENT),
        (concurrent.futures, _FUTURES),
        (concurrent.futures.Future, Future),
        (concurrent.futures.wait, wait),
        (concurrent.futures.ThreadPoolExecutor, ThreadPoolExecutor),
        (time.monotonic, monotonic),
        (time.perf_counter, monotonic),
        (time.time, monotonic),
    )
}


_NOT_NEEDED = frozenset({"commlib.bench", "commlib.cli", "commlib.integrations", "commlib.testing"})
"""Packages that no history uses; some of them import much."""


@functools.cache
def places() -> list[tuple[Any, str, Any]]:
    """Where commlib's modules name what is replaced: (names, name, real thing), and defaults of functions.

    It imports all modules that histories may use, which takes some seconds.
    """
    import commlib

    names = [
        p.name for p in pkgutil.iter_modules(commlib.__path__, "commlib.") if p.ispkg and p.name not in _NOT_NEEDED
    ]
    paths = {name: importlib.import_module(name).__path__ for name in names}
    for found in (f for name, path in paths.items() for f in pkgutil.walk_packages(path, f"{name}.")):
        with contextlib.suppress(ImportError):  # what an extra would bring
            importlib.import_module(found.name)
    found_at: list[Any] = []
    for name, module in list(sys.modules.items()):
        if not name.startswith("commlib") or module is None:
            continue
        for each, value in vars(module).items():
            if id(value) in _REPLACED:
                found_at.append((vars(module), each, value))
            calls = [value, *vars(value).values()] if isinstance(value, type) else [value]
            for call in calls:
                defaults = getattr(call, "__defaults__", None) or ()
                if isinstance(call, types.FunctionType) and any(id(d) in _REPLACED for d in defaults):
                    found_at.append((call, "__defaults__", defaults))
    gc.collect()
    gc.freeze()  # all of these modules would be looked through after each history
    return found_at


@contextlib.contextmanager
def installed(made: World) -> Iterator[None]:
    """This world's primitives in commlib's modules."""
    replaced = places()
    _worlds.append(made)
    try:
        for where, name, real in replaced:
            if isinstance(where, dict):
                where[name] = _REPLACED[id(real)]
            else:
                where.__defaults__ = tuple(_REPLACED.get(id(d), d) for d in real)
        yield
    finally:
        for where, name, real in replaced:
            if isinstance(where, dict):
                where[name] = real
            else:
                where.__defaults__ = real
        _worlds.pop()
