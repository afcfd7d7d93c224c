"""Every row of docs/compatibility.md names a test that there is, and every test of this folder is in a row."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support import unusual_models

pytestmark = pytest.mark.checkout

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "compatibility.md"
ROWS = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
NAMED = {name: line for line in ROWS for name in re.findall(r"`([\w./]+\.py::\w+)`", line)}
OF_PIECES = {"test_table.py", "test_accumulation.py"}  # the latter has tests of a class besides


def promises(file: Path) -> set[str]:
    return {
        n.name for n in ast.parse(file.read_text()).body if isinstance(n, ast.FunctionDef) and n.name[:5] == "test_"
    }


@pytest.mark.parametrize("name", NAMED)
def test_there_is_a_test_of_that_name(name: str) -> None:
    file, _, test = name.partition("::")
    assert test in promises(HERE / file)


def test_every_row_has_one() -> None:
    rows = [line for line in ROWS if not re.match(r"\|(---|\s*tool\s*\|)", line)]
    assert len(rows) > 30
    assert [r for r in rows if r not in NAMED.values() and "::test_" not in r] == []


def test_every_promise_tested_here_is_on_the_page() -> None:
    tests = {f"{f.name}::{t}" for f in HERE.glob("test_*.py") if f.name not in OF_PIECES for t in promises(f)}
    assert tests - set(NAMED) <= {
        "test_optimizers.py::test_the_hook_of_optimizers_in_the_backward_pass_is_known_by_its_name"
    }


def test_the_list_of_unusual_models_is_that_of_the_tests() -> None:
    assert f"\n\n{unusual_models.page()}\n\n" in PAGE.read_text()
