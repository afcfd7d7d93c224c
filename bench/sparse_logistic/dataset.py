"""LIBSVM (SVMlight) text files: one example a line, ``label index:value index:value …``, what follows ``#`` ignored."""

from __future__ import annotations

import array
import math
import re
from pathlib import Path

import torch
from torch import Tensor

from .rows import Rows

_LABELS = {-1.0: -1.0, 0.0: -1.0, 1.0: 1.0}
_INDEX = re.compile(r"[+-]?[0-9]{1,30}")
_LARGEST = torch.finfo(torch.float32).max


class BadFile(ValueError):
    """A line that is no example; the message has the file, the line's number and what is wrong with it."""


def read(path: Path, *, features: int | None = None, shard: tuple[int, int] = (0, 1), zero_based: bool = False) -> Rows:
    """The examples of a file, read line by line: no more of it is held than is returned.

    Labels are of two classes, +1 and -1 (or 0). Indices begin with 1, unless ``zero_based``, and become keys from 0.

    Args:
        path: UTF-8 text.
        features: how many there are; None: up to the largest index in the whole file.
        shard: (index, count): every count-th example from that one on. The whole file is checked whatever is kept.
        zero_based: indices begin with 0.

    Raises:
        BadFile: a bad label, pair or index, a value that is not finite; or there is no example.
        OSError: it cannot be read.
    """
    rows = _Growing(first=0 if zero_based else 1)
    index, count = shard
    n = 0
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            try:
                rows.add(words, keep=n % count == index)
            except ValueError as e:
                raise BadFile(f"{path} line {number}: {e}") from None
            n += 1
    if not n:
        raise BadFile(f"{path}: there is no example in it; a line is label index:value index:value …, as +1 3:0.5 7:1")
    if features is not None and rows.features > features:
        raise BadFile(f"{path}: there is a feature {rows.features}, and {features} were expected at most")
    return rows.done(rows.features if features is None else features)


class _Growing:
    """Rows to which examples are added."""

    def __init__(self, first: int) -> None:
        self.features, self._first = 0, first
        self._starts, self._keys = array.array("q", [0]), array.array("q")
        self._values, self._labels = array.array("f"), array.array("f")

    def add(self, words: list[str], keep: bool) -> None:
        """Raises ValueError, in words, for what is no example."""
        label = _LABELS.get(_number(words[0]))
        if label is None:
            raise ValueError(f"label {words[0]!r} is none of +1, -1 and 0: there must be two classes")
        keys, values, last = [], [], self._first - 1
        for word in words[1:]:
            index, value = self._pair(word)
            if index <= last:
                raise ValueError(f"index {index} comes after {last}: indices must ascend, each once")
            keys.append(index - self._first)
            values.append(value)
            last = index
        self.features = max(self.features, last - self._first + 1)
        if keep:
            self._keys.extend(keys)
            self._values.extend(values)
            self._labels.append(label)
            self._starts.append(len(self._keys))

    def _pair(self, word: str) -> tuple[int, float]:
        left, _, right = word.partition(":")
        value = _number(right)
        if not _INDEX.fullmatch(left) or (math.isnan(value) and right.lstrip("+-").lower() != "nan"):
            raise ValueError(f"{word!r} is no index:value")
        index = int(left)
        if index < self._first:
            raise ValueError(f"index {index} is below {self._first}, where indices begin")
        if index >= 1 << 62:
            raise ValueError(f"index {index} is too large")
        if not abs(value) <= _LARGEST:
            raise ValueError(f"the value in {word!r} is not finite, or beyond float32")
        return index, value

    def done(self, features: int) -> Rows:
        return Rows(
            _tensor(self._starts, torch.int64),
            _tensor(self._keys, torch.int64),
            _tensor(self._values, torch.float32),
            _tensor(self._labels, torch.float32),
            features,
        )


def _number(word: str) -> float:
    """NaN for what is none."""
    try:
        return math.nan if "_" in word else float(word)  # 1_0 is 10 to Python alone
    except ValueError:
        return math.nan


def _tensor(numbers: array.array[int] | array.array[float], dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(numbers, dtype=dtype).clone() if numbers else torch.empty(0, dtype=dtype)
