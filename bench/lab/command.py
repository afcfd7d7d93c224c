"""``commlib bench lab``: run any command on emulated hosts."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from collections.abc import Sequence
from typing import Annotated, TextIO

import typer

from commlib.bench.launch.processes import Terminated, sigterm_raises
from commlib.bench.results.table import Row, print_rows

from . import network_commands
from .events import Event, parse_schedule
from .lab import Counters, Lab
from .network_commands import parse_rate
from .run import run_command


def lab(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="What every rank runs.")],
    hosts: Annotated[int, typer.Option(help="Emulated hosts, h0 (10.0.0.1), h1 (10.0.0.2) …")] = 2,
    rate: Annotated[str | None, typer.Option(help="Of each host's link, each way: 200mbit, 1gbit … [no limit]")] = None,
    ranks_per_host: Annotated[int, typer.Option(help="Times the command runs on each host.")] = 1,
    at: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SECONDS:EVENT",
            help="Later: 10:50mbit, 10:2=50mbit (host 2 alone), 20:cut=2, 30:heal=2, 40:kill=2; repeat it.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The byte counters as one JSON object a host.")] = False,
) -> None:
    """Run a command on emulated hosts: slow links on one machine.

    As in: commlib bench lab --hosts 4 --rate 200mbit -- python train.py --epochs 3

    Every host is a network namespace on a switch; RANK, WORLD_SIZE, MASTER_ADDR and the rest are set as
    torchrun sets them, and GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME to the host's eth0. The hosts see nothing
    but each other. At the end each host's traffic is shown; then nothing is left, however the end came.

    Linux only, as root or where users may make namespaces; needs iproute2.
    """
    if shutil.which(command[0]) is None:
        raise ValueError(f"command not found: {command[0]!r}; the hosts see the same files and PATH as you do here")
    limit = None if rate is None else parse_rate(rate)
    events = parse_schedule(at or [], hosts)
    with sigterm_raises(), Lab(hosts, limit, ranks_per_host=ranks_per_host) as made:
        _say(
            f"{hosts} hosts from {network_commands.address(0)} on, links {rate or 'unlimited'}, "
            f"ranks on each: {ranks_per_host}"
        )
        began = time.monotonic()
        try:
            statuses = run_command(made, command, events, on_event=_announce)
        except KeyboardInterrupt:
            _say("interrupted: every process on the hosts was ended")
            raise typer.Exit(130) from None
        except Terminated:
            _say("told to stop (SIGTERM): every process on the hosts was ended")
            raise typer.Exit(143) from None
        seconds = time.monotonic() - began
        rows = [_row(h, c, seconds) for h, c in enumerate(made.counters())]
    print_rows(rows, title=f"bytes at each host's interface in {seconds:.1f} s", as_json=as_json, file=_stream(as_json))
    _exit(statuses, ranks_per_host)


def _row(host: int, counters: Counters, seconds: float) -> Row:
    return {
        "host": network_commands.name(host),
        "sent_bytes": counters.sent_bytes,
        "received_bytes": counters.received_bytes,
        "sent_mbit_s": counters.sent_bytes * 8e-6 / seconds,
        "received_mbit_s": counters.received_bytes * 8e-6 / seconds,
        "packets_sent": counters.sent_packets,
        "packets_dropped": counters.dropped,
    }


def _exit(statuses: Sequence[int | None], ranks_per_host: int) -> None:
    """Name the ranks that failed and leave with the first one's status, as a shell gives it."""
    failed = {rank: status for rank, status in enumerate(statuses) if status}
    for rank, status in failed.items():
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
        _say(f"rank {rank} on h{rank // ranks_per_host} {how}")
    ended = [str(rank) for rank, status in enumerate(statuses) if status is None]
    if ended:
        _say(f"rank {', '.join(ended)} was ended because of that")
    if failed:
        status = next(iter(failed.values()))
        raise typer.Exit(128 - status if status < 0 else status)


def _announce(event: Event) -> None:
    _say(f"{event.at:g} s: {event}")


def _say(text: str) -> None:
    print(f"lab: {text}", file=sys.stderr, flush=True)


def _stream(as_json: bool) -> TextIO:
    return sys.stdout if as_json else sys.stderr
