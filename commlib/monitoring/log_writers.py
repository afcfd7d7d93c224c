"""Where a log goes: lines of JSON in a file, or TensorBoard."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from commlib.errors import CommlibError, MissingDependency
from commlib.telemetry.recorder import own_path

Entry = Mapping[str, Any]
"""What :mod:`commlib.monitoring.log` writes: a ``kind`` and more."""
_NO_FOLDERS = (".json", ".txt", ".csv", ".log")


class LogFailed(CommlibError):
    """A log that cannot be begun; it says which file or folder, and why."""


class LogWriter(Protocol):
    """Where entries go. What it raises ends it, and nothing else."""

    name: str

    def write(self, entry: Entry) -> None:
        """Write an entry."""

    def close(self) -> None:
        """Close the log: nothing more is written."""


def target_of(given: Any, rank: int) -> LogWriter:
    """Writer that a user names.

    Args:
        given: a path that ends in ``.jsonl``; any other, of a folder for TensorBoard; or what has ``add_scalar``.
        rank: whose entries come.

    Raises:
        TypeError: none of these.
        ValueError: a file of another kind.
        LogFailed: it cannot be written there.
        MissingDependency: a folder, and TensorBoard is not installed.
    """
    if callable(getattr(given, "add_scalar", None)):
        return TensorBoard(lambda _: given, type(given).__name__)
    if not isinstance(given, str | os.PathLike):
        raise TypeError(f"a log goes to a path or a SummaryWriter (what has add_scalar), got {type(given).__name__}")
    path = os.fspath(given)
    if path.endswith(".jsonl"):
        return JsonLines(own_path(path, rank))
    if Path(path).suffix in _NO_FOLDERS:
        raise ValueError(f"{path}: give a path that ends in .jsonl, or a folder for TensorBoard")
    folder = Path(path.replace("{rank}", str(rank))) if "{rank}" in path else Path(path) / f"rank{rank}"
    return _in_folder(folder.absolute())


def _in_folder(folder: Path) -> LogWriter:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as e:
        raise MissingDependency(f"a log for TensorBoard needs 'tensorboard': pip install tensorboard ({e})") from e
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise LogFailed(f"the log cannot be written into {folder}: {e.strerror}; name another folder") from e

    def make(first: int) -> Any:
        """Make a writer that hides what a resumed run had written after the step it goes on from."""
        writer: Any = SummaryWriter  # it has no types
        return writer(str(folder), purge_step=first)

    return TensorBoard(make, str(folder), own=True)


class JsonLines:
    """A file with an entry a line, which it is appended to; whoever reads along finds whole lines.

    Args:
        path: of the file, in a folder that there is.

    Raises:
        LogFailed: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        try:
            torn = path.exists() and _last_byte(path) not in (b"", b"\n")
            self._file = path.open("a", encoding="utf-8")
        except OSError as e:
            raise LogFailed(f"the log {path} cannot be written: {e.strerror}; name a file in a folder there is") from e
        self._before = "\n" if torn else ""  # a run that was killed had written half a line

    def write(self, entry: Entry) -> None:
        """Write a line, which is there for others when this returns."""
        self._file.write(self._before + json.dumps(_finite(entry), ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()
        self._before = ""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Scalars named ``commlib/…``, by step; changes of the plan as text, ``commlib/plan``.

    Args:
        make: makes the writer when the first entry comes, given the first step that is in it.
        name: of it, for messages.
        own: whether to close it with the log.
    """

    def __init__(self, make: Callable[[int], Any], name: str, *, own: bool = False) -> None:
        self.name, self._make, self._own = name, make, own
        self._writer: Any = None

    def write(self, entry: Entry) -> None:
        """The scalars of a step; of what begins and ends there is nothing to draw."""
        if entry["kind"] != "step":
            return
        if self._writer is None:
            self._writer = self._make(entry["step"] - entry["steps"] + 1)
        for name, value in scalars(entry):
            self._writer.add_scalar(f"commlib/{name}", value, entry["step"])
        if entry["changes"] and hasattr(self._writer, "add_text"):
            said = "\n".join(f"- {c['layer']}: {c['from']} → {c['to']} ({c['reason']})" for c in entry["changes"])
            self._writer.add_text("commlib/plan", said, entry["step"])
        self._writer.flush()

    def close(self) -> None:
        """No more; a writer that was given stays open."""
        if self._own and self._writer is not None:
            self._writer.close()


def scalars(entry: Entry) -> Iterator[tuple[str, float]]:
    """Numbers to draw of a step's entry: by step, where the entry has sums."""
    steps = max(1, entry["steps"])
    known = {
        "bytes_per_step": entry["bytes"] / steps,
        "dense_bytes_per_step": entry["dense_bytes"] / steps,
        "ratio": entry["ratio"],
        "exposed_ms_per_step": entry["exposed_ms"] / steps,
        "steps_per_second": steps / entry["seconds"] if entry["seconds"] else None,
        "skipped": entry["skipped"],
        "error": entry["error"],
    }
    known |= {f"ms_per_step/{phase}": 1e3 * seconds / steps for phase, seconds in entry["phases"].items()}
    for layer, held in entry["layers"].items():
        known |= {f"{what}/{layer}": value for what, value in held.items()}
    for name, value in known.items():
        if value is not None and math.isfinite(value):
            yield name, float(value)


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        return file.read(1)


def _finite(value: Any) -> Any:
    """As JSON has it: what is not finite is null."""
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
