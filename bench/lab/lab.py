"""The lab: hosts that exist while one keeper process does."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from commlib.errors import CommlibError

from . import wiring
from .rate import HIGHEST, LOWEST

_NEEDED = {
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
    "env": "coreutils",
    "ip": "iproute2",
    "tc": "iproute2",
}
_NAMESPACES = ("--net", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc")
_PATIENCE_S = 30.0  # for one command; they take milliseconds

# The first process of the lab, and so its PID 1: when it ends, the kernel kills every other process of the
# lab, and with the last of them go the namespaces. It ends when nobody holds the other end of its stdin.
# `ip netns` keeps its names in /run/netns: here a file system of the lab's own. $1 are the hosts' names.
_KEEPER = """
set -e
[ -d /run/netns ] && over=/run/netns || over=/run
mount -t tmpfs lab $over
mkdir -p /run/netns
if [ -e /etc/hosts ]; then
    { cat /etc/hosts; echo "$1"; } > /run/netns/hosts
    mount --bind /run/netns/hosts /etc/hosts
    rm /run/netns/hosts
fi
echo ready
exec cat >/dev/null
"""


class LabError(CommlibError):
    """There can be no lab here, or a command that changes one failed; the message has the reason."""


@dataclasses.dataclass(frozen=True)
class Counters:
    """What a host's interface has counted since the lab was made. Bytes are whole frames, headers included.

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
        if not 1 <= hosts <= wiring.MOST_HOSTS:
            raise ValueError(f"a lab has 1 to {wiring.MOST_HOSTS} hosts, got {hosts}")
        if ranks_per_host < 1:
            raise ValueError(f"ranks_per_host must be at least 1, got {ranks_per_host}")
        self.hosts, self.ranks_per_host = hosts, ranks_per_host
        self.world_size = hosts * ranks_per_host
        self._rates: list[float | None] = [None] * hosts
        self._starts = 0
        self._lock = threading.Lock()  # a schedule may change the rate while another thread reads counters
        self._keeper = _start_keeper(wiring.names(hosts))
        try:
            self._batch("ip", wiring.build(hosts))
            for h in range(hosts):
                self._batch("ip", wiring.inside(h), host=h)
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
                    self._batch("tc", wiring.shape(wiring.INTERFACE, rate), host=h)
                    self._batch("tc", wiring.shape(wiring.port(h), rate))
                self._rates[h] = rate

    def rate(self, host: int) -> float | None:
        """bit/s of a host's link; None is no limit."""
        return self._rates[host]

    def cut(self, host: int) -> None:
        """Pull a host's cable: what it sends and what is sent to it is lost until :meth:`heal`."""
        self._batch("ip", [f"link set {wiring.port(h)} down" for h in self._each(host)])

    def heal(self, host: int) -> None:
        """Plug a host's cable in again."""
        self._batch("ip", [f"link set {wiring.port(h)} up" for h in self._each(host)])

    def signal(self, signum: int, host: int | None = None) -> None:
        """Send a signal to every process of a host, or of all; SIGKILL to one host is its power cut."""
        named = " ".join(f"$(ip netns pids {wiring.name(h)})" for h in self._each(host))
        self._run([*self._enter, "sh", "-c", f"kill -{int(signum)} {named} 2>/dev/null || :"])

    def counters(self) -> list[Counters]:
        """What each host's interface counted so far, read at the switch's end of the cable."""
        shown = json.loads(self._run([*self._enter, "ip", "-json", "-stats", "link", "show", "type", "veth"]))
        stats = {link["ifname"]: link["stats64"] for link in shown}
        queues = json.loads(self._run([*self._enter, "tc", "-json", "-stats", "qdisc", "show"]) or "[]")
        lost = {q["dev"]: int(q.get("drops", 0)) for q in queues if q.get("kind") == "tbf"}
        return [_counters(stats[wiring.port(h)], lost.get(wiring.port(h), 0)) for h in range(self.hosts)]

    # -- processes ------------------------------------------------------------------------------

    def enter(self, host: int) -> list[str]:
        """The words that, put before a command, run it on a host; it ends with the lab."""
        (h,) = self._each(host)
        # nsenter leaves one in the root folder: env goes back.
        return [*self._enter, "ip", "netns", "exec", wiring.name(h), "env", "-C", os.getcwd()]

    def prefix(self, rank: int) -> list[str]:
        """:meth:`enter` for the host of a rank."""
        return self.enter(rank // self.ranks_per_host)

    def start(self) -> int:
        """A port on host 0 for the next job's store: no two jobs of a lab share one."""
        self._starts += 1
        return wiring.PORT + self._starts - 1

    def environment(self, rank: int, port: int) -> Mapping[str, str]:
        """What torchrun would set for a rank, and the backends' interface; rank 0 holds the store."""
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
            "MASTER_ADDR": wiring.address(0),
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "lab",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "GLOO_SOCKET_IFNAME": wiring.INTERFACE,
            "NCCL_SOCKET_IFNAME": wiring.INTERFACE,
            "TP_SOCKET_IFNAME": wiring.INTERFACE,
            "NCCL_HOSTID": wiring.name(host),  # all hosts have one name: without it NCCL takes them for one
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cpus // self.world_size))),
        }

    # -- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """End every process of the lab and take it down; more than once does no harm."""
        keeper = self._keeper
        if keeper.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                keeper.stdin.close()
        try:
            # unshare returns only when PID 1 has, and that only when every process of the lab has.
            keeper.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            keeper.kill()  # --kill-child takes PID 1 along
            keeper.wait()
        for stream in (keeper.stdout, keeper.stderr):
            if stream is not None:
                stream.close()

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- how it is done -------------------------------------------------------------------------

    @property
    def _enter(self) -> list[str]:
        """The words that run a command in the switch; a PID namespace holds for a process's children."""
        if self._keeper.poll() is not None:
            raise LabError("the lab has ended: its keeper is gone (closed, or killed)")
        proc = f"/proc/{self._keeper.pid}/ns"
        user = [] if os.geteuid() == 0 else [f"--user={proc}/user", "--preserve-credentials"]
        return ["nsenter", *user, f"--net={proc}/net", f"--mount={proc}/mnt", f"--pid={proc}/pid_for_children", "--"]

    def _batch(self, program: str, lines: Sequence[str], *, host: int | None = None) -> None:
        enter = self._enter if host is None else self.enter(host)
        self._run([*enter, program, "-batch", "-"], wiring.batch(lines))

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


