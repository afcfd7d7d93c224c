"""LIBSVM files: what is read, what is refused and how it is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.bench.sparse_logistic.dataset import BadFile, read
from commlib.bench.sparse_logistic.generate import Generated
from commlib.bench.sparse_logistic.rows import Rows
from tests.support.tiers import examples


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "some.svm"


def lines(rows: Rows) -> str:
    """A file of these examples; floats in as many digits as bring them back."""
    starts, keys, values = rows.starts.tolist(), rows.keys.tolist(), rows.values.tolist()
    return "".join(
        f"{label:+g} " + " ".join(f"{keys[e] + 1}:{values[e]!r}" for e in range(a, b)) + "\n"
        for label, a, b in zip(rows.labels.tolist(), starts, starts[1:], strict=False)
    )


def same(a: Rows, b: Rows) -> bool:
    return a.features == b.features and all(
        torch.equal(getattr(a, name), getattr(b, name)) for name in ("starts", "keys", "values", "labels")
    )


def test_examples_comments_empty_lines_and_examples_without_features_are_read(file: Path) -> None:
    file.write_text("# a file\n+1 1:0.5 7:-2e-3 # the first\n\n0\n-1 3:1\n")
    rows = read(file)
    assert rows.labels.tolist() == [1.0, -1.0, -1.0]
    assert rows.starts.tolist() == [0, 2, 2, 3]
    assert rows.keys.tolist() == [0, 6, 2]
    assert rows.values.tolist() == pytest.approx([0.5, -2e-3, 1.0])
    assert rows.features == 7


def test_indices_may_begin_with_nought_if_that_is_said(file: Path) -> None:
    file.write_text("1 0:1 2:3\n")
    assert read(file, zero_based=True).keys.tolist() == [0, 2]
    assert read(file, zero_based=True).features == 3


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("2 1:1", "label '2' is none of +1, -1 and 0: there must be two classes"),
        ("yes 1:1", "label 'yes' is none of"),
        ("nan 1:1", "label 'nan' is none of"),
        ("1_0 1:1", "label '1_0' is none of"),
        ("1:1 2:2", "label '1:1' is none of"),
        ("1 5", "'5' is no index:value"),
        ("1 a:1", "'a:1' is no index:value"),
        ("1 1:", "'1:' is no index:value"),
        ("1 1:x", "'1:x' is no index:value"),
        ("1 qid:3 1:1", "'qid:3' is no index:value"),
        ("1 3:1 2:1", "index 2 comes after 3: indices must ascend, each once"),
        ("1 3:1 3:1", "index 3 comes after 3: indices must ascend, each once"),
        ("1 0:1", "index 0 is below 1, where indices begin"),
        ("1 -4:1", "index -4 is below 1, where indices begin"),
        ("1 99999999999999999999:1", "index 99999999999999999999 is too large"),
        ("1 1:nan", "the value in '1:nan' is not finite"),
        ("1 1:-inf", "the value in '1:-inf' is not finite"),
        ("1 1:1e39", "the value in '1:1e39' is not finite, or beyond float32"),
    ],
)
def test_a_bad_line_is_named_with_its_file_and_number(file: Path, line: str, said: str) -> None:
    file.write_text(f"+1 1:1\n# fine\n{line}\n")
    with pytest.raises(BadFile) as caught:
        read(file, shard=(1, 1000))  # also if the example is another worker's
    assert str(caught.value).startswith(f"{file} line 3: {said}")


def test_a_file_without_examples_and_one_with_more_features_than_agreed_are_refused(file: Path) -> None:
    file.write_text("# nothing\n")
    with pytest.raises(BadFile, match="there is no example in it"):
        read(file)
    file.write_text("1 9:1\n")
    with pytest.raises(BadFile, match="there is a feature 9, and 8 were expected at most"):
        read(file, features=8)


@settings(max_examples=examples(30))
@given(seed=st.integers(0, 2**32), count=st.integers(1, 5))
def test_what_is_written_is_read_back_and_shards_are_those_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, seed: int, count: int
) -> None:
    rows = Generated(examples=1 + seed % 13, features=40, drawn=6, true=5, seed=seed).rows()
    path = tmp_path_factory.mktemp("svm") / "a.svm"
    path.write_text(lines(rows))
    assert same(read(path, features=40), rows)
    for i in range(count):
        assert same(read(path, features=40, shard=(i, count)), rows.shard(i, count))
