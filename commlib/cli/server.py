"""``commlib server``: a meeting place, shards that come to it, and a look at both."""

from __future__ import annotations

import json
import signal
import sys
import threading
from types import FrameType
from typing import Annotated, Any

import typer

from commlib.cli.status import look, show
from commlib.errors import CommlibError
from commlib.server.membership import rendezvous
from commlib.server.membership.registry import Roll
from commlib.server.shard.serve import serve
from commlib.server.storage.snapshot_policy import Snapshots

app = typer.Typer(
    help="Shards of a parameter server, and the place where they and the workers meet.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
At = Annotated[str, typer.Option("--at", metavar="HOST:PORT", help="Where members meet.")]
JobName = Annotated[str, typer.Option("--job", help="Which of the jobs there.")]


@app.command()
def meet(
    at: At = f"127.0.0.1:{rendezvous.PORT}",
) -> None:
    """Keep a meeting place at this address, until Ctrl-C. It trains nothing, and must outlive who meets there."""
    host, port = rendezvous.parse(at)
    stop = _stopping()
    store = rendezvous.keep(host, port)
    print(f"members meet at {at}", flush=True)
    stop.wait()
    del store


@app.command()
def run(
    at: At = f"127.0.0.1:{rendezvous.PORT}",
    job: JobName = "default",
    endpoint: Annotated[str, typer.Option(help="How members are reached.")] = "zmq",
    timeout: Annotated[float, typer.Option(help="Seconds that anything waits.")] = 60.0,
    snapshots: Annotated[str | None, typer.Option(metavar="FOLDER", help="Save the state there, now and then.")] = None,
    every: Annotated[int, typer.Option(help="Steps between snapshots.")] = 1000,
    restore: Annotated[bool, typer.Option("--restore", help="Go on from the snapshots in the folder.")] = False,
    embedded: Annotated[int | None, typer.Option("--embedded", hidden=True)] = None,
) -> None:
    """Be a shard, until the job is over. Ctrl-C hands over what it has, where another shard is there to take it."""
    if restore and snapshots is None:
        raise ValueError("--restore needs --snapshots FOLDER")
    saved = Snapshots(snapshots, every, restore) if snapshots else None
    stop = _stopping()

    def ready(name: str) -> None:
        if embedded is None:
            print(f"{name} waits for a job at {at}", flush=True)

    try:
        given: dict[str, Any] = {"snapshots": saved, "number": embedded, "stop": stop, "ready": ready}
        wait = None if embedded is None else timeout
        why = serve(at, job=job, endpoint=endpoint, wait=wait, timeout=timeout, **given)
    except CommlibError:
        if embedded is not None:  # the workers say what is wrong; that they have gone is no news
            raise typer.Exit(1) from None
        raise
    if embedded is None:
        print(f"it is over: {why}", file=sys.stderr)


@app.command()
def status(
    at: At = f"127.0.0.1:{rendezvous.PORT}",
    job: JobName = "default",
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the meeting place.")] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Who takes part in a job, how far each is, and what was sent."""
    found = look(Roll(rendezvous.visit(at, job, timeout), timeout))
    print(json.dumps(found)) if as_json else show(found, at, job)


def _stopping() -> threading.Event:
    """Set by Ctrl-C or SIGTERM; the second Ctrl-C ends the process at once."""
    stop = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    return stop
