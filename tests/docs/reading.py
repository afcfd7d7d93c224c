"""A command of the documentation, read by the parser of its own program; nothing is run."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import re
import shlex
import subprocess
from collections.abc import Sequence
from typing import Any

import typer
from torch.distributed.run import get_args_parser

from commlib.cli.main import build
from tests.support.docs_reader import ROOT, Command, without_make


class Unreadable(Exception):
    """What is wrong with a command, in the words of whoever would run it."""


FILLED_IN = {"COMMAND": "doctor", "ROUNDS": "1", "STEPS": "1", "$GROUP_RANK": "0"}
"""What stands for what a reader chooses, where the parser wants to know."""


def read(command: Command) -> None:
    """Holds a command to the parser of its program; raises Unreadable."""
    for words in commands_in(command.line):
        check(words, named=command.inline)


def commands_in(line: str) -> list[list[str]]:
    """Those joined by ``&&``, each as its words; ``a b | c`` is ``a b`` and ``a c``."""
    try:
        words = [FILLED_IN.get(w, w) for w in shlex.split(line)]
    except ValueError as e:
        raise Unreadable(str(e)) from e
    found: list[list[str]] = [[]]
    for word in words:
        if word == "&&":
            found.append([])
        else:
            found[-1].append(word)
    return [each for part in found for each in alternatives(part)]


def alternatives(words: list[str]) -> list[list[str]]:
    """What a reader fills in goes: … and OPTIONS; so do > FILE and NAME=VALUE."""
    words = words[: words.index(">")] if ">" in words else words
    words = [w for w in words if w not in ("…", "OPTIONS")]
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if "|" not in words:
        return [words]
    first = words[: words.index("|")]
    return [first, *([*first[:-1], w] for w in words[len(first) :] if w != "|")]


def check(words: Sequence[str], *, named: bool) -> None:
    """A command by its program. ``named``: arguments may be missing."""
    program, *rest = words
    if program == "commlib":
        check_commlib(rest, named=named)
    elif program == "torchrun":
        check_torchrun(rest, named=named)
    elif program in ("python", "python3"):
        check_python(rest, named=named)
    elif program == "make":
        need(not (said := make(*rest)), said)
    elif program == "pip":
        extras = re.search(
            r"^\[project\.optional-dependencies\]\n(.*?)\n\[", (ROOT / "pyproject.toml").read_text(), re.M | re.S
        )
        assert extras is not None
        known = set(re.findall(r"^(\w+) = ", extras[1], flags=re.MULTILINE))
        asked = {e for name in re.findall(r"\[([\w,]+)\]", " ".join(rest)) for e in name.split(",")}
        need(rest[:1] == ["install"] and asked <= known, f"pip install, of extras {sorted(known)}")
    elif program == "sh":
        need(rest[:1] == ["-c"], "sh -c 'COMMAND'")
        for each in commands_in(rest[1]):
            check(each, named=named)
    elif program in (".", "ip"):
        pass  # of the shell, of the system
    else:
        need((ROOT / program).is_file(), f"there is no {program}")


@functools.cache
def make(*words: str) -> str:
    """What it says against making that."""
    done = subprocess.run(["make", "-n", *words], cwd=ROOT, env=without_make(), capture_output=True, text=True)
    return done.stderr if done.returncode else ""


@functools.cache
def parser(command: str) -> Any:
    """That of ``commlib COMMAND``."""
    return typer.main.get_command(build(command))


def check_commlib(args: Sequence[str], *, named: bool) -> None:
    """By the parser of ``commlib`` itself, down to the types of the options; and what runs in a lab by its own."""
    if not args:
        return
    silent = contextlib.redirect_stdout(io.StringIO())  # --help
    try:
        command = parser(args[0])
        context = command.make_context("commlib", list(args))
        while hasattr(command, "commands"):
            left = [*context._protected_args, *context.args]
            if named and not left:
                return
            name, command, left = command.resolve_command(context, left)
            with silent:
                context = command.make_context(name, left, parent=context)
    except Exception as e:
        if getattr(e, "exit_code", None) == 0:  # --help
            return
        if named and type(e).__name__ in ("MissingParameter", "NoArgsIsHelpError"):
            return
        raise Unreadable(getattr(e, "message", "") or str(e)) from e
    if context.params.get("command"):
        check(context.params["command"], named=named)


def check_torchrun(args: Sequence[str], *, named: bool) -> None:
    """By its own parser, which looks at the program's options, too; then the program by its own."""
    if not [a for a in args if a.endswith(".py")] and "-m" not in args:
        known = {o for action in get_args_parser()._actions for o in action.option_strings}
        need(named and {a for a in args if a.startswith("-")} <= known, "torchrun WHAT?")
        return
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            asked = get_args_parser().parse_args(list(args))
    except SystemExit as e:
        raise Unreadable(said.getvalue().strip().splitlines()[-1]) from e
    check_python([*(["-m"] if asked.module else []), asked.training_script, *asked.training_script_args], named=named)


def check_python(args: Sequence[str], *, named: bool) -> None:
    if args[:1] == ["-P"]:
        args = args[1:]
    whole = len(args) > 1 if args[:1] in (["-m"], ["-c"]) else args[:1] and args[0].endswith(".py")
    need(bool(whole) or named, "python WHAT?")
    if args[:1] == ["-m"] and len(args) > 1:
        try:
            there = importlib.util.find_spec(args[1]) is not None
        except ModuleNotFoundError:
            there = False
        need(there, f"there is no module {args[1:2]}")
        if args[1] == "commlib":
            check_commlib(args[2:], named=named)
    elif args and args[0].startswith("examples/"):
        need((ROOT / args[0]).is_file(), f"there is no {args[0]}")


def need(held: bool, otherwise: str) -> None:
    if not held:
        raise Unreadable(otherwise)
