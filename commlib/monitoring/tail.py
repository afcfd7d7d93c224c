"""Files that others write, read along line by line."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from commlib.monitoring.top import Account


class Tail:
    """Of one file: the lines that have come since it was last asked. Half a line waits for its other half.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read, self._rest = 0, b""

    def lines(self) -> Iterator[str]:
        """Those that are whole by now; from the beginning again if the file has become shorter.

        Raises:
            OSError: it cannot be read.
        """
        with self.path.open("rb") as file:
            if self.path.stat().st_size < self._read:
                self._read, self._rest = 0, b""
            file.seek(self._read)
            found = file.read()
        self._read += len(found)
        *whole, self._rest = (self._rest + found).split(b"\n")
        for line in whole:
            if line.strip():
                yield line.decode(errors="replace")

    @property
    def age(self) -> float:
        """Seconds since it was written, by the clock of this machine."""
        return max(0.0, time.time() - self.path.stat().st_mtime)


class Tails:
    """Of the ranks of a run.

    Args:
        paths: files, or folders: of a folder, what ends in ``.jsonl``, whenever it comes.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        self._known: dict[Path, tuple[Tail, Account]] = {}

    def read(self) -> tuple[list[tuple[Account, float]], list[str]]:
        """The accounts of all ranks, each with the seconds since its file was written; and what to say of files.

        Of two files of one rank, the one that was written last is taken.
        """
        notes, newest = [], dict[int, tuple[Account, float, Path]]()
        for path in self._files():
            tail, account = self._known.setdefault(path, (Tail(path), Account()))
            try:
                for line in tail.lines():
                    account.take(line)
                age = tail.age
            except OSError as e:
                notes.append(f"{path} cannot be read: {e.strerror}")
                continue
            if not account.begun:
                notes.append(f"{path} has no log in it" + (" yet" if not account.strange else ""))
                continue
            rank = account.begun["rank"]
            one = (account, age, path)
            if rank in newest:
                older, one = sorted((newest[rank], one), key=lambda each: -each[1])
                notes.append(f"{older[2]} is left out: {one[2]} is of rank {rank}, too, and newer")
            newest[rank] = one
        return [(account, age) for account, age, _ in newest.values()], notes

    def _files(self) -> list[Path]:
        found: dict[Path, None] = {}
        for path in self._paths:
            found |= dict.fromkeys(sorted(path.glob("*.jsonl")) if path.is_dir() else [path])
        return list(found)
