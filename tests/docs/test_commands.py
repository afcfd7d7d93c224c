"""Every command of the documentation is read by its own parser, and has a treatment (tests/docs/treated.py)."""

from __future__ import annotations

import collections

import pytest

from tests.docs.reading import Unreadable, read
from tests.docs.treated import COMMANDS, ELSEWHERE, NEEDS, PARSED, TOLD, is_name, recipe, run_by_ci, treatment
from tests.support.docs_reader import PAGES, ROOT, Command

pytestmark = pytest.mark.checkout


def test_every_command_is_readable_and_has_a_treatment():
    problems, counts = [], collections.Counter(treatment(c) for c in COMMANDS)
    for command in COMMANDS:
        try:
            read(command)
        except Unreadable as e:
            problems.append(f"{command.where}: {command.line}\n    {e}")
        if treatment(command) == "untreated":
            problems.append(f"{command.where}: {command.line}\n    is not run: see tests/docs/treated.py")
    print(f"{len(COMMANDS)} commands of {len(PAGES)} pages: {dict(counts)}")
    assert not problems, "\n".join(problems)


def test_what_is_listed_by_name_is_in_the_documentation():
    listed = {*ELSEWHERE, *NEEDS, *PARSED, *(line for lines in TOLD.values() for line in lines)}
    assert listed <= {c.line for c in COMMANDS}


def test_a_new_command_must_be_treated():
    for line in ("commlib bench", "make clean", "commlib trace merge a.json --into b.json", "make fuzz"):
        assert treatment(Command("a page", line)) == "untreated", line


def test_a_new_command_of_a_known_kind_is_run():
    for line in (
        "commlib bench train --hosts 2 --rate 5mbit",
        "make demo",
        "torchrun --nproc-per-node 2 examples/two_levels.py",
    ):
        assert treatment(Command("a page", line)) == "run cut", line


def test_names_are_told_from_commands():
    for line in ("torchrun --max-restarts", "commlib server run", "python -m", "commlib train"):
        assert is_name(line), line
    for line in ("commlib doctor", "commlib bench train", "torchrun --nproc-per-node 2 watched.py"):
        assert not is_name(line), line


def test_what_ci_makes_is_read_from_it():
    assert {"lint", "test", "types", "wheel-test"} <= run_by_ci()
    assert not {"demo", "docs", "spark", "chaos"} & run_by_ci()


def test_a_recipe_is_what_make_would_execute():
    assert recipe("make demo")[0].startswith("commlib train --task digits --ranks 2 --comm none")
    assert recipe('make test ARGS="tests/x -k y"')[0].endswith(" tests/x -k y")


def test_what_another_test_runs_is_there():
    for line, where in ELSEWHERE.items():
        assert f'recipe("{line}")' in (ROOT / where).read_text()


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
        "torchrun --nproc-per-node 2",
        "torchrun --nproc-per-node 2 -m commlib bench link --max 4kB",
        "torchrun --nproc-per-node 2 -m -- commlib bench link --mx 4kB",
        "make tset",
        "pip install '.[nuba]'",
        "python -m commlib.bench.no_such",
        "python -m",
        "PYTHONPATH=plugins commlib doctor --slowly",
    ],
)
def test_a_command_that_would_fail_is_found(line: str):
    with pytest.raises(Unreadable):
        read(Command("a page", line))
