"""Every transport keeps the contract of endpoints; and the contract is broken by what breaks it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from commlib import testing
from commlib.errors import CommlibError
from commlib.messaging.endpoint import Endpoint, Sent
from commlib.messaging.frame import Buffer
from commlib.messaging.keys import KeyPair
from commlib.messaging.peers import Arrival
from commlib.testing import endpoints
from commlib.testing.endpoints import Join, Make
from commlib.transports import inproc
from commlib.transports.inproc import InProc
from commlib.transports.zeromq import ZeroMQ

KEYS = [KeyPair.new() for _ in range(6)]  # by rank


def with_keys(rank: int, **options: Any) -> Endpoint:
    return ZeroMQ(rank, keys=KEYS[rank], allowed=[k.public for k in KEYS], **options)


def join_with_keys(a: Endpoint, b: Endpoint) -> None:
    a.connect(b.rank, b.address, key=KEYS[b.rank].public)


TRANSPORTS: dict[str, tuple[Make, Join]] = {
    "inproc": (InProc, endpoints.join),
    "zeromq": (ZeroMQ, endpoints.join),
    "zeromq with keys": (with_keys, join_with_keys),
}
PROMISES = {
    check.__name__: check
    for check in (
        endpoints.check_frames,
        endpoints.check_order,
        endpoints.check_buffers,
        endpoints.check_back_pressure,
        endpoints.check_deadline,
        endpoints.check_close,
        endpoints.check_abort,
        endpoints.check_stranger,
    )
}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("promise", PROMISES)
def test_it_keeps(promise: str, transport: str) -> None:
    PROMISES[promise](*TRANSPORTS[transport])


def test_check_endpoint_is_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    for name in PROMISES:
        monkeypatch.setattr(f"commlib.testing.endpoints.{name}", lambda make, join, name=name: done.append(name))
    testing.check_endpoint(InProc)
    assert done == list(PROMISES)


class Forgetful(InProc):
    """Loses its fifth frame."""

    handed = 0

    def _put(self, peer: int, buffers: Sequence[Buffer]) -> Sent:
        self.handed += 1
        return super()._put(peer, buffers if self.handed != 5 else [b""])


class Swapping(InProc):
    """Delivers what came in one go the other way round."""

    def _take(self, seconds: float) -> Sequence[Arrival]:
        return super()._take(seconds)[::-1]


class Sharing(InProc):
    """Hands over the sender's own memory, and says that it is free."""

    def _put(self, peer: int, buffers: Sequence[Buffer]) -> Sent:
        name, connection = self._ways[peer]
        inproc._inboxes[name].put(Arrival(connection, None, list(buffers)))
        return inproc._Copied()


class Boundless(InProc):
    """Knows no back-pressure."""

    def __init__(self, rank: int, **options: Any) -> None:
        super().__init__(rank, **{**options, "window": 1 << 40})


class Mute(InProc):
    """Leaves without a word."""

    def close(self, timeout: float = 5.0) -> None:
        self._closed.set()
        inproc._inboxes.pop(self._name, None)


class Believing(InProc):
    """Takes strangers for friends."""

    def _take(self, seconds: float) -> Sequence[Arrival]:
        return [Arrival(0, None, a.buffers) for a in super()._take(seconds)]


@pytest.mark.parametrize(
    ("kind", "promise"),
    [
        (Forgetful, "check_frames"),
        (Swapping, "check_order"),
        (Sharing, "check_buffers"),
        (Boundless, "check_back_pressure"),
        (Mute, "check_close"),
        (Believing, "check_stranger"),
    ],
)
def test_what_breaks_a_promise_is_found(kind: type[Endpoint], promise: str) -> None:
    impatient: Callable[..., Endpoint] = functools.partial(_impatient, kind)
    with pytest.raises((AssertionError, CommlibError)):
        PROMISES[promise](impatient, endpoints.join)


def _impatient(kind: type[Endpoint], rank: int, **options: Any) -> Endpoint:
    return kind(rank, **{**options, "timeout": 1.0})
