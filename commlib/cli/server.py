"""``commlib server``: a meeting place, shards that come to it, and a look at both.

How a job with a parameter server is doing, for people and as JSON.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Mapping
from types import FrameType
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from commlib.errors import CommlibError
from commlib.server.membership import rendezvous
from commlib.server.membership.registry import LEAVING, SHARD, WORKER, MembershipStore
from commlib.server.shard.serve import serve
from commlib.server.storage.snapshot_policy import Snapshots


def look(roll: MembershipStore) -> dict[str, Any]:
    """Members of a job as they described themselves last: plain values.

    ``state`` is ``nothing`` (nobody has come), ``waiting``, ``training`` or ``over``. Of each member, its name,
    kind, where it is, its view, bytes sent and received; of a worker its clock, how many steps it is behind the first
    (``lag``) and its pushes that wait to be acknowledged; of a shard the keys that it owns and has copies of, and the
    clocks of workers.
    """
    name, over = roll.newest(), roll.over()
    if not name:
        came = roll.members({}).values()
        state = "over" if over else "waiting" if came else "nothing"
        return {"state": state, "why": over, "view": None, "members": [{"name": m.name, "kind": m.kind} for m in came]}
    epoch = roll.epoch(name)
    told, words = roll.told(epoch.members), roll.beats(epoch.members)
    first = max((t.get("clock", 0) for t in told.values()), default=0)
    members = []
    for i, member in epoch.members.items():
        own: dict[str, Any] = {"name": member.name, "kind": member.kind, "where": member.where, **told.get(i, {})}
        if member.kind == WORKER:
            own["lag"] = first - own.get("clock", 0)
        own["leaving"] = words[i].startswith(LEAVING)
        members.append(own)
    return {
        "state": "over" if over else "training",
        "why": over,
        "view": epoch.view.number,
        "news": epoch.news,
        "keys": len(epoch.view.places),
        "members": members,
    }


def show(found: Mapping[str, Any], at: str, job: str) -> None:
    """The same as tables on stdout."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 140)
    said = {"nothing": "nobody has come", "waiting": f"{len(found['members'])} came, and wait for the others"}
    what = said.get(found["state"], f"{found['state']}{': ' + found['why'] if found['why'] else ''}")
    console.print(f"job {job!r} at {at}: {what}", highlight=False, soft_wrap=True)
    if found["view"] is None:
        return
    news = f"; the last news: {found['news']}" if found["news"] else ""
    console.print(f"view {found['view']}, {found['keys']} keys{news}", highlight=False, soft_wrap=True)
    workers = [m for m in found["members"] if m["kind"] == WORKER]
    shards = [m for m in found["members"] if m["kind"] == SHARD]
    columns = {"clock": "clock", "lag": "behind", "waiting": "to be\nacknowledged"}
    console.print(_table("worker", workers, columns))
    for shard in shards:
        shard["least"] = min(shard.get("clocks", {0: 0}).values(), default=0)
    console.print(_table("shard", shards, {"owns": "keys", "copies": "copies", "least": "steps of\nall workers"}))


def _table(kind: str, members: list[dict[str, Any]], columns: Mapping[str, str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(kind, no_wrap=True)
    table.add_column("where", no_wrap=True)
    for head in (*columns.values(), "MB sent", "MB received"):
        table.add_column(head, justify="right", no_wrap=True)
    for m in members:
        traffic = [f"{m[k] / 1e6:,.1f}" if k in m else "–" for k in ("sent", "received")]
        name = m["name"] + (" (leaving)" if m["leaving"] else "")
        table.add_row(name, m["where"], *(str(m.get(k, "–")) for k in columns), *traffic)
    return table


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
    """Members of a job, how far each is, and what was sent."""
    found = look(MembershipStore(rendezvous.visit(at, job, timeout), timeout))
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
