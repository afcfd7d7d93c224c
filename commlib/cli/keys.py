"""``commlib keys``: makes keys, shows the public ones, and says whose word is taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from commlib.messaging import keys

app = typer.Typer(
    help="Keys of this host, and the list of those that may send to it (files that only their owner can read).",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Name = Annotated[str, typer.Argument(help="Of the pair: one a host will do.")]
Folder = Annotated[
    Path | None, typer.Option("--folder", help="Where keys are. [$COMMLIB_KEYS, or ~/.config/commlib/keys]")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object.")]


@app.command()
def new(
    name: Name = "default",
    replace: Annotated[bool, typer.Option("--replace", help="Draw a new pair in place of one of that name.")] = False,
    folder: Folder = None,
    as_json: Json = False,
) -> None:
    """Make a pair of keys; print the public one, to be allowed on other hosts."""
    _print_pair(name, keys.create(name, folder, replace=replace).public, as_json=as_json)


@app.command()
def show(folder: Folder = None, as_json: Json = False) -> None:
    """The public keys of this host's pairs, and those that are allowed. Never a secret one."""
    own = {name: keys.load(name, folder).public for name in keys.pairs(folder)}
    listed = keys.allowed(folder)
    if as_json:
        print(json.dumps({"own": own, "allowed": {name: key for key, name in listed.items()}}))
        return
    for name, public in own.items():
        _print_pair(name, public, as_json=False)
    print(f"allowed: {len(listed)}" if listed else "allowed: none; 'commlib keys allow KEY NAME' adds one")
    for key, name in listed.items():
        print(f"  {name:16} {key}")


@app.command()
def allow(
    key: Annotated[str, typer.Argument(help="A public key, in single quotes.")],
    name: Annotated[str, typer.Argument(help="Whose it is.")],
    folder: Folder = None,
) -> None:
    """Let the owner of a public key send to this host."""
    added = keys.allow(key, name, folder)
    print(f"{name} is allowed" if added else f"this key is on the list already, as {keys.allowed(folder)[key]}")


def _print_pair(name: str, public: str, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"name": name, "public": public}))
        return
    print(f"{name}: {public}")
    print(f"  on each host that it may send to:  commlib keys allow '{public}' {name}")
