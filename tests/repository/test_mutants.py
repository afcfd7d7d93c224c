"""The table of tests/support/mutants.py fits the sources and the tests, so that ``make test-mutants`` can be run."""

from __future__ import annotations

import ast
import collections

import pytest

from tests.support.mutant_tables import KINDS, MUTANTS, Mutant
from tests.support.mutants import ALL, ROOT

NAMES = [f"{m.file}, {m.kind}" for m in ALL]


def test_each_of_twelve_files_has_one_mutant_of_each_kind() -> None:
    kinds = collections.defaultdict[str, list[str]](list)
    for m in MUTANTS:
        kinds[m.file].append(m.kind)
    assert len(kinds) == 12
    assert all(sorted(found) == sorted(KINDS) for found in kinds.values()), kinds


@pytest.mark.parametrize("mutant", ALL, ids=NAMES)
def test_what_a_mutant_replaces_is_there_once_and_what_it_puts_there_is_python(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1
    faulty = text.replace(mutant.old, mutant.new)
    assert ast.dump(ast.parse(faulty)) != ast.dump(ast.parse(text))


@pytest.mark.parametrize("mutant", ALL, ids=NAMES)
def test_what_catches_a_mutant_is_a_test_that_there_is(mutant: Mutant) -> None:
    file, _, name = mutant.caught_by.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    found = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert found.count(name.partition("[")[0]) == 1
