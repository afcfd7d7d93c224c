"""What belongs to the fast tier, what a test of it may take, and that every promise and every public name is in it."""

from __future__ import annotations

import ast
import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import commlib
from tests.support import tiers
from tests.support.tiers import LIMIT_S, LONGER, Clock, examples, full, left_out, longest, too_long, used

ROOT = Path(__file__).resolve().parents[2]
GROUPS = {"compressors": "codecs", "filters": "filters", "endpoints": "endpoints", "process_groups": "process groups"}

Rows = dict[str, list[str]]


def tables() -> tuple[Rows, Rows]:
    """CONTRIBUTING's two tables: a promise's tests, and those of public names as they stand in a row."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## What the fast tier shows")[2]
    found: list[Rows] = []
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)[:2]:
        rows = [re.match(r"\| (.+?) \| (`tests/.+`) \|$", line) for line in table.splitlines()[2:]]
        assert all(rows), table
        found.append({row[1]: re.findall(r"`(tests/[^`]+)`", row[2]) for row in rows if row is not None})
    promises, features = found
    return promises, features


def tier_of(test: str) -> str:
    """ "fast", "full", or "missing", for ``tests/…/test_x.py::test_y``; a test of which some cases are fast is fast."""
    file, _, name = test.partition("::")
    if not (ROOT / file).is_file():
        return "missing"
    module = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    marks = [ast.unparse(n.value) for n in module.body if isinstance(n, ast.Assign) and "pytestmark" in ast.unparse(n)]
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            marks += [ast.unparse(d) for d in node.decorator_list if "parametrize" not in ast.unparse(d)]
            return "full" if re.search(r"mark\.(full|alone)\b", " ".join(marks)) else "fast"
    return "missing"


def test_every_promise_of_the_guarantees_has_a_test_in_the_fast_tier() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "docs/guarantees.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert [h for h in headings if h != "Not promised"] == list(tables()[0])


def test_every_public_name_command_and_plug_in_has_one() -> None:
    rows = tables()[1]
    named = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    commands = {
        f"commlib {ep.name}" for ep in entry_points(group="commlib.commands") if ep.value.startswith("commlib.")
    }
    assert sorted(named) == sorted({*commlib.__all__, *commands})
    assert {row for row in rows if "`" not in row} == set(GROUPS.values())


def test_these_tests_exist_and_are_in_the_fast_tier() -> None:
    tests = {test for table in tables() for tests in table.values() for test in tests}
    assert {test: tier_of(test) for test in tests} == dict.fromkeys(tests, "fast")


def test_each_line_about_security_is_shown_by_tests_that_exist() -> None:
    text = (ROOT / "docs/security.md").read_text(encoding="utf-8").partition("## What shows it")[2]
    rows = re.findall(r"^\| (.+?) \| (`tests/.+`) \|$", text, flags=re.MULTILINE)
    assert len(rows) == len(re.findall(r"^\| ", text, flags=re.MULTILINE)) - 1
    tests = {test for _, named in rows for test in re.findall(r"`(tests/[^`]+)`", named)}
    assert len(tests) > 20
    assert [test for test in sorted(tests) if tier_of(test) == "missing"] == []


def test_a_tier_is_read_off_the_marks() -> None:
    assert tier_of("tests/bench/chaos/test_chaos.py::test_no_such") == "missing"
    assert tier_of("tests/no_such.py::test") == "missing"
    (chaos,) = re.findall(
        r"^def (test_\w+)", (ROOT / "tests/bench/chaos/test_chaos.py").read_text(), flags=re.MULTILINE
    )
    assert tier_of(f"tests/bench/chaos/test_chaos.py::{chaos}") == "full"
    assert (
        tier_of("tests/integration/test_peer_lost.py::test_the_others_name_in_time_who_is_missing_and_again_and_end")
        == "full"
    )
    assert tier_of("tests/repository/test_tiers.py::test_a_tier_is_read_off_the_marks") == "fast"


def test_those_that_may_take_longer_are_few_and_exist_and_have_a_reason() -> None:
    assert len(LONGER) <= 20
    assert {test: tier_of(test) for test in LONGER} == dict.fromkeys(LONGER, "fast")
    assert all(len(why) > 10 for why in LONGER.values())


def test_one_that_takes_longer_than_the_limit_is_told_how_long_and_what_to_do() -> None:
    assert too_long("tests/x.py::test_y[1]", LIMIT_S) is None
    said = too_long("tests/x.py::test_y[1]", LIMIT_S + 2)
    assert said is not None
    assert "took 7.0 s" in said
    assert "mark it full" in said


def test_where_cores_are_slower_it_may_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert too_long("tests/x.py::test_y", LIMIT_S * 1.4, slow=1.5) is None
    assert "may take 7.5 s here" in str(too_long("tests/x.py::test_y", LIMIT_S * 1.6, slow=1.5))
    ticks = itertools.count()
    monkeypatch.setattr(time, "thread_time", lambda: next(ticks) * 3 * tiers._USUAL_S)
    assert tiers.slowness() == pytest.approx(3)
    monkeypatch.setattr(time, "thread_time", lambda: next(ticks) * tiers._USUAL_S / 2)
    assert tiers.slowness() == 1  # a fast machine has the limit that all have


TOOK = """
import contextlib