def _start_keeper(names: str) -> subprocess.Popen[str]:
    if not sys.platform.startswith("linux"):
        raise LabError(f"the lab needs Linux's network namespaces, and this is {sys.platform}")
    absent = [name for name in _NEEDED if shutil.which(name) is None]
    if absent:
        packages = ", ".join(sorted({_NEEDED[n] for n in absent}))
        raise LabError(f"the lab needs {' and '.join(absent)}, which are not here: install {packages}")
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    keeper = subprocess.Popen(
        ["unshare", *user, *_NAMESPACES, "sh", "-c", _KEEPER, "keeper", names],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C in the terminal goes to the owner alone
    )
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    assert keeper.stderr is not None
    if keeper.stdout.readline() != "ready\n":
        keeper.stdin.close()
        said = " ".join(keeper.stderr.read().split())
        keeper.wait()
        keeper.stdout.close()
        keeper.stderr.close()
        who = "" if os.geteuid() == 0 else "; run it as root, or allow unprivileged user namespaces"
        raise LabError(f"the lab needs namespaces of its own and may not make them: {said or 'no reason given'}{who}")
    return keeper


def _counters(stats: Mapping[str, Any], dropped: int) -> Counters:
    # The switch receives what the host sends.
    rx, tx = stats["rx"], stats["tx"]
    return Counters(rx["bytes"], rx["packets"], tx["bytes"], tx["packets"], dropped)
