"""First lines of docstrings stand alone: they have their subject, and are understood without the file around them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import commlib
import commlib.bench
import commlib.compressors
import commlib.transports

FOLDERS = [Path(str(m.__file__)).parent for m in (commlib, commlib.bench, commlib.compressors, commlib.transports)]
FILES = sorted({path for folder in FOLDERS for path in folder.rglob("*.py")})
NO_SUBJECT = {"Of", "It", "Its", "Who", "Whose", "Those", "One", "Again", "Theirs", "Comes", "Goes", "Nobody", "What"}


def summaries(source: str) -> Iterator[tuple[int, str]]:
    """Line of each docstring, and its first line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text.splitlines()[0]


def is_rejected(summary: str) -> bool:
    """Whether it has fewer than three words, or begins with a word that points to something outside of it."""
    words = summary.split()
    return len(words) < 3 or words[0].strip(".,:;") in NO_SUBJECT


def test_every_first_line_of_a_docstring_has_its_subject() -> None:
    rejected = [
        f"{path}:{line}: {summary}"
        for path in FILES
        for line, summary in summaries(path.read_text(encoding="utf-8"))
        if is_rejected(summary)
    ]
    assert rejected == []


@pytest.mark.parametrize(
    "summary",
    [
        "It goes.",
        "Of one rank of them.",
        "Its own copy of the gradient.",
        "Who takes part in a job.",
        "One: of them all.",
        "What members last said.",
    ],
)
def test_first_lines_that_do_not_stand_alone_are_rejected(summary: str) -> None:
    found = list(summaries(f'def f():\n    """{summary}"""'))
    assert found == [(2, summary)]
    assert is_rejected(summary)


@pytest.mark.parametrize("summary", ["Number of values.", "Send a message at once.", "Itself a module of its own."])
def test_others_are_not(summary: str) -> None:
    assert not is_rejected(summary)
