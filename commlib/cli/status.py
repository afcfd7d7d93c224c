"""How a job with a parameter server is doing, for people and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from commlib.server.membership.registry import LEAVING, SHARD, WORKER, Roll


def look(roll: Roll) -> dict[str, Any]:
    """What the members of a job told of themselves last: plain values.

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
