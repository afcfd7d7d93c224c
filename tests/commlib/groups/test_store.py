"""A store of which every call has a deadline, whatever the store below does."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from commlib.errors import PeerLost, StoreSilent
from commlib.groups import store as stores
from commlib.groups.store import DeadlineStore, store_of


class Deaf:
    """A store that stands still until it is woken; it notes what reached it."""

    def __init__(self) -> None:
        self.awake = threading.Event()
        self.reached: list[str] = []

    def set(self, key: str, value: str) -> None:
        self.awake.wait()
        self.reached.append(key)


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> Iterator[Deaf]:
    monkeypatch.setattr(stores, "LEAST_S", 0.0)
    below = Deaf()
    yield below
    below.awake.set()


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "commlib-store"]


def heard_again(store: DeadlineStore) -> None:
    while store.silent:
        time.sleep(0.001)


def test_it_does_what_the_store_below_does() -> None:
    below = c10d.HashStore()
    store = DeadlineStore(below)
    store.set("a", "1")
    assert store.get("a") == b"1"
    assert store.add("n", 2) == 2
    assert store.check(["a", "n"])
    assert not store.check(["a", "b"])
    assert store.compare_set("c", "", "x") == b"x"
    assert store.compare_set("c", "y", "z") == b"x"
    assert store.multi_get(["a", "c"]) == [b"1", b"x"]
    assert store.delete_key("a")
    assert not below.check(["a"])


def test_it_reads_what_is_there_and_waits_for_nothing_else() -> None:
    store = DeadlineStore(c10d.HashStore())
    with pytest.raises(KeyError, match="absent"):
        store.get("absent")


def test_who_waits_hears_of_a_key_that_comes_later_and_of_one_that_does_not() -> None:
    store = DeadlineStore(c10d.HashStore())
    later = threading.Timer(0.1, store.set, ("late", "1"))
    later.start()
    store.wait(["late"], datetime.timedelta(seconds=60))
    later.join()
    with pytest.raises(RuntimeError, match=r"not in the store within 0.05 s: never"):
        store.wait(["late", "never"], datetime.timedelta(seconds=0.05))


def test_a_store_that_stands_still_is_said_to_be_silent_and_nobody_waits_for_it_twice(deaf: Deaf) -> None:
    store = DeadlineStore(deaf).within(0.2)
    with pytest.raises(StoreSilent, match=r"does not answer within 0.2 s: who keeps it .* is stopped"):
        store.set("a", "1")
    assert store.silent
    for ask in (store.within(3600.0), DeadlineStore(deaf)):
        with pytest.raises(PeerLost, match="has not answered a call before this: who keeps it"):  # a StoreSilent is one
            ask.set("b", "1")
    assert deaf.reached == []
    deaf.awake.set()
    heard_again(store)
    assert deaf.reached == ["a"]  # the others were never asked for


def test_a_process_that_stood_still_for_longer_than_a_store_has_to_answer_still_hears_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stores, "LEAST_S", 0.0)
    answers, answer = os.pipe()
    words, told = os.pipe()

    class Slow:
        def set(self, key: str, value: str) -> None:
            os.write(told, b"asked ")
            os.read(answers, 1)

    if (pid := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            try:
                DeadlineStore(Slow()).within(1.6).set("a", "1")
                os.write(told, b"answered")
            except StoreSilent:
                os.write(told, b"silent")
        os._exit(0)
    try:
        assert os.read(words, 9) == b"asked "
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1.7)  # not a race: what it waits for comes when it goes on
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.05)  # but not before it could give up
        os.write(answer, b"1")
        assert os.read(words, 9) == b"answered"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for end in (answers, answer, words, told):
            os.close(end)


def test_a_store_that_wakes_up_is_asked_again_and_hears_what_it_had_been_told(deaf: Deaf) -> None:
    store = DeadlineStore(deaf)
    with pytest.raises(StoreSilent):
        store.within(0.05).set("a", "1")
    deaf.awake.set()
    heard_again(store)
    store.set("b", "1")
    assert deaf.reached == ["a", "b"]


def test_calls_are_made_in_the_order_in_which_they_are_asked_for() -> None:
    store, below = DeadlineStore(made := c10d.HashStore()), made
    for i in range(200):
        store.set("last", str(i))
        assert below.get("last") == str(i).encode()


def test_an_error_of_the_store_below_is_the_callers() -> None:
    class Broken:
        def add(self, key: str, amount: int) -> int:
            raise RuntimeError("Connection reset by peer")

    with pytest.raises(RuntimeError, match="Connection reset by peer"):
        DeadlineStore(Broken()).add("a", 1)


def test_many_threads_ask_at_once_and_each_has_its_own_answer() -> None:
    store, found = DeadlineStore(c10d.HashStore()), list[int]()

    def count() -> None:
        found.extend(store.add("n", 1) for _ in range(50))

    some = [threading.Thread(target=count) for _ in range(8)]
    for thread in some:
        thread.start()
    for thread in some:
        thread.join()
    assert sorted(found) == list(range(1, 401))


def test_its_thread_begins_with_the_first_call_and_ends_with_the_last_of_its_stores() -> None:
    before = set(threads())
    store = DeadlineStore(c10d.HashStore())
    assert set(threads()) == before
    store.set("a", "1")
    (thread,) = set(threads()) - before
    other = store.within(5.0)
    del store
    gc.collect()
    other.set("b", "1")
    assert set(threads()) - before == {thread}
    del other
    gc.collect()
    thread.join(60.0)
    assert not thread.is_alive()


def test_all_prefixes_of_a_store_share_its_thread_and_its_silence(deaf: Deaf) -> None:
    root = c10d.HashStore()
    one, other = (DeadlineStore(c10d.PrefixStore(name, root)) for name in "ab")
    one.set("x", "1")
    before = set(threads())
    other.set("x", "2")
    assert set(threads()) == before
    assert (one.get("x"), other.get("x")) == (b"1", b"2")
    first, second = DeadlineStore(deaf).within(0.05), DeadlineStore(deaf)
    with pytest.raises(StoreSilent):
        first.set("x", "1")
    assert second.silent


def test_a_group_has_one_store_and_does_not_live_for_it() -> None:
    class Group:
        def get_group_store(self) -> Any:
            return c10d.HashStore()

    group = Group()
    assert store_of(group) is store_of(group)
    gone = weakref.ref(group)
    del group
    gc.collect()
    assert gone() is None


def test_the_store_of_a_group_of_pytorchs_is_told_by_its_prefix() -> None:
    dist.init_process_group("gloo", store=c10d.HashStore(), rank=0, world_size=1)
    try:
        store_of(dist.group.WORLD).set("mine", "1")
        assert store_of(dist.group.WORLD).get("mine") == b"1"
        assert hasattr(store_of(dist.group.WORLD).underlying_store, "underlying_store")
    finally:
        dist.destroy_process_group()


def test_a_store_whose_keeper_has_left_is_said_to_be_silent_and_not_a_network_error() -> None:
    kept = c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = DeadlineStore(c10d.TCPStore("127.0.0.1", kept.port, is_master=False))
    store.set("a", "1")
    del kept
    for call in (lambda: store.get("a"), lambda: store.add("n", 1), lambda: store.check(["a"])):
        with pytest.raises(StoreSilent, match="does not answer any more: who keeps it"):
            call()
