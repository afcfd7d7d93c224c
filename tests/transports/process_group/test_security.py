"""With keys, whoever has none, a wrong one, or repeats what it has heard is refused and logged; training goes on."""

from __future__ import annotations

import contextlib
import datetime
import logging
import socket
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
import zmq

from commlib.errors import AuthenticationError, CommlibError, PeerLost
from commlib.messaging import keys
from commlib.messaging.frame import Frame, encode
from commlib.transports.options import Options
from commlib.transports.process_group import rendezvous
from commlib.transports.process_group.factory import create
from commlib.transports.process_group.group import ZmqGroup
from commlib.transports.zeromq import ZeroMQ
from tests.support.thread_groups import each, gets_in, groups, new_store

A, B, STRANGER = (keys.KeyPair.new() for _ in range(3))


@pytest.fixture
def allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Both hosts' keys are on the list, which the two of this process share."""
    monkeypatch.setenv("COMMLIB_KEYS", str(tmp_path))
    keys.allow(A.public, "a", tmp_path)
    keys.allow(B.public, "b", tmp_path)
    return tmp_path


@contextlib.contextmanager
def training(options: list[Options]) -> Iterator[tuple[str, Any]]:
    """Two ranks train while what is inside tries its best. Gives rank 0's address and key."""
    store, ended = new_store(), threading.Event()
    torch.manual_seed(0)
    target, losses = torch.randn(50), []

    def train(group: ZmqGroup) -> None:
        w, steps = torch.zeros(50), 0
        while True:  # until both hear, in the same call, that it is over
            gradient = (w - target) * (1.0 if group.rank() else 3.0)
            group.allreduce([gradient]).wait()
            w -= 0.05 * gradient
            steps += 1
            stop = torch.tensor([float(ended.is_set() and steps >= 50)])
            group.allreduce([stop]).wait()
            if stop.item():
                break
        losses.append((w - target).norm().item())

    with groups(2, store=store, options=options) as ranks:
        running = threading.Thread(target=each, args=(ranks, train))
        running.start()
        try:
            address, public = msgpack.unpackb(store.get("zmq/at/0"))
            yield address, public
        finally:
            ended.set()
            running.join()
    assert len(losses) == 2
    assert max(losses) < 1e-3, "training was harmed"


def test_strangers_are_refused_and_logged_and_training_is_unharmed(
    allowed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "commlib")
    with training([Options(keys=A), Options(keys=B)]) as (address, public):
        with ZeroMQ(1, job="test", insecure=True) as no_key, contextlib.suppress(PeerLost):  # refused before it speaks
            no_key.connect(0, address)
            no_key.send(0, clock=1, parts=(b"poison",))
        with ZeroMQ(1, job="test", keys=STRANGER) as wrong_key, contextlib.suppress(CommlibError):
            wrong_key.connect(0, address, key=public)
            for _ in range(100):
                wrong_key.send(0, clock=1, parts=(b"poison",))
                threading.Event().wait(0.02)
        flood(address)
        until_logged(caplog, f"turned away one with key {STRANGER.public}")


@pytest.mark.parametrize("guess", [None, "", "test"])
def test_without_keys_who_does_not_know_the_groups_secret_is_refused_in_the_handshake(guess: str | None) -> None:
    with training([Options(), Options()]) as (address, public):
        assert public is None
        assert not gets_in(address, guess)


def until_logged(caplog: pytest.LogCaptureFixture, words: str) -> None:
    """Waits for these; a minute is for a machine with much else to do."""
    end = time.monotonic() + 60
    while words not in caplog.text:
        assert time.monotonic() < end, caplog.text
        time.sleep(0.02)


def flood(address: str) -> None:
    """Two hundred connections that say nothing sensible, or nothing, or HTTP."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with contextlib.ExitStack() as stack:
        for i in range(200):
            s = stack.enter_context(socket.create_connection((host, int(port))))
            with contextlib.suppress(OSError):
                s.sendall((b"", b"GET / HTTP/1.1\r\n\r\n", bytes(1000))[i % 3])


def test_one_who_is_allowed_but_is_no_rank_cannot_speak_as_one(allowed: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys.allow(STRANGER.public, "guest", allowed)
    with training([Options(keys=A), Options(keys=B)]) as (address, public):
        context: zmq.Context[Any] = zmq.Context()
        way = context.socket(zmq.DEALER)
        way.curve_secretkey, way.curve_publickey = STRANGER.secret.encode(), STRANGER.public.encode()
        way.curve_serverkey = public.encode()
        way.connect(address)
        repeated = encode(Frame("hello", 1, 0, keys=("test",), session=7))
        overtaking = encode(Frame("data", 1, 5, clock=1, keys=("all_reduce(50 × float32, sum)",), parts=(bytes(200),)))
        for _ in range(50):  # what a rank has said before, and what it would say next
            way.send_multipart(repeated)
            way.send_multipart(overtaking)
        until_logged(caplog, "refused a frame of a stranger")
        until_logged(caplog, "counts further ones")  # so many have come while the two trained
        way.close(0)
        context.term()


def test_a_rank_whose_key_is_not_allowed_ends_the_meeting_with_its_name(
    allowed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def alone(*args: object) -> None:
        raise PeerLost("it allows rank 0, which will not speak to it")

    monkeypatch.setattr(rendezvous, "measure", alone)  # where rank 1 would wait for rank 0 until its deadline
    both = groups(2, options=[Options(keys=A), Options(keys=STRANGER)])
    with pytest.raises(AuthenticationError, match=r"rank 1 at tcp://.* has key .*, which is not allowed here"):
        both.__enter__()


def test_a_rank_that_cannot_join_says_why_to_those_who_wait_for_it() -> None:
    ended: list[str] = []

    def join(rank: int) -> None:
        about = types.SimpleNamespace(
            store=store, group_rank=rank, group_size=2, timeout=datetime.timedelta(seconds=600), group_id="test"
        )  # longer than pytest waits
        try:
            create(about, Options(host="lo" if rank else "wlan9"))
        except (CommlibError, ValueError) as e:
            ended.append(str(e))

    store = new_store()
    each(range(2), join)
    assert len(ended) == 2
    assert any(
        "got 'wlan9'" in words and words.startswith("rank 0 cannot join the group: ValueError") for words in ended
    )


def test_keys_are_for_all_ranks_or_for_none(allowed: Path) -> None:
    both = groups(2, options=[Options(keys=A), Options()])
    with pytest.raises(AuthenticationError, match="all ranks need COMMLIB_INSECURE=1, or none"):
        both.__enter__()
