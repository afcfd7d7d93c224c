"""Every command of the documentation is run as printed, run with less to do, or read by its own parser."""

from __future__ import annotations

import collections
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from torch.distributed.run import get_args_parser

from commlib.bench.lab import unavailable
from commlib.cli import build
from manual import PAGES, ROOT, Command, all_commands

pytestmark = pytest.mark.checkout

Call = Callable[..., tuple[int, str, str]]

COMMANDS = [c for page in PAGES for c in all_commands(page)]

AS_PRINTED = re.compile(r"commlib (doctor|plan (?!MODEL)\S.*|keys (new( --replace)?|show))")
"""These take seconds at most, and need nothing that a test has not."""

CUT = {
    "commlib train --seeds 5 --comm none --comm onebit --comm int8 --comm powersgd:rank=4 --comm topk:ratio=0.01": (
        "--seeds 1 --steps 2"
    ),
    "commlib train --task sparse-logistic": "--passes 1 --ranks 1 --servers-count 1",
    "commlib bench link": "--op all_reduce --max 4kB --seconds 1 --save figures",
    "commlib bench codec": "--numel 4096 --repeat 1",
    "commlib bench train": "--quick --only none --steps 1",
}
"""Command → options that are added to it, so that it does what it says with less of everything."""

IN_A_LAB = {
    "commlib bench lab --hosts 4 --rate 200mbit -- python train.py",
    "commlib bench lab --hosts 4 --rate 1gbit --at 10:50mbit --at 20:2=10mbit --at 30:cut=3 --at 40:heal=3 "
    "-- python train.py",
}
"""Run where there can be emulated hosts, with a train.py that says which rank it is."""


def treatment(command: Command) -> str:
    """What is done with it; the words are those of the counts."""
    if command.runs or (AS_PRINTED.fullmatch(command.line) and not command.inline):
        return "run as printed"
    if command.line in CUT or command.line in IN_A_LAB:
        return "run cut"
    return "parsed"


def test_every_command_is_run_or_parsed():
    problems, counts = [], collections.Counter(treatment(c) for c in COMMANDS)
    for command in COMMANDS:
        try:
            read(command)
        except Unreadable as e:
            problems.append(f"{command.where}: {command.line}\n    {e}")
    print(f"{len(COMMANDS)} commands of {len(PAGES)} pages: {dict(counts)}")
    assert not problems, "\n".join(problems)
    assert counts.keys() == {"run as printed", "run cut", "parsed"}


def test_what_is_listed_here_is_in_the_documentation():
    printed = {c.line for c in COMMANDS}
    assert printed >= {*CUT, *IN_A_LAB}


@pytest.mark.parametrize(
    "line",
    [
        "commlib bench trian",
        "commlib trian --comm none",
        "commlib bench train --host 4",
        "commlib bench train --rounds few",
        "commlib bench lab --hosts 4 -- commlib bench link --max-size 4kB",
        "commlib bench lab -- sh -c 'torchrun --nproc-per-node 2 -m commlib train --tsk digits'",
        "torchrun --nproc 2 --nodes 2 train.py",
        "torchrun --nproc-per-node 2 examples/no_such.py",
        "make tset",
        "pip install '.[nuba]'",
        "python -m commlib.bench.no_such",
        "PYTHONPATH=plugins commlib doctor --slowly",
    ],
)
def test_a_command_that_would_fail_is_found(line: str):
    with pytest.raises(Unreadable):
        read(Command("a page", line))


# -- reading -------------------------------------------------------------------------------------


class Unreadable(Exception):
    """What is wrong with a command, in the words of whoever would run it."""


FILLED_IN = {"COMMAND": "doctor", "ROUNDS": "1", "STEPS": "1"}
"""What stands for what a reader chooses, where the parser wants to know."""


def read(command: Command) -> None:
    """Holds a command to the parser of its program; raises Unreadable. Nothing is run."""
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
        done = subprocess.run(["make", "-n", *rest], cwd=ROOT, capture_output=True, text=True)
        need(done.returncode == 0, done.stderr)
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


def check_commlib(args: Sequence[str], *, named: bool) -> None:
    """By the parser of ``commlib`` itself, down to the types of the options; and what runs in a lab by its own."""
    if not args:
        return
    try:
        command: Any = typer.main.get_command(build(args[0]))
        context = command.make_context("commlib", list(args))
        while hasattr(command, "commands"):
            left = [*context._protected_args, *context.args]
            if named and not left:
                return
            name, command, left = command.resolve_command(context, left)
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
    if named and not [a for a in args if a.endswith(".py")] and "-m" not in args:
        args = [*args, "train.py"]
    known = {o for action in get_args_parser()._actions for o in action.option_strings}
    own = args[: next((i for i, a in enumerate(args) if a == "-m" or a.endswith(".py")), 0)]
    unknown = {a for a in own if a.startswith("-")} - known
    need(not unknown, f"torchrun has no {unknown}")
    at = len(own)
    if list(args[at : at + 2]) == ["-m", "commlib"]:
        check_commlib(args[at + 2 :], named=named)
    else:
        check_python(args[at:], named=named)


def check_python(args: Sequence[str], *, named: bool) -> None:
    need(bool(args) or named, "python WHAT?")
    if args[:1] == ["-P"]:
        args = args[1:]
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


# -- running -------------------------------------------------------------------------------------

MODELS = """
from torch import nn
net = lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
gpt = lambda: nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 100))
"""


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In a folder of a reader's own, with a model of his, and a home without keys."""
    (tmp_path / "mymodels.py").write_text(MODELS)
    (tmp_path / "train.py").write_text("import os\nprint('rank', os.environ['RANK'])\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    return tmp_path


def words_of(line: str, more: str = "") -> list[str]:
    (words,) = commands_in(line)
    return [*words[1:], *shlex.split(more)]


def test_those_that_are_quick_run_as_they_are_printed(reader: Path, call: Call):
    lines = dict.fromkeys(c.line for c in COMMANDS if not c.runs and treatment(c) == "run as printed")
    for line in lines:
        status, out, err = call(*words_of(line))
        assert (status, bool(out)) == (0, True), f"{line}\n{err}"


@pytest.mark.slow
@pytest.mark.parametrize("line", CUT)
def test_those_that_are_long_run_with_less_to_do(line: str, reader: Path, call: Call):
    status, out, err = call(*words_of(line, CUT[line]))
    assert (status, bool(out)) == (0, True), f"{line} {CUT[line]}\n{out}{err}"
    if (reader / "figures").exists():  # what follows in docs/benchmarks.md
        for folder in ("before", "after"):
            shutil.copytree("figures", folder)
        for then in ("commlib bench report figures/", "commlib bench compare before/ after/"):
            assert then in {c.line for c in COMMANDS}
            assert call(*words_of(then))[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("line", sorted(IN_A_LAB))
def test_labs_run(line: str, reader: Path, capfd: pytest.CaptureFixture[str], call: Call):
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    status, out, err = call(*words_of(line))
    assert status == 0, err
    assert sorted(re.findall(r"rank \d", out)) == [f"rank {r}" for r in range(4)]
