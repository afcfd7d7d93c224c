"""Calls in a thread of their own: made in order, each with its answer, by a thread that goes with who asked."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

import pytest

from commlib.groups.call_thread import CallThread

DEADLINE_S = 60.0  # against hanging


def test_calls_are_made_in_the_order_asked_for_by_one_thread_and_each_has_its_own_answer() -> None:
    calls, by, order = CallThread("test-calls"), set[int](), list[int]()

    def call(i: int) -> int:
        by.add(threading.get_ident())
        order.append(i)
        if i == 3:
            raise ValueError("the third")
        return i * i

    futures = [calls.submit(lambda i=i: call(i)) for i in range(6)]  # type: ignore[misc]
    assert [f.result(DEADLINE_S) for i, f in enumerate(futures) if i != 3] == [0, 1, 4, 16, 25]
    with pytest.raises(ValueError, match="the third"):
        futures[3].result(DEADLINE_S)
    assert order == list(range(6))
    assert len(by) == 1
    assert by != {threading.get_ident()}


def test_no_thread_before_the_first_call_and_none_after_the_last_who_could_ask_has_gone() -> None:
    def threads() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name == "test-of-none"]

    calls = CallThread("test-of-none")
    assert threads() == []
    calls.submit(lambda: None).result(DEADLINE_S)
    (thread,) = threads()
    del calls
    gc.collect()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_what_was_called_is_not_kept_until_the_next_call() -> None:
    class Held:
        pass

    held, calls = Held(), CallThread("test-kept")
    gone = threading.Event()
    weakref.finalize(held, gone.set)
    calls.submit(lambda held=held: None).result(DEADLINE_S)  # type: ignore[misc]
    del held
    assert gone.wait(DEADLINE_S)


def test_a_call_that_never_returns_does_not_keep_the_process() -> None:
    code = (
        "import threading\nfrom commlib.groups.call_thread import CallThread\n"
        "begun, calls = threading.Event(), CallThread('never')\n"
        "calls.submit(lambda: (begun.set(), threading.Event().wait()))\nbegun.wait()\nprint('ends')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout.strip()) == (0, "ends"), done.stderr
