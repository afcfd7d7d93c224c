"""Whoever sits between two endpoints with keys reads nothing, and nothing that is changed or repeated arrives."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator

import pytest

from commlib.errors import PeerLost
from commlib.messaging.endpoint import Endpoint
from commlib.messaging.keys import KeyPair
from commlib.transports.zeromq import ZeroMQ
from tests.support.thread_groups import Wire

MINE, YOURS = KeyPair.new(), KeyPair.new()
SAID = b"what nobody else may read, whatever it is"


@contextlib.contextmanager
def across(towards: Callable[[bytes], bytes], keys: bool) -> Iterator[tuple[Endpoint, Endpoint]]:
    """Two endpoints, with keys or without, and somebody on the way from the first to the second."""
    mine, yours = ({"keys": MINE, "allowed": [YOURS.public]}, {"keys": YOURS, "allowed": [MINE.public]})
    with contextlib.ExitStack() as stack:
        a = stack.enter_context(ZeroMQ(0, **(mine if keys else {})))  # type: ignore[arg-type]
        b = stack.enter_context(ZeroMQ(1, **(yours if keys else {})))  # type: ignore[arg-type]
        wire = stack.enter_context(contextlib.closing(Wire(b.address, towards=towards)))
        a.connect(1, wire.address, key=YOURS.public if keys else None)
        b.connect(0, a.address, key=MINE.public if keys else None)
        yield a, b


@pytest.mark.parametrize("keys", [True, False])
def test_who_listens_reads_all_without_keys_and_nothing_with_them(keys: bool) -> None:
    heard = bytearray()

    def listen(data: bytes) -> bytes:
        heard.extend(data)
        return data

    with across(listen, keys) as (a, b):
        a.send(1, keys=("fc.weight",), parts=(SAID,))
        assert bytes(b.recv(0, timeout=60).parts[0]) == SAID
    assert (SAID in heard) is not keys
    assert (b"fc.weight" in heard) is not keys
    assert len(heard) > len(SAID)


@pytest.mark.parametrize("at", [1, 12, -1])
def test_a_frame_of_which_one_bit_was_changed_does_not_arrive(at: int) -> None:
    wanted = [0]

    def change(data: bytes) -> bytes:
        if not wanted[0] or len(data) < len(SAID):
            return data
        wanted[0] -= 1
        changed = bytearray(data)
        changed[at] ^= 1
        return bytes(changed)

    with across(change, keys=True) as (a, b):
        a.send(1, clock=1)
        assert b.recv(0, timeout=60).clock == 1
        wanted[0] = 1
        a.send(1, clock=2, parts=(SAID,))
        with pytest.raises(PeerLost):
            b.recv(0, timeout=2)
        assert wanted[0] == 0


def test_what_was_recorded_is_of_no_use_on_another_connection() -> None:
    heard = bytearray()

    def record(data: bytes) -> bytes:
        heard.extend(data)
        return data

    with across(record, keys=True) as (a, b):
        a.send(1, clock=1, parts=(SAID,))
        assert b.recv(0, timeout=60).clock == 1
        host, _, port = b.address.removeprefix("tcp://").rpartition(":")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=60) as again:
            again.sendall(heard)
            while again.recv(1 << 16):  # until it is ended, or stands still for a second
                again.settimeout(1.0)
        a.send(1, clock=2)
        assert b.recv(0, timeout=60).clock == 2
        with pytest.raises(PeerLost, match="nothing came from rank 0"):
            b.recv(0, timeout=0.5)