import pytest

from tests.support import tiers

took = iter(TIMES)
tiers.Clock.took = lambda self: next(took)
tiers.slowness = lambda: 1.0

@contextlib.contextmanager
def turn(*, alone):
    print("alone" if alone else "among others")
    yield
    print("done")

tiers.turn = turn

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    with tiers.place_of(item, nextitem):
        return (yield)
"""

TESTS = """
tries = []

def test_too_long_at_first():
    pass

def test_too_long_ever():
    pass

def test_too_long_here_but_not_surely():
    pass

def test_wrong():
    tries.append("once")
    assert len(tries) == 2
"""


ALONE = """
import pytest

def test_first():
    pass

@pytest.mark.alone
@pytest.mark.parametrize("which", [1, 2, 3])
def test_measures(which):
    print("measures", which)

def test_between():
    pass

@pytest.mark.alone
def test_last():
    print("measures", 4)
"""


def run_in(folder: Path, tests: str, times: Sequence[tuple[float, float]]) -> str:
    """What pytest says of tests that take so long, and of their turns."""
    (folder / "conftest.py").write_text(TOOK.replace("TIMES", repr(times)))
    (folder / "test_it.py").write_text(tests)
    options = ["-q", "-s", "-p", "no:cacheprovider", "-p", "tests.support.tiers", "-rA", "--rootdir", str(folder)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [sys.executable, "-m", "pytest", *options]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    return done.stdout + done.stderr


def test_those_that_are_alone_one_after_another_let_nobody_in_between(tmp_path: Path) -> None:
    out = run_in(tmp_path, ALONE, [(0.0, 1.0)] * 2)
    turns = re.findall("alone|among others|done|measures .", out.partition("=====")[0])
    together = ["alone", "measures 1", "measures 2", "measures 3", "done"]
    assert turns == ["among others", "done", *together, "among others", "done", "alone", "measures 4", "done"]


def test_one_that_takes_too_long_has_a_second_try_alone_and_one_that_is_wrong_has_none(tmp_path: Path) -> None:
    out = run_in(tmp_path, TESTS, [(0.0, 9.0), (0.0, 1.0), (14.0, 2.0), (14.0, 2.0), (6.0, 1.0), (0.0, 1.0)])
    assert "PASSED test_it.py::test_too_long_at_first" in out, out
    assert "FAILED test_it.py::test_too_long_ever - Failed: took 9.0 s" in out, out
    assert "PASSED test_it.py::test_too_long_here_but_not_surely" in out, out
    assert "FAILED test_it.py::test_wrong - " in out, out
    turns = re.findall("alone|among others|done", out.partition("FAILURES")[0])
    assert turns == [*["among others", "done", "alone", "done"] * 2, *["among others", "done"] * 2]


def test_those_that_took_longer_than_the_limit_are_named_the_longest_first() -> None:
    said = [("a", [(tiers._TOOK, 6.0)]), ("b", []), ("c", [("other", 1), (tiers._TOOK, 7.25)])]
    assert longest(said) == "c 7.2 s, a 6.0 s"
    assert longest([("b", [])]) == ""


def test_one_of_the_list_may_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LONGER, "tests/x.py::test_y", "it is an example")
    assert too_long("tests/x.py::test_y[1]", LIMIT_S + 2) is None
    assert too_long("tests/x.py::test_z[1]", LIMIT_S + 2) is not None


def test_time_in_which_others_had_the_cores_does_not_count_but_what_is_used_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = {"monotonic": 100.0, "used": 10.0, "stalled": 50.0}
    monkeypatch.setattr(time, "monotonic", lambda: now["monotonic"])
    monkeypatch.setattr(tiers, "used", lambda: now["used"])
    monkeypatch.setattr(tiers, "stalled", lambda: now["stalled"])

    def after(wall: float, used: float, stalled: float) -> tuple[float, float]:
        clock = Clock()
        now["monotonic"] += wall
        now["used"] += used
        now["stalled"] += stalled
        return clock.took()

    assert after(wall=3, used=1, stalled=0) == (0, 3)
    assert after(wall=60, used=2, stalled=59) == (2, 0)  # a busy machine
    assert after(wall=60, used=2, stalled=10) == (2, 48)  # it waits for something else
    assert after(wall=9, used=14, stalled=9) == (14, 0)  # two cores


def test_what_is_used_is_that_of_this_process_too() -> None:
    before, sum_ = used(), 0
    while used() - before < 0.05:
        sum_ += sum(range(1000))
    assert sum_ > 0


def test_values_of_one_parameter_or_of_several_can_be_full() -> None:
    one, two = full("x", ("y", 1))
    assert [one.values, two.values] == [("x",), ("y", 1)]
    assert all([m.name for m in p.marks] == ["full"] for p in (one, two))


def test_properties_are_tried_with_some_examples_in_the_fast_tier_too() -> None:
    assert 5 <= examples(60) <= 60
    assert examples(3) == 3


def test_reasons_why_tests_were_skipped_are_counted_in_one_line() -> None:
    said = left_out(["Skipped: needs a GPU", "needs Java", "Skipped: needs a GPU"])
    assert said == "2 × needs a GPU; 1 × needs Java"
    assert left_out([]) == ""
