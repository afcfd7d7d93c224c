"""Commands that make a lab, as lines for ``ip -batch`` and ``tc -batch``, and the rates its links can have. Pure text.

Inside the keeper's network namespace, the *switch*: bridge ``br0`` with ports ``p0`` … ; port ``pN`` is one
end of the cable to host N, a network namespace ``hN`` whose ``eth0`` is the other end. A token bucket on
``eth0`` slows what the host sends, one on ``pN`` what it receives: full duplex, each way at the rate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from commlib.exchange.rate_limit import read_rate
from commlib.exchange.rate_limit import show_rate as show_rate

LOWEST, HIGHEST = 64e3, 100e9  # bit/s: below, one packet takes a fifth of a second; above, no CPU keeps up

_FRAME = 1514  # bytes of the largest frame: MTU 1500 and the Ethernet header
# So long may a link send at once after a pause: as close to a wire as late timers allow, or a short message
# gets through for nothing (docs/adr/0005-lab.md has the figures).
_BURST_S = 0.0002
_LARGEST_SEGMENT = 65536  # that the kernel hands to an interface, and has by default
_QUEUE_S = 0.2  # a full queue takes so long to drain: a switch with deep buffers, so that loss stays rare
_SHORTEST_QUEUE = 1 << 20


def parse_rate(text: str) -> float:
    """``"200mbit"`` → 2e8 bit/s, as :func:`commlib.exchange.rate_limit.read_rate` has it.

    Raises:
        ValueError: no such rate, or one no link can be given.
    """
    rate = read_rate(text)
    if not LOWEST <= rate <= HIGHEST:
        raise ValueError(f"a link can have 64kbit to 100gbit, got {text!r}")
    return rate


def burst(bits_per_second: float) -> int:
    """Bytes a link of this rate may send at once: two frames or 0.2 ms, whichever is more.

    A deep bucket would give short messages a rate the link does not have.
    """
    return round(max(2 * _FRAME, bits_per_second / 8 * _BURST_S))


def segment(bits_per_second: float | None) -> int:
    """Bytes of the largest segment TCP may hand to the interface (headers included); None: no limit of rate.

    Two thirds of the bucket. What does not fit would have to be cut up in software, for which there is not the CPU;
    the last third makes up for a timer that is late.
    """
    return _LARGEST_SEGMENT if bits_per_second is None else min(_LARGEST_SEGMENT, burst(bits_per_second) * 2 // 3)


def token_bucket(bits_per_second: float) -> str:
    """The arguments of ``tc … tbf`` for a link of this rate."""
    limit = round(max(_SHORTEST_QUEUE, bits_per_second / 8 * _QUEUE_S))
    return f"rate {round(bits_per_second)}bit burst {burst(bits_per_second)}b limit {limit}b"


MOST_HOSTS = 64
INTERFACE = "eth0"  # of every host
NETWORK = "10.0.0.0/24"
PORT = 29500  # torchrun's; free, for a lab's first host has just been made


def address(host: int) -> str:
    """The IPv4 address of a host; it means nothing outside its lab."""
    return f"10.0.0.{host + 1}"


def name(host: int) -> str:
    """The network namespace of a host, inside the lab."""
    return f"h{host}"


def port(host: int) -> str:
    """The switch's end of the cable to a host."""
    return f"p{host}"


def names(hosts: int) -> str:
    """Lines for /etc/hosts; also as the IPv6 sockets of PyTorch's store write an IPv4 address."""
    return "".join(f"{address(h)} {name(h)}\n::ffff:{address(h)} {name(h)}\n" for h in range(hosts))


def build(hosts: int) -> list[str]:
    """``ip`` lines that make the switch and its hosts, links up, without a limit."""
    # The switch itself says nothing on the wire: what the counters see is the hosts' own.
    lines = ["link add br0 type bridge mcast_snooping 0", "link set br0 addrgenmode none", "link set br0 up"]
    for h in range(hosts):
        lines += [
            f"netns add {name(h)}",
            f"link add {port(h)} type veth peer name {INTERFACE} netns {name(h)}",
            f"link set {port(h)} addrgenmode none",
            f"link set {port(h)} master br0 up",
        ]
    return lines


def inside(host: int, congestion: str) -> list[str]:
    """``ip`` lines for within a host: its loopback and its address. No IPv6: one host, one address.

    Args:
        host: its number.
        congestion: control of its TCP connections, whatever the machine's own is.
    """
    return [
        "link set lo up",
        f"link set {INTERFACE} addrgenmode none",
        f"addr add {address(host)}/24 dev {INTERFACE} noprefixroute",
        f"link set {INTERFACE} up",
        f"route add {NETWORK} dev {INTERFACE} scope link src {address(host)} congctl {congestion}",
    ]


def congestion(available: str) -> str:
    """The congestion control for hosts: cubic, Linux's default, or else reno, which every kernel has.

    Not whatever this machine uses: bbr draws back every ten seconds to measure, and steps are then longer by a tenth.

    Args:
        available: what ``/proc/sys/net/ipv4/tcp_available_congestion_control`` says.
    """
    return "cubic" if "cubic" in available.split() else "reno"


def shape(device: str, rate: float | None) -> list[str]:
    """``tc`` lines that give one end of a cable its rate; None removes the limit (there must be one)."""
    if rate is None:
        return [f"qdisc del dev {device} root"]
    return [f"qdisc replace dev {device} root tbf {token_bucket(rate)}"]


def segments(rate: float | None) -> list[str]:
    """``ip`` lines, within a host, for connections to come: TCP hands the interface no more than its bucket holds."""
    return [f"link set {INTERFACE} gso_max_size {segment(rate)}"]


def cores(host: int, hosts: int, cpus: Sequence[int]) -> list[int]:
    """Which of the machine's CPUs are a host's: an equal part, or one that several hosts share."""
    if hosts >= len(cpus):
        return [cpus[host % len(cpus)]]
    return list(cpus[host * len(cpus) // hosts : (host + 1) * len(cpus) // hosts])


def scheduled(host: int, hosts: int, cpus: Sequence[int]) -> list[str]:
    """The words that, put before a command, give it the CPU time of a host and no more trouble than one has.

    Hosts have cores of their own, so that none is slow because two others were put on one. And what runs there is
    a batch process: by default Linux lets a process that wakes up interrupt the one that runs, and among ranks that
    all talk the interrupted one waits for ticks of 4 ms (docs/adr/0005-lab.md has the figures).
    """
    own = ",".join(str(c) for c in cores(host, hosts, cpus))
    return ["taskset", "--cpu-list", own, "chrt", "--batch", "0"]


def batch(lines: Iterable[str]) -> str:
    """Lines as ``-batch -`` reads them."""
    return "".join(f"{line}\n" for line in lines)
