"""Wires that can be cut, and process groups over them, all ranks threads of one process; and bytes that groups send."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import socket
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgpack
import torch
import torch.distributed as dist
import zmq
from torch import Tensor
from zmq.utils.monitor import recv_monitor_message

from commlib.groups.world import World
from commlib.transports.options import Options
from commlib.transports.process_group.factory import create
from commlib.transports.process_group.group import ZmqGroup

T = TypeVar("T")


class Wire:
    """Between whoever connects and an address.

    Args:
        piece_s: seconds that each 64 KiB take.
        towards: is given what is sent to the address, and returns what arrives there.
    """

    def __init__(self, address: str, piece_s: float = 0.0, towards: Callable[[bytes], bytes] = bytes) -> None:
        self._piece_s, self._towards = piece_s, towards
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._to = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(self._to)
                except OSError:  # nobody listens there any more
                    near.close()
                    continue
                self._open += [near, far]
                for way in ((near, far, self._towards), (far, near, bytes)):
                    threading.Thread(target=self._pump, args=way, daemon=True).start()

    def _pump(self, one: socket.socket, other: socket.socket, passes: Callable[[bytes], bytes]) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                time.sleep(self._piece_s)
                other.sendall(passes(data))
        self._end(one, other)

    def _end(self, *ends: socket.socket) -> None:
        for s in ends:
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)
            s.close()

    def cut(self) -> None:
        """Ends every connection; new ones may come."""
        ends, self._open = self._open, []
        self._end(*ends)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)
        self.cut()


def new_store() -> Any:
    """Of this process only."""
    return torch._C._distributed_c10d.HashStore()


class WiredStore:
    """A store in which every rank is found at the near end of a wire to it."""

    def __init__(self) -> None:
        self._store: Any = new_store()
        self.wires: list[Wire] = []

    def set(self, key: str, value: bytes) -> None:
        if key.startswith(("zmq/at/", "zmq/mail/")):
            address, public = msgpack.unpackb(value)
            self.wires.append(Wire(address))
            value = msgpack.packb([self.wires[-1].address, public])
        self._store.set(key, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def close(self) -> None:
        for wire in self.wires:
            wire.close()


@contextlib.contextmanager
def groups(
    size: int, *, seconds: float = 60.0, store: Any = None, options: Sequence[Options] | None = None
) -> Iterator[list[ZmqGroup]]:
    """One process group's ranks, each to be used by a thread of its own (:func:`each`).

    Args:
        seconds: to find each other, and of every call until :func:`set_deadline` says otherwise.
    """
    given = store or new_store()

    def join(rank: int) -> ZmqGroup:
        about = types.SimpleNamespace(
            store=given,
            group_rank=rank,
            group_size=size,
            timeout=datetime.timedelta(seconds=seconds),
            group_id="test",
        )
        return create(about, options[rank] if options else Options())

    made = each(range(size), join)
    try:
        yield made
    finally:
        each(made, lambda group: group.shutdown())


def set_deadline(ranks: Sequence[ZmqGroup], seconds: float) -> None:
    """Of the calls of these ranks from now on."""
    for group in ranks:
        group.set_timeout(datetime.timedelta(seconds=seconds))


def each(ranks: Sequence[Any], job: Callable[[Any], T]) -> list[T]:
    """What the job gives for each, all at once; the first error there is."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(job, ranks))


def said(call: Callable[[], object]) -> str:
    """The message of the error that a call of the world's raises; what it is called, before."""
    try:
        call()
    except RuntimeError as e:
        return f"{type(e).__name__}: {e}"
    return "no error"


@contextlib.contextmanager
def counted(world: World) -> Iterator[list[float]]:
    """Counts, at the process group's own methods, what a ring (or pairwise sends) puts on the wire.

    A list to be added up, for lanes issue from threads of their own: `+=` would lose some of it.
    """
    sent: list[float] = []
    group: Any = dist.ProcessGroup
    originals = {name: group.__dict__[name] for name in ("allreduce", "_allgather_base", "alltoall_base")}

    def bound(self: Any, name: str) -> Any:
        return originals[name].__get__(self, type(self))

    def allreduce(self: Any, tensors: list[Tensor], *args: Any) -> Any:
        sent.append(2 * (world.size - 1) / world.size * sum(t.nbytes for t in tensors))
        return bound(self, "allreduce")(tensors, *args)

    def allgather(self: Any, out: Tensor, tensor: Tensor, *args: Any) -> Any:
        assert out.nbytes == world.size * tensor.nbytes
        sent.append((world.size - 1) * tensor.nbytes)
        return bound(self, "_allgather_base")(out, tensor, *args)

    def alltoall(self: Any, out: Tensor, tensor: Tensor, out_splits: list[int], splits: list[int], *args: Any) -> Any:
        sent.append(tensor.nbytes * (1 - splits[world.rank] / sum(splits)))
        return bound(self, "alltoall_base")(out, tensor, out_splits, splits, *args)

    for name, replacement in zip(originals, (allreduce, allgather, alltoall), strict=True):
        setattr(group, name, replacement)
    try:
        yield sent
    finally:
        for name, original in originals.items():
            setattr(group, name, original)


def gets_in(address: str, secret: str | None) -> bool:
    """Whether a stranger that guesses a secret, or knows of none, gets through the handshake at an address."""
    over = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    with zmq.Context() as context, context.socket(zmq.DEALER) as way:
        way.linger = 0
        if secret is not None:
            way.plain_username, way.plain_password = b"commlib", hashlib.sha256(secret.encode()).hexdigest().encode()
        with way.get_monitor_socket(over) as said:
            way.connect(address)
            assert said.poll(60_000), "it is left standing before the door"
            found = bool(recv_monitor_message(said)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED)
            way.disable_monitor()
        return found
