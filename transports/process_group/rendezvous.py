"""How the ranks of a group find each other, and what their line is like: by the store that torch.distributed gives."""

from __future__ import annotations

import datetime
import functools
import secrets
import statistics
import time
import types
from collections.abc import Callable
from typing import Any

import msgpack
import torch

from commlib.errors import AuthenticationError, CommlibError, PeerLost, StoreSilent
from commlib.groups.handshake import wait_for, wait_for_all
from commlib.groups.store import DeadlineStore
from commlib.groups.world import World
from commlib.messaging import keys
from commlib.messaging.frame import to_buffer
from commlib.messaging.link_model import AlphaBeta
from commlib.messaging.network import address_towards, machine, store_host
from commlib.transports.options import Options
from commlib.transports.zeromq import ZeroMQ, is_loopback

from .engine import GLANCE_S

_DECLINED = "declined"
_PINGS, _BULK = 9, 1 << 19
_BETA = 2e-10  # seconds a byte: no line is faster than what copies for it


def say(store: DeadlineStore, key: str, world: World, mine: Any) -> None:
    """Leaves something for the others."""
    store.set(f"{key}/{world.rank}", msgpack.packb(mine))


def hear(store: DeadlineStore, key: str, world: World, seconds: float) -> list[Any]:
    """Words of all ranks, in their order.

    Raises:
        PeerLost: who has said nothing in time, or declined.
    """
    missing = wait_for_all(store, key, world, seconds)
    if missing:
        who = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        raise PeerLost(f"rank {world.rank} waited {seconds:g} s, and {who} of {world.size} did not come")
    said = [msgpack.unpackb(store.get(f"{key}/{r}")) for r in range(world.size)]
    for rank, words in enumerate(said):
        if isinstance(words, dict):
            raise PeerLost(f"rank {rank} cannot join the group: {words[_DECLINED]}")
    return said


def decline(store: DeadlineStore, key: str, world: World, why: BaseException) -> None:
    """Says why this rank does not come: the others need not wait for it."""
    say(store, key, world, {_DECLINED: f"{type(why).__name__}: {why}"})


def opener(store: DeadlineStore, key: str, world: World, options: Options, seconds: float) -> Callable[[str], ZeroMQ]:
    """Function that opens this rank's endpoints, by their job: at the right interface, with keys where needed.

    All ranks come.

    Raises:
        PeerLost: a rank does not come.
        AuthenticationError: keys are needed, and there are none.
        CommlibError: an interface that the others cannot reach.
    """
    host, hosts, secret = _hosts(store, key, world, options, seconds)
    given: dict[str, Any] = {"host": host, "secret": secret, "ranks": world.size}
    given |= {"timeout": seconds, "window": options.window}
    if not is_loopback(host) and not options.hears_any_source():
        given["hosts"] = hosts
    if options.keys is None and is_loopback(host):
        pass
    elif options.goes_insecure():
        given["insecure"] = True
    else:
        pair = options.pair()
        given |= {"keys": pair, "allowed": {pair.public, *keys.allowed()}}
    return lambda job: ZeroMQ(world.rank, job=job, **given)


def _hosts(store: DeadlineStore, key: str, world: World, options: Options, seconds: float) -> tuple[str, set[str], str]:
    """The address at which this rank is to listen, all ranks', and a secret that rank 0 draws."""
    say(store, f"{key}/machine", world, machine())
    machines = set(hear(store, f"{key}/machine", world, seconds))
    try:
        host = options.wanted_host()
        if host is None:
            there = store_host(store)
            host = "127.0.0.1" if len(machines) == 1 or there is None else address_towards(there)
        if is_loopback(host) and len(machines) > 1:
            raise CommlibError(
                f"rank {world.rank} would listen at {host}, where only this machine comes, and the group is of "
                f"{len(machines)} machines: name the interface by COMMLIB_HOST"
            )
    except BaseException as e:
        decline(store, f"{key}/host", world, e)
        raise
    say(store, f"{key}/host", world, [host, secrets.token_hex(16)])
    said = hear(store, f"{key}/host", world, seconds)
    return host, {each for each, _ in said}, said[0][1]


def introduce(store: DeadlineStore, key: str, world: World, endpoint: ZeroMQ) -> None:
    """Tells the others where this rank is."""
    say(store, key, world, [endpoint.address, endpoint.public_key])


def connect(store: DeadlineStore, key: str, peer: int, endpoint: ZeroMQ, seconds: float) -> None:
    """Opens the way to a rank, once it has introduced itself.

    Raises:
        PeerLost: it does not in time.
        AuthenticationError: it has a key, and this one does not allow that; or only one of the two has one.
    """
    try:
        store.wait([f"{key}/{peer}"], datetime.timedelta(seconds=seconds))
    except StoreSilent:
        raise
    except RuntimeError as e:
        raise PeerLost(f"rank {peer} has not told rank {endpoint.rank} where it is for {seconds:g} s") from e
    address, its_key = msgpack.unpackb(store.get(f"{key}/{peer}"))
    if its_key is not None and endpoint.public_key is not None and its_key not in endpoint.allowed:
        raise AuthenticationError(
            f"rank {peer} at {address} has key {its_key}, which is not allowed here: see 'commlib keys allow'"
        )
    if (its_key is None) != (endpoint.public_key is None):
        raise AuthenticationError(
            f"rank {endpoint.rank} has {'a' if its_key is None else 'no'} key, and rank {peer} has "
            f"{'none' if its_key is None else 'one'}: all ranks need COMMLIB_INSECURE=1, or none"
        )
    endpoint.connect(peer, address, key=its_key)


def measure(store: DeadlineStore, key: str, world: World, endpoint: ZeroMQ, seconds: float) -> AlphaBeta:
    """α and β of a message from a rank to the next: ranks 0 and 1 measure, and all are told. All ranks come.

    Raises:
        PeerLost: one of the two does not answer, or is gone.
    """
    if world.size == 1:
        return AlphaBeta(0.0, 0.0)
    if world.rank < 2:
        other, small = 1 - world.rank, bytes(1)
        bulk = to_buffer(torch.zeros(_BULK, dtype=torch.uint8))
        took = []
        for part in (*[small] * _PINGS, *[bulk] * 4):
            began = time.perf_counter()
            endpoint.send(other, parts=(part,))
            endpoint.recv(other)
            took.append(time.perf_counter() - began)
        pings, bulks = took[:_PINGS], took[_PINGS:]
        found = [statistics.median(pings), max(_BETA, (min(bulks) - min(pings)) / _BULK)]  # a line starts slowly
        if world.rank == 0:
            store.set(f"{key}/line", msgpack.packb(found))
    heard = types.SimpleNamespace(peers_gone=functools.partial(endpoint.gone, GLANCE_S))
    if wait_for(store, dict.fromkeys((0, 1), f"{key}/line"), seconds, heard):
        gone = "".join(f"; {why}" for why in heard.peers_gone().values())
        raise PeerLost(
            f"rank {world.rank} waited up to {seconds:g} s, and ranks 0 and 1 of {world.size} have not measured their "
            f"line{gone}"
        )
    return AlphaBeta(*msgpack.unpackb(store.get(f"{key}/line")))
