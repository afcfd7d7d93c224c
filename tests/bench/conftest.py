"""For benchmarks' tests: how much of the time the machine was there at all, and modules of a user."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

_TICK_S, _USUAL_S = 0.001, 0.003


class Presence:
    """The share of a block's time in which the machine ran what was due: a thread that sleeps for a millisecond at a
    time notes by how much it is woken late. A shaper that is woken late loses what it could have sent meanwhile.
    """

    def __init__(self) -> None:
        self.share = 1.0
        self._ended = threading.Event()
        self._late = 0.0
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._ended.is_set():
            begun = time.perf_counter()
            time.sleep(_TICK_S)
            self._late += max(0.0, time.perf_counter() - begun - _USUAL_S)

    def __enter__(self) -> Presence:
        self._begun = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self.share = max(0.01, 1.0 - self._late / (time.perf_counter() - self._begun))


@pytest.fixture
def presence() -> Callable[[], Presence]:
    """Makes one, for each block."""
    return Presence


@pytest.fixture
def users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """``users_module("nets", source)``: a module in the folder that commands are typed in, which it returns."""

    def write(name: str, source: str) -> Path:
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", [p for p in sys.path if p])  # no '': as the installed command has it
        monkeypatch.delitem(sys.modules, name, raising=False)
        return tmp_path

    return write
