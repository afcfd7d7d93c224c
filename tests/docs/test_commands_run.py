"""The commands of the documentation are run: as they are printed, or with less to do (tests/docs/treated.py)."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from tests.docs.treated import COMMANDS, ELSEWHERE, IN_A_LAB, NEEDS, TOLD, cut, recipe, treatment

pytestmark = [pytest.mark.checkout, pytest.mark.usefixtures("warm_python")]

Run = Callable[[str], str]


def those(treated: str) -> list[str]:
    return list(dict.fromkeys(c.line for c in COMMANDS if not c.runs and treatment(c) == treated))


ALONE = {line for lines in TOLD.values() for line in lines} | ELSEWHERE.keys()


@pytest.mark.full
def test_those_that_are_quick_run_as_they_are_printed(run: Run):
    for line in those("run as printed"):
        run(line)


def cuts() -> dict[str, str]:
    """What is run → the first command that comes to it: with less to do, several do the same."""
    found: dict[str, str] = {}
    for line in those("run cut"):
        if line not in ALONE and not IN_A_LAB.fullmatch(line):
            for each in recipe(line) if line.startswith("make ") else [line]:
                found.setdefault(" ".join(cut(each).split()), line)
    return found


@pytest.mark.full
@pytest.mark.parametrize("made", cuts())
def test_those_that_are_long_run_with_less_to_do(made: str, run: Run):
    run(made)


@pytest.mark.full
@pytest.mark.parametrize("line", [line for line in those("run cut") if IN_A_LAB.fullmatch(line)])
def test_every_rank_of_a_lab_runs(line: str, run: Run):
    out = run(line)
    hosts = int((re.search(r"--hosts (\d+)", line) or ["", "2"])[1])
    ranks = hosts * (2 if "--nproc-per-node 2" in line else 1)
    assert sorted(re.findall(r"rank \d", out)) == [f"rank {r}" for r in range(ranks)]


@pytest.mark.full
@pytest.mark.parametrize("line", NEEDS)
def test_what_needs_more_than_is_here_finds_its_tests(line: str, run: Run):
    (each,) = (each for each in recipe(line) if each.startswith("python -m pytest"))
    assert re.search(r"\d+ tests? collected|\d+ skipped", run(cut(each)))


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize("line", those("needs a GPU"))
def test_those_for_a_gpu(line: str, run: Run):
    assert torch.cuda.is_available()
    run(cut(line))
