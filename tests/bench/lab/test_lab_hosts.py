"""Hosts see each other and nobody else, at the rate asked for; links can be cut; labs do not meet."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commlib.bench.lab import Lab, LabError, unavailable
from commlib.bench.lab.namespaces import NEEDED
from commlib.bench.lab.network_commands import congestion, cores

MakeLab = Callable[..., Lab]
pytestmark = pytest.mark.alone

RECEIVE = """
import socket, sys, time
server = socket.create_server(("0.0.0.0", 7000))
server.settimeout(20)
print("listening", flush=True)
link, peer = server.accept()
link.settimeout(20)
total, began = 0, None
while data := link.recv(1 << 16):
    began = began or time.perf_counter()
    total += len(data)
print(total, time.perf_counter() - began, peer[0])
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000), timeout=20) as link:
    link.sendall(b"x" * int(sys.argv[2]))
"""


def start(lab: Lab, host: int, code: str, *args: object) -> subprocess.Popen[str]:
    argv = [*lab.enter(host), sys.executable, "-c", code, *map(str, args)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def stream(lab: Lab, sender: int, receiver: int, size: int) -> float:
    """Mbit/s of one TCP stream."""
    server = start(lab, receiver, RECEIVE)
    assert server.stdout is not None
    assert server.stdout.readline() == "listening\n"
    assert finish(start(lab, sender, SEND, f"h{receiver}", size)) == (0, "", "")
    _, out, err = finish(server)
    assert err == ""
    total, seconds, peer = out.split()
    assert int(total) == size
    assert peer == f"10.0.0.{sender + 1}"
    return size * 8e-6 / float(seconds)


def resent(lab: Lab, host: int) -> int:
    """TCP segments that a host has sent again."""
    out = subprocess.run([*lab.enter(host), "cat", "/proc/net/snmp"], capture_output=True, text=True, check=True).stdout
    names, counts = (line.split()[1:] for line in out.splitlines() if line.startswith("Tcp:"))
    return int(dict(zip(names, counts, strict=True))["RetransSegs"])


def test_both_ends_of_a_connection_control_congestion_alike_whatever_the_machine_prefers(lab: MakeLab) -> None:
    hosts, asked = lab(2, 100e6), "print(link.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).decode())"
    server = start(hosts, 1, RECEIVE.replace("total, began", f"{asked}; total, began", 1))
    assert server.stdout is not None
    assert server.stdout.readline() == "listening\n"
    code, sender, err = finish(start(hosts, 0, f"{SEND}    {asked}\n", "h1", 1000))
    assert (code, err) == (0, "")
    receiver = finish(server)[1].splitlines()[0]
    used = congestion(Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text())
    assert {sender.strip("\0\n"), receiver.strip("\0\n")} == {used}


@pytest.mark.alone
@pytest.mark.parametrize("rate", [20e6, 100e6])
def test_a_stream_gets_the_rate_less_its_headers(lab: MakeLab, rate: float, presence: Callable[[], Any]) -> None:
    hosts = lab(2, rate)
    headers = 1448 / 1514  # TCP payload of a full frame
    best = 0.0
    for _ in range(32):  # whatever else runs can but slow it down: a quarter of a second may well be free of it
        with presence() as machine:
            measured = stream(hosts, 0, 1, round(rate / 32)) * 1e6
        assert measured < 1.06 * headers * rate
        best = max(best, measured / machine.share)
        if best > 0.8 * headers * rate:
            break
    assert best > 0.8 * headers * rate


def test_the_rate_changes_while_the_lab_stands_and_for_one_host_alone(lab: MakeLab) -> None:
    hosts = lab(3, 20e6)
    assert stream(hosts, 0, 1, 500_000) < 21
    hosts.set_rate(400e6)
    assert stream(hosts, 0, 1, 5_000_000) > 40
    hosts.set_rate(10e6, 2)
    assert hosts.rate(2) == 10e6
    assert stream(hosts, 0, 2, 500_000) < 10.6  # slowed on the way in
    assert stream(hosts, 2, 0, 500_000) < 10.6  # and on the way out
    assert stream(hosts, 0, 1, 5_000_000) > 40
    hosts.set_rate(None)
    assert hosts.rate(2) is None
    assert stream(hosts, 2, 0, 5_000_000) > 40


def test_the_counters_are_what_was_sent_and_the_headers(lab: MakeLab) -> None:
    hosts = lab(3, 200e6)
    before = hosts.counters()
    stream(hosts, 0, 1, 2_000_000)
    sent, received, idle = (b - a for a, b in zip(before, hosts.counters(), strict=True))
    # A busy sender's TCP may send a segment again. SYN and ARP have other headers.
    again = 1448 * resent(hosts, 0)
    assert -200 < sent.sent_bytes - 66 * sent.sent_packets - 2_000_000 < 200 + again
    assert again < 100_000
    assert received.received_bytes == sent.sent_bytes
    assert sent.received_bytes < 0.1 * sent.sent_bytes  # acknowledgements
    assert idle.sent_bytes == 0
    assert sent.dropped == 0


def test_a_cut_link_carries_nothing_until_it_is_healed(lab: MakeLab) -> None:
    hosts = lab(2, 100e6)
    stream(hosts, 0, 1, 100_000)
    hosts.cut(1)
    code, _, err = finish(start(hosts, 0, SEND.replace("timeout=20", "timeout=1"), "h1", 10))
    assert code == 1
    assert "timed out" in err or "No route" in err
    hosts.heal(1)
    assert stream(hosts, 0, 1, 100_000) > 1


def test_a_host_can_lose_its_power(lab: MakeLab) -> None:
    hosts = lab(2)
    sleepers = [start(hosts, h, "import time; time.sleep(60)") for h in (0, 1)]
    servers = [start(hosts, h, "print('up', flush=True); import time; time.sleep(60)") for h in (0, 1)]
    for process in servers:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
    hosts.signal(signal.SIGKILL, 1)
    assert finish(sleepers[1])[0] == finish(servers[1])[0] == -signal.SIGKILL
    assert sleepers[0].poll() is servers[0].poll() is None
    hosts.close()
    assert finish(sleepers[0])[0] == finish(servers[0])[0] == -signal.SIGKILL


def test_two_labs_side_by_side_have_the_same_addresses_and_never_meet(lab: MakeLab) -> None:
    first, second = lab(2, 50e6), lab(2, 50e6)
    server = start(first, 1, RECEIVE)
    assert server.stdout is not None
    assert server.stdout.readline() == "listening\n"
    code, _, err = finish(start(second, 0, SEND, "h1", 10))
    assert code == 1
    assert "refused" in err  # the second lab's h1, where nobody listens
    assert finish(start(first, 0, SEND, "h1", 10))[0] == 0
    assert finish(server)[1].startswith("10 ")
    first.close()
    assert stream(second, 0, 1, 1000) > 0


def test_the_machines_own_network_neither_changes_nor_is_reached(lab: MakeLab) -> None:
    def look() -> list[str]:
        return sorted(os.listdir("/sys/class/net"))

    before = look()
    hosts = lab(2)
    assert look() == before
    code, out, _ = finish(start(hosts, 0, "import os; print(sorted(os.listdir('/sys/class/net')))"))
    assert (code, out) == (0, "['eth0', 'lo']\n")


def test_ranks_are_spread_as_torchrun_spreads_them(lab: MakeLab) -> None:
    hosts = lab(2, ranks_per_host=2)
    port = hosts.start()
    assert hosts.start() != port
    env = [hosts.environment(r, port) for r in range(hosts.world_size)]
    assert [e["RANK"] for e in env] == ["0", "1", "2", "3"]
    assert [e["LOCAL_RANK"] for e in env] == ["0", "1", "0", "1"]
    assert [e["GROUP_RANK"] for e in env] == ["0", "0", "1", "1"]
    assert {(e["WORLD_SIZE"], e["LOCAL_WORLD_SIZE"], e["GROUP_WORLD_SIZE"]) for e in env} == {("4", "2", "2")}
    assert {(e["MASTER_ADDR"], e["MASTER_PORT"], e["GLOO_SOCKET_IFNAME"]) for e in env} == {
        ("10.0.0.1", str(port), "eth0")
    }
    assert hosts.prefix(3) == hosts.enter(1)


@pytest.mark.parametrize(("hosts", "options"), [(0, {}), (65, {}), (2, {"ranks_per_host": 0}), (2, {"rate": 1.0})])
def test_numbers_that_cannot_be_are_refused(no_lab: str | None, hosts: int, options: dict[str, float]) -> None:
    if no_lab is not None:
        pytest.skip(no_lab)
    with pytest.raises(ValueError, match=r"lab has|ranks_per_host|link can"):
        Lab(hosts, **options)  # type: ignore[arg-type]


def test_hosts_have_their_own_cores_and_nobody_there_interrupts_another(lab: MakeLab) -> None:
    hosts = lab(2)
    code = "import os; print(os.sched_getscheduler(0) == os.SCHED_BATCH, sorted(os.sched_getaffinity(0)))"
    ours = sorted(os.sched_getaffinity(0))
    for h in range(2):
        status, out, err = finish(start(hosts, h, code))
        assert (status, err) == (0, "")
        assert out.strip() == f"True {cores(h, 2, ours)}"


def test_a_host_that_is_not_there_is_refused(lab: MakeLab) -> None:
    hosts = lab(2)
    with pytest.raises(ValueError, match="no host 2: this lab has 0 to 1"):
        hosts.cut(2)


def test_a_closed_lab_says_so(lab: MakeLab) -> None:
    hosts = lab(1)
    hosts.close()
    hosts.close()
    with pytest.raises(LabError, match="the lab has ended"):
        hosts.counters()


def test_without_iproute2_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = unavailable()
    assert reason is not None
    assert "install coreutils, iproute2, mount, util-linux" in reason


def test_without_the_right_to_make_namespaces_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in NEEDED:
        fake = tmp_path / name
        fake.write_text("#!/bin/sh\necho 'unshare: unshare failed: Operation not permitted' >&2\nexit 1\n")
        fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    reason = unavailable()
    assert reason is not None
    assert "Operation not permitted" in reason
    assert "run it as root" in reason
