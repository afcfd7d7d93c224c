"""Key-value store of a process group, of which every call has a deadline.

A call of PyTorch's ``TCPStore`` reads its answer without a deadline. If the process that keeps the store stands still
(it is stopped, its host has gone, a link is cut), the call never returns, not even one that waits for nothing, and no
signal ends it. So calls are made by a thread of their own, and whoever asks waits for that thread as long as a call may
take, and no longer.

One thread makes all calls of a process to a store, whichever groups and prefixes they are of, one after the other and
in the order in which they were asked for: what a rank sets before something else is there before it. A call that was
given up is still under way, and those behind it could not be answered before it, for they have one connection: they
are given up at once, until it returns. So a store that is silent costs whoever asks it again and again one deadline.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any

from torch.distributed import DistNetworkError, distributed_c10d

from commlib.errors import StoreSilent
from commlib.groups.call_thread import CallThread

ANSWER_S = 30.0
"""Seconds in which a store answers, where nothing else is said: a busy machine may take some."""

LEAST_S = 2.0
"""Seconds that an answer may always take: a thread may have to wait so long for its turn on a busy machine."""

_SILENT = "the store in which the ranks meet does not answer"
_KEEPER = (
    "who keeps it (rank 0, the agent of torchrun on its host, or commlib server meet) is stopped, gone or out of reach"
)
_PAUSES = 0.002, 0.05  # seconds between two looks for a key: at first, at last
_PARTS = 8  # of a wait for an answer: a process that stood still for longer than a wait loses one part of it


class DeadlineStore:
    """Calls of a store, made by a thread of its own, none of which takes longer than it may.

    Args:
        store: of torch.distributed.
        answer_s: seconds in which it answers.
    """

    def __init__(self, store: Any, answer_s: float = ANSWER_S) -> None:
        self.underlying_store, self._answer_s, self._calls = store, answer_s, _calls_to(store)

    def within(self, answer_s: float) -> DeadlineStore:
        """The same store and thread, for calls that may take so many seconds, :data:`LEAST_S` at least."""
        made = DeadlineStore.__new__(DeadlineStore)
        made.underlying_store, made._answer_s, made._calls = self.underlying_store, max(answer_s, LEAST_S), self._calls
        return made

    @property
    def silent(self) -> bool:
        """Whether a call was given up that has not returned since: none would be answered."""
        return self._calls.silent

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._ask(lambda: self.underlying_store.set(key, value))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; returns what it is then."""
        found: int = self._ask(lambda: self.underlying_store.add(key, amount))
        return found

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of them are there."""
        found: bool = self._ask(lambda: self.underlying_store.check(list(keys)))
        return found

    def get(self, key: str) -> bytes:
        """Read a value that is there; unlike PyTorch's, it waits for none.

        Raises:
            KeyError: there is none.
        """

        def read() -> bytes:
            if not self.underlying_store.check([key]):
                raise KeyError(key)
            found: bytes = self.underlying_store.get(key)
            return found

        return bytes(self._ask(read))

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta) -> None:
        """Return when all of them are there.

        Raises:
            StoreSilent: it does not answer.
            RuntimeError: some are not there in time, as with PyTorch's.
        """
        pause, most = _PAUSES
        end = time.monotonic() + timeout.total_seconds()
        for key in keys:  # one by one: a thousand ranks that ask for all again and again would be a load
            while not self.check([key]):
                if (left := end - time.monotonic()) <= 0:
                    raise RuntimeError(f"not in the store within {timeout.total_seconds():g} s: {key}")
                time.sleep(min(pause, left))
                pause = min(1.5 * pause, most)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Read values that are there."""
        return [bytes(value) for value in self._ask(lambda: self.underlying_store.multi_get(list(keys)))]

    def delete_key(self, key: str) -> bool:
        """Remove a value; not every store can."""
        found: bool = self._ask(lambda: self.underlying_store.delete_key(key))
        return found

    def compare_set(self, key: str, expected: str, desired: str | bytes) -> bytes:
        """Write a value if the present one is as expected; returns what is there then."""
        return bytes(self._ask(lambda: self.underlying_store.compare_set(key, expected, desired)))

    def _ask(self, call: Callable[[], Any]) -> Any:
        return self._calls.ask(call, self._answer_s)


class _Calls:
    """The thread, and the calls it has still to make; it ends with the last store that uses it.

    Args:
        root: store that all these calls reach in the end.
    """

    def __init__(self, root: Any) -> None:
        self._root = root  # kept: another object would have its id
        self._thread = CallThread("commlib-store")
        self._given_up: list[Future[Any]] = []
        self._lock = threading.Lock()

    @property
    def silent(self) -> bool:
        with self._lock:
            self._given_up = [f for f in self._given_up if not f.done()]
            return bool(self._given_up)

    def ask(self, call: Callable[[], Any], answer_s: float) -> Any:
        if self.silent:
            raise StoreSilent(f"{_SILENT} and has not answered a call before this: {_KEEPER}")
        future = self._thread.submit(call)
        if any(wait([future], answer_s / _PARTS)[0] for _ in range(_PARTS)):
            try:
                return future.result()
            except DistNetworkError as e:
                raise StoreSilent(f"{_SILENT} any more: {_KEEPER} ({e})") from e
        with self._lock:
            self._given_up.append(future)
        raise StoreSilent(f"{_SILENT} within {answer_s:g} s: {_KEEPER}")


_ROOTS: weakref.WeakValueDictionary[int, _Calls] = weakref.WeakValueDictionary()
_FINDING = threading.Lock()


def _calls_to(store: Any) -> _Calls:
    """The calls of this process to what a store, or the prefix of one, is kept in."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    with _FINDING:
        found = _ROOTS.get(id(store))
        if found is None:
            _ROOTS[id(store)] = found = _Calls(store)
    return found


_OF_GROUPS: weakref.WeakKeyDictionary[Any, DeadlineStore] = weakref.WeakKeyDictionary()


def store_of(group: Any) -> DeadlineStore:
    """The key-value store behind a process group; the same one for each call of a group.

    It answers within the deadline of the group's collectives, and within :data:`ANSWER_S` where that is longer.
    """
    with contextlib.suppress(KeyError, TypeError):
        return _OF_GROUPS[group]
    if hasattr(group, "get_group_store"):
        found = group.get_group_store()
    else:
        found = distributed_c10d._get_process_group_store(group)  # torch 2.7: the group does not know it
    store = found if isinstance(found, DeadlineStore) else DeadlineStore(found)
    store = store.within(min([ANSWER_S, *_deadlines(group)]))
    with contextlib.suppress(TypeError):  # a group that cannot be referred to weakly
        _OF_GROUPS[group] = store
    return store


def _deadlines(group: Any) -> Iterator[float]:
    """Seconds that collectives of a group may take, by each of its backends that says so."""
    for each in [group._get_backend(d) for d in getattr(group, "_device_types", [])] or [group]:
        timeout = getattr(getattr(each, "options", None), "_timeout", None)
        if timeout is not None:
            yield timeout.total_seconds()
