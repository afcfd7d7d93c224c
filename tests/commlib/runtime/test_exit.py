"""``commlib.runtime.exit``: everything is closed once: when its owner is gone, or else before the interpreter ends."""

from __future__ import annotations

import functools
import gc
import hashlib
import logging
import threading
import time

import pytest

from commlib.runtime import exit as end


class Owner:
    pass


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Who was closed, and whether that waited; what other tests have left open is not touched."""
    monkeypatch.setattr(end, "_open", {})
    monkeypatch.setattr(end, "_WHILE_S", 0.0)
    return []


def close(said: list[tuple[str, bool]], name: str, *, wait: bool) -> None:
    said.append((name, wait))
    if name == "faulty":
        raise OSError("no")


def test_it_is_closed_without_waiting_when_its_owner_is_gone_and_not_again(said: list[tuple[str, bool]]) -> None:
    owner = Owner()
    end.close_at_exit(owner, functools.partial(close, said, "a"))
    assert said == []
    del owner
    gc.collect()
    assert said == [("a", False)]
    end._end()
    assert said == [("a", False)]


def test_what_is_alive_at_the_end_is_closed_newest_first_whatever_goes_wrong(
    said: list[tuple[str, bool]], caplog: pytest.LogCaptureFixture
) -> None:
    owners = [Owner() for _ in range(3)]
    for owner, name in zip(owners, ("a", "faulty", "b"), strict=True):
        end.close_at_exit(owner, functools.partial(close, said, name))
    with caplog.at_level(logging.WARNING, "commlib"):
        end._end()
    assert said == [("b", True), ("faulty", True), ("a", True)]
    assert "not closed" in caplog.text
    owners.clear()
    gc.collect()
    assert len(said) == 3


def test_a_thread_that_has_not_had_its_turn_yet_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    work = threading.Thread(target=hashlib.pbkdf2_hmac, args=("sha256", b"", b"", 3_000_000))  # needs no interpreter
    work.start()
    seen = []
    while work.is_alive():
        seen.append(end._others_want_a_core())
        time.sleep(0.001)
    assert any(seen)
    until = time.monotonic() + 60
    while end._others_want_a_core():
        assert time.monotonic() < until


def test_the_end_waits_for_it_and_not_for_ever(said: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [True, True, False]
    monkeypatch.setattr(end, "_others_want_a_core", lambda: answers.pop(0))
    monkeypatch.setattr(end, "_AT_MOST_S", 60.0)
    end._end()
    assert answers == []
    monkeypatch.setattr(end, "_others_want_a_core", lambda: True)
    monkeypatch.setattr(end, "_AT_MOST_S", 0.05)
    end._end()


def test_a_process_fails_once_nobody_has_caught_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("sys.last_value", raising=False)
    assert not end.failing()
    monkeypatch.setattr("sys.last_value", ValueError(), raising=False)
    assert end.failing()
