"""``zeromq``: endpoints over TCP, each side known to the other by its key (CurveZMQ), unless told otherwise.

Each has a socket that takes what comes, of whomever, and one for every peer that it sends to; none is used for both, so
a thread that sends never waits for one that reads. ZeroMQ connects, and connects again after a cut; what was under way
in a cut may be lost, which :mod:`commlib.messaging.peers` sees by the numbers of the frames. How much is under way
:mod:`commlib.messaging.flow_control` decides, so the sending queues have no limit of their own, and nothing that is
handed over waits.
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import re
import time
from collections.abc import Collection, Sequence
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from commlib.errors import AuthenticationError, CommlibError, PeerLost
from commlib.messaging.endpoint import Endpoint, Sent
from commlib.messaging.frame import DEFAULT, Buffer, Limits
from commlib.messaging.keys import KeyPair, check_public
from commlib.messaging.peers import Arrival, Gone

from .zeromq_monitor import Watch

_log = logging.getLogger("commlib")
_ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:.%\w]+\]|[^\s:/\[\]]+):(\d{1,5})")
_COPIED = 1 << 16  # parts up to so many bytes are copied: that takes less than to tell when one is free
_AT_ONCE = 64  # frames taken in one go
_LOGGED = 20  # of those who are turned away
_HANDSHAKE_MS, _AGAIN_MS, _SLOWEST_MS = 5_000, 50, 2_000
# By the kernel, after half a minute of silence. ZeroMQ's own heartbeats are late where cores are busy or the line is
# full, and end connections that are well, with what is on its way.
_KEEPALIVE = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 30, zmq.TCP_KEEPALIVE_INTVL: 10, zmq.TCP_KEEPALIVE_CNT: 6}
_DOMAIN = b"commlib"
# As numbers: to combine them as pyzmq's enumerations takes longer than to send.
_LAST, _MORE, _COMES = int(zmq.DONTWAIT), int(zmq.DONTWAIT) | int(zmq.SNDMORE), int(zmq.POLLIN)


class ZeroMQ(Endpoint):
    """An endpoint that others reach over TCP.

    Args:
        rank: this one's.
        host: the interface's address to listen at, or a name of it.
        port: 0 takes a free one.
        keys: this side's; without, only this machine is talked to, or (``insecure``) anyone, with nothing kept secret.
        allowed: public keys of those who may send to this one.
        hosts: addresses from which connections are taken, and ``10.0.0.0/24`` for many; no other ever gets as far as a
            handshake. This one connects from ``host`` then. Default: all.
        insecure: without keys, and beyond this machine.
        secret: that all endpoints of the job know, and nobody else; without keys, who does not know it gets no further
            than the handshake, and nothing of what it sends is kept. It is not encrypted. Default: none is asked for.
        options: of :class:`~commlib.messaging.endpoint.Endpoint`.

    Raises:
        ValueError: an allowed key, or a host's address, that is none.
        AuthenticationError: no keys, and beyond this machine.
        CommlibError: it cannot listen there: the port is in use, say.
    """

    def __init__(
        self,
        rank: int,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        keys: KeyPair | None = None,
        allowed: Collection[str] = (),
        hosts: Collection[str] = (),
        insecure: bool = False,
        secret: str = "",
        limits: Limits = DEFAULT,
        **options: Any,
    ) -> None:
        super().__init__(rank, limits=limits, **options)
        if keys is None and not insecure and not is_loopback(host):
            raise AuthenticationError(
                f"rank {rank} would listen at {host}, beyond this machine, without keys: make some "
                "and allow each other's (commlib.messaging.keys), "
                "or say insecure=True where every host of the network is yours"
            )
        if keys is None and not is_loopback(host):
            _log.warning("rank %d listens at %s with insecure=True: anyone there can read and send frames", rank, host)
        networks = [_network(each) for each in hosts]
        guests = self.allowed = frozenset(check_public(k) for k in allowed)
        self._keys, self._insecure = keys, insecure
        self._password = hashlib.sha256(secret.encode()).hexdigest() if secret and keys is None else ""
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.ROUTER)
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._door = _Door(self._context, guests, self._password) if keys or self._password else None
        self._ways: dict[int, zmq.Socket[bytes]] = {}
        self._watch = Watch(self._peers.connection)
        self._configure(self._inbox, limits)
        self._host = f"[{host}]" if ":" in host else host
        self._from = f"{self._host}:0;" if hosts else ""
        try:
            for each in networks:
                self._inbox.setsockopt(zmq.TCP_ACCEPT_FILTER, each)
            self._inbox.bind(f"tcp://{self._host}:{port or '*'}")
        except zmq.ZMQError as e:
            self._shut((), 0)
            raise CommlibError(f"rank {rank} cannot listen at {self._host} port {port or 'any'}: {e.strerror}") from e
        self._port = int(self._inbox.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    @property
    def address(self) -> str:
        return f"tcp://{self._host}:{self._port}"

    @property
    def public_key(self) -> str | None:
        """Public key of this endpoint, if it has one."""
        return self._keys.public if self._keys else None

    def _configure(self, socket: zmq.Socket[bytes], limits: Limits) -> None:
        for option, value in {
            zmq.LINGER: 0,
            zmq.IPV6: 1,
            zmq.SNDHWM: 0,
            zmq.MAXMSGSIZE: limits.nbytes,
            zmq.HANDSHAKE_IVL: _HANDSHAKE_MS,
            **_KEEPALIVE,
            zmq.RECONNECT_IVL: _AGAIN_MS,
            zmq.RECONNECT_IVL_MAX: _SLOWEST_MS,
        }.items():
            socket.setsockopt(option, value)
        if self._keys is not None:
            socket.curve_secretkey, socket.curve_publickey = self._keys.secret.encode(), self._keys.public.encode()
            socket.curve_server = socket.type == zmq.ROUTER
            socket.zap_domain = _DOMAIN
        elif self._password and socket.type == zmq.ROUTER:
            socket.plain_server, socket.zap_domain = True, _DOMAIN
        elif self._password:
            socket.plain_username, socket.plain_password = _DOMAIN, self._password.encode()

    def _open(self, peer: int, address: str, key: str | None) -> None:
        found = _ADDRESS.fullmatch(address)
        if found is None or not 0 < int(found[2]) < 1 << 16:
            raise ValueError(f"an address is tcp://host:port, got {address!r}")
        if (key is None) != (self._keys is None):
            has = "no key is given" if key is None else f"a key is given, and rank {self.rank} has none itself"
            raise AuthenticationError(f"rank {self.rank} cannot reach rank {peer}: {has}")
        if key is None and not self._insecure and not is_loopback(found[1].strip("[]")):
            raise AuthenticationError(
                f"rank {peer} at {address} is beyond this machine: keys are needed, or insecure=True"
            )
        way = self._context.socket(zmq.DEALER)
        try:
            self._configure(way, self._limits)
            if key is not None:
                way.curve_server, way.curve_serverkey = False, check_public(key).encode()
            self._watch.add(peer, way, address)
            way.connect(f"tcp://{self._from}{address.removeprefix('tcp://')}")
        except BaseException as e:
            way.close(0)
            if isinstance(e, zmq.ZMQError):
                raise ValueError(f"rank {peer} cannot be reached at {address}: {e.strerror}") from e
            raise
        old, self._ways[peer] = self._ways.get(peer), way
        if old is not None:
            old.close(0)

    def _put(self, peer: int, buffers: Sequence[Buffer]) -> Sent:
        way, last = self._ways[peer], len(buffers) - 1
        trackers = []
        try:
            for i, buffer in enumerate(buffers):
                flags = _MORE if i < last else _LAST
                if memoryview(buffer).nbytes > _COPIED:
                    trackers.append(way.send(buffer, flags, copy=False, track=True))
                else:
                    way.send(buffer, flags)
        except zmq.Again:  # nothing is too much for it: it has been told not to come again
            key = f": does it allow {self._keys.public}?" if self._keys else ""
            raise PeerLost(f"rank {peer} has refused the connection of rank {self.rank}{key}") from None
        return _Leaving(trackers)

    def _take(self, seconds: float) -> Sequence[Arrival | Gone]:
        came: list[Arrival | Gone] = []
        more = bool(self._poller.poll(round(1000 * seconds)))
        while more and len(came) < _AT_ONCE:
            connection, *frames = self._inbox.recv_multipart(_LAST, copy=False)
            self._watch.came(connection.bytes, connection)
            identity = str(connection.get("User-Id")) if self._keys is not None else None
            came.append(Arrival(connection.bytes, identity, [f.buffer for f in frames]))
            more = bool(self._events() & _COMES)
        came += self._watch.look(idle=not came, drained=not more)
        return came

    def _events(self) -> int:
        found = self._inbox.getsockopt(zmq.EVENTS)
        assert isinstance(found, int)
        return found

    def _shut(self, peers: Sequence[int], seconds: float) -> None:
        self._watch.close()
        for peer, way in self._ways.items():
            way.close(round(1000 * seconds) if peer in peers else 0)
        self._inbox.close(0)
        if self._door is not None:
            self._door.close()
        self._context.term()


class _Leaving:
    """Parts of a frame that were not copied, until they have left."""

    def __init__(self, trackers: Sequence[zmq.MessageTracker]) -> None:
        self._trackers = trackers

    def wait(self, timeout: float) -> bool:
        end = time.monotonic() + timeout
        try:
            for tracker in self._trackers:
                tracker.wait(max(0.0, end - time.monotonic()))
        except zmq.NotDone:
            return False
        return True


class _Door:
    """Lets those in whose keys are allowed, or who know the password (RFC 27); says whose key was turned away."""

    def __init__(self, context: zmq.Context[Any], allowed: frozenset[str], password: str) -> None:
        self._allowed, self._turned_away = allowed, 0
        self._authenticator = ThreadAuthenticator(context, log=logging.getLogger("commlib.zap"))
        self._authenticator.start()
        if password:
            self._authenticator.configure_plain(_DOMAIN.decode(), {_DOMAIN.decode(): password})
        else:
            self._authenticator.configure_curve_callback(_DOMAIN.decode(), self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether one with this public key, Z85, may come in; ZeroMQ's authenticator asks."""
        known = key.decode() in self._allowed
        self._turned_away += not known
        if not known and self._turned_away <= _LOGGED:
            more = "; further ones are not logged" if self._turned_away == _LOGGED else ""
            _log.warning("turned away one with key %s, which is not allowed here%s", key.decode(), more)
        return known

    def close(self) -> None:
        """Ends its thread."""
        self._authenticator.stop()


def _network(given: str) -> bytes:
    """As ZeroMQ compares it: its sockets are IPv6's, where IPv4 addresses are the ones in ::ffff:0:0/96."""
    try:
        found = ipaddress.ip_network(given.partition("%")[0])
    except ValueError as e:
        raise ValueError(f"hosts are addresses, or networks such as 10.0.0.0/24, got {given!r}: {e}") from None
    if found.version == 4:
        return f"::ffff:{found.network_address}/{96 + found.prefixlen}".encode()
    return str(found).encode()


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach that."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
