"""The ``commlib`` command, and whatever is installed under the entry-point group ``commlib.commands``.

A command is a plain function or a ``typer.Typer``. Only the one that is called gets imported, so a
package that one command needs and another does not is missed by the first alone.

Exit codes: 0 done; 1 the command found something broken; 2 a mistake in the call, or an error that
commlib explains in one line (``COMMLIB_DEBUG=1`` adds the traceback); 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, version
from typing import Annotated, NoReturn

import typer
from typer.core import TyperGroup

from commlib.errors import CommlibError, MissingDependency, unknown
from commlib.runtime.plugins import installed

GROUP = "commlib.commands"
DISTRIBUTION = "torch-commlib"
_FIRST = ("train", "bench", "doctor")  # the order in the help; others follow by name
_PIP_NAMES = {"PIL": "pillow", "sklearn": "scikit-learn", "zmq": "pyzmq"}


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its status.

    Args:
        argv: the arguments after the program's name; ``sys.argv`` by default.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        build(_called(args), listing=not args or "--help" in args)(args or ["--help"], prog_name="commlib")
    except KeyboardInterrupt:
        sys.exit(130)
    except (CommlibError, ValueError, ImportError) as e:
        if os.environ.get("COMMLIB_DEBUG", "0") not in ("", "0"):
            raise
        explained = missing("this command", e) if isinstance(e, ImportError) else e
        print(f"error: {explained}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0)


def commands() -> Mapping[str, EntryPoint]:
    """Name → entry point of every installed command, in the order of the help.

    Raises:
        ValueError: if two distributions offer different commands under one name.
    """
    found = installed(GROUP, "commands")
    first = [n for n in _FIRST if n in found]
    return {n: found[n] for n in [*first, *sorted(found.keys() - set(first))]}


def build(called: str | None, *, listing: bool = False) -> typer.Typer:
    """The application with the called command in it.

    Args:
        called: the command's name; None if there is only an option.
        listing: without a called command, import all of them to list them with their help.

    Raises:
        ValueError: ``called`` is no installed command; the message lists what is known.
        MissingDependency: it needs a package that is not installed.
    """
    app = typer.Typer(
        name="commlib",
        cls=_Ordered,
        help="Gradient compression for torch.distributed: train, measure, find out what is wrong.",
        epilog="`commlib COMMAND --help` explains one command.",
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    known = commands()
    if called is not None and called not in known:
        raise ValueError(unknown("command", called, known))
    for name, ep in known.items():
        if called == name:
            _add(app, name, _load(name, ep))
        elif called is None and listing:
            try:
                _add(app, name, _load(name, ep))
            except Exception as e:  # whatever is wrong with one plug-in, the help must come
                app.command(name, help=f"(not available: {e})")(_nothing)
    return app


def missing(who: str, error: ImportError) -> MissingDependency:
    """The error for a package that ``who`` wanted to import, with the line that installs it."""
    package = (error.name or "").partition(".")[0]
    if package in ("", "commlib"):
        return MissingDependency(f"{who} is not complete in this installation ({error}): reinstall {DISTRIBUTION}")
    return MissingDependency(f"{who} needs {package!r}: pip install {_PIP_NAMES.get(package, package)}")


class _Ordered(TyperGroup):
    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]  # its Context is private
        return [n for n in commands() if n in self.commands]


def _called(args: Sequence[str]) -> str | None:
    """The first word that is not an option: the options before a command take no value."""
    return next((a for a in args if not a.startswith("-")), None)


def _load(name: str, ep: EntryPoint) -> Callable[..., object]:
    try:
        command = ep.load()
    except ImportError as e:
        raise missing(f"`commlib {name}`", e) from e
    if not callable(command):
        raise ValueError(f"entry point {ep.value} of command {name!r} is neither a function nor a typer.Typer")
    return command  # type: ignore[no-any-return]  # a Typer is callable too


def _add(app: typer.Typer, name: str, command: Callable[..., object]) -> None:
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name)
    else:
        app.command(name)(command)


def _nothing() -> None:
    pass


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"commlib {version(DISTRIBUTION)}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass
