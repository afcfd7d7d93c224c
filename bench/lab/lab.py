"""The lab: hosts that exist while one keeper process does."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from . import network_commands
from .namespaces import LabError, NamespaceHolder
from .network_commands import HIGHEST, LOWEST

_AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
_PATIENCE_S = 30.0  # for one command; they take milliseconds


@dataclasses.dataclass(frozen=True)
class Counters:
    """Counts of a host's interface since the lab was made. Bytes are whole frames, headers included.

    A packet here is what the kernel hands to the interface: with segmentation offload one packet may be up
    to 64 kB, with one set of headers.
    """

    sent_bytes: int
    sent_packets: int
    received_bytes: int
    received_packets: int
    dropped: int

    def __sub__(self, other: Counters) -> Counters:
        a, b = dataclasses.astuple(self), dataclasses.astuple(other)
        return Counters(*(x - y for x, y in zip(a, b, strict=True)))


class Lab:
    """Emulated hosts on a switch. A context manager; the hosts stand when the constructor returns.

    Args:
        hosts: how many, 1 … 64.
        rate: bit/s of every host's link, each way; None is as fast as this machine can.
        ranks_per_host: ranks that :meth:`environment` and :meth:`prefix` spread over the hosts, in torchrun's
            order: the first so many on host 0.

    Raises:
        ValueError: a number that cannot be.
        LabError: no lab can be made here; :func:`unavailable` says the same without raising.
    """

    def __init__(self, hosts: int, rate: float | None = None, *, ranks_per_host: int = 1) -> None:
        if not 1 <= hosts <= network_commands.MOST_HOSTS:
            raise ValueError(f"a lab has 1 to {network_commands.MOST_HOSTS} hosts, got {hosts}")
        if ranks_per_host < 1:
            raise ValueError(f"ranks_per_host must be at least 1, got {ranks_per_host}")
        self.hosts, self.ranks_per_host = hosts, ranks_per_host
        self.world_size = hosts * ranks_per_host
        self._rates: list[float | None] = [None] * hosts
        self._starts = 0
        self._lock = threading.Lock()  # a schedule may change the rate while another thread reads counters
        self._keeper = NamespaceHolder(network_commands.names(hosts))
        try:
            self._batch("ip", network_commands.build(hosts))
            congestion = network_commands.congestion(_AVAILABLE.read_text())
            for h in range(hosts):
                self._batch("ip", network_commands.inside(h, congestion), host=h)
            if rate is not None:
                self.set_rate(rate)
        except BaseException:
            self.close()
            raise

    # -- hosts and links ------------------------------------------------------------------------

    def set_rate(self, rate: float | None, host: int | None = None) -> None:
        """Give one host's link, or every one, another rate (bit/s, each way) at once; None is no limit."""
        if rate is not None and not LOWEST <= rate <= HIGHEST:
            raise ValueError(f"a link can have 64kbit to 100gbit, got {rate:g} bit/s")
        with self._lock:
            for h in self._each(host):
                if rate is not None or self._rates[h] is not None:
                    self._batch("ip", network_commands.segments(rate), host=h)
                    self._batch("tc", network_commands.shape(network_commands.INTERFACE, rate), host=h)
                    self._batch("tc", network_commands.shape(network_commands.port(h), rate))
                self._rates[h] = rate

    def rate(self, host: int) -> float | None:
        """bit/s of a host's link; None is no limit."""
        return self._rates[host]

    def cut(self, host: int) -> None:
        """Pull a host's cable: what it sends and what is sent to it is lost until :meth:`heal`."""
        self._batch("ip", [f"link set {network_commands.port(h)} down" for h in self._each(host)])

    def heal(self, host: int) -> None:
        """Plug a host's cable in again."""
        self._batch("ip", [f"link set {network_commands.port(h)} up" for h in self._each(host)])

    def signal(self, signum: int, host: int | None = None) -> None:
        """Send a signal to every process of a host, or of all; SIGKILL to one host is its power cut."""
        named = " ".join(f"$(ip netns pids {network_commands.name(h)})" for h in self._each(host))
        self._run([*self._keeper.enter(), "sh", "-c", f"kill -{int(signum)} {named} 2>/dev/null || :"])

    def counters(self) -> list[Counters]:
        """Counts of each host's interface so far, read at the switch's end of the cable."""
        shown = json.loads(self._run([*self._keeper.enter(), "ip", "-json", "-stats", "link", "show", "type", "veth"]))
        stats = {link["ifname"]: link["stats64"] for link in shown}
        queues = json.loads(self._run([*self._keeper.enter(), "tc", "-json", "-stats", "qdisc", "show"]) or "[]")
        lost = {q["dev"]: int(q.get("drops", 0)) for q in queues if q.get("kind") == "tbf"}
        return [
            _counters(stats[network_commands.port(h)], lost.get(network_commands.port(h), 0)) for h in range(self.hosts)
        ]

    # -- processes ------------------------------------------------------------------------------

    def enter(self, host: int) -> list[str]:
        """The words that, put before a command, run it on a host; it ends with the lab."""
        (h,) = self._each(host)
        # nsenter leaves one in the root folder: env goes back.
        there = [*self._keeper.enter(), "ip", "netns", "exec", network_commands.name(h), "env", "-C", os.getcwd()]
        return [*there, *network_commands.scheduled(h, self.hosts, sorted(os.sched_getaffinity(0)))]

    def prefix(self, rank: int) -> list[str]:
        """:meth:`enter` for the host of a rank."""
        return self.enter(rank // self.ranks_per_host)

    def start(self) -> int:
        """A port on host 0 for the next job's store: no two jobs of a lab share one."""
        self._starts += 1
        return network_commands.PORT + self._starts - 1

    def environment(self, rank: int, port: int) -> Mapping[str, str]:
        """Environment that torchrun would set for a rank, and the backends' interface; rank 0 holds the store."""
        per = self.ranks_per_host
        host, local = divmod(rank, per)
        cpus = len(os.sched_getaffinity(0))
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(local),
            "GROUP_RANK": str(host),
            "ROLE_RANK": str(rank),
            "ROLE_NAME": "default",
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(per),
            "GROUP_WORLD_SIZE": str(self.hosts),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": network_commands.address(0),
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "lab",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "GLOO_SOCKET_IFNAME": network_commands.INTERFACE,
            "NCCL_SOCKET_IFNAME": network_commands.INTERFACE,
            "TP_SOCKET_IFNAME": network_commands.INTERFACE,
            "NCCL_HOSTID": network_commands.name(host),  # all hosts have one name: without it NCCL takes them for one
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cpus // self.world_size))),
        }

    # -- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """End every process of the lab and take it down; more than once does no harm."""
        self._keeper.close()

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- how it is done -------------------------------------------------------------------------

    def _batch(self, program: str, lines: Sequence[str], *, host: int | None = None) -> None:
        enter = self._keeper.enter() if host is None else self.enter(host)
        self._run([*enter, program, "-batch", "-"], network_commands.batch(lines))

    def _run(self, argv: Sequence[str], stdin: str = "") -> str:
        try:
            done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired as e:
            raise LabError(f"`{' '.join(argv[-3:])}` did not come back in {_PATIENCE_S:g} s") from e
        if done.returncode:
            said = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
            raise LabError(f"the lab could not be changed: {said} (asked: {'; '.join(stdin.splitlines()) or argv[-1]})")
        return done.stdout

    def _each(self, host: int | None) -> Sequence[int]:
        if host is None:
            return range(self.hosts)
        if not 0 <= host < self.hosts:
            raise ValueError(f"there is no host {host}: this lab has 0 to {self.hosts - 1}")
        return [host]


def unavailable() -> str | None:
    """Why there can be no lab on this machine, with what would help; None if there can."""
    try:
        with Lab(1, 1e6):
            return None
    except LabError as e:
        return str(e)


def _counters(stats: Mapping[str, Any], dropped: int) -> Counters:
    # The switch receives what the host sends.
    rx, tx = stats["rx"], stats["tx"]
    return Counters(rx["bytes"], rx["packets"], tx["bytes"], tx["packets"], dropped)
