"""Job that loses power again and again, and goes on from its snapshots, on a disk that is full, slow or damaged."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import commlib
from commlib.messaging.frame import Buffer
from commlib.server.shard import saver
from commlib.server.shard.serve import serve
from commlib.server.storage import snapshot
from commlib.server.storage.snapshot import contents
from commlib.server.storage.snapshot_policy import Snapshots
from tests.support.simulation import primitives
from tests.support.simulation.job import Job
from tests.support.simulation.network import SimulatedStore
from tests.support.simulation.world import Process, Violation

MODES = "", "full", "slow"
_HALF = 128  # values of a chunk
_STEPS, _RUNS = 0, 32  # where workers count their steps, and steps of each run


class Lineage(nn.Module):
    """Parameters in which each worker counts its steps, and the steps of each run of the job; alike in all chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList(nn.Parameter(torch.zeros(2 * _HALF, dtype=torch.float64)) for _ in range(3))

    def forward(self, place: int, run: int) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for row in self.rows:
            for chunk in (row[:_HALF], row[_HALF:]):
                total = total - chunk[_STEPS + place] - chunk[_RUNS + run]
        return total


class Disk:
    """Folder of a simulated job, whose writes fail or take long, and whose files are damaged.

    Args:
        draw: of what befalls it.

    Attributes:
        run: of the job, which writes now.
        written: called after each write.
        saved: run and number → files of it that were written to the end, and are not damaged since.
        mode: what befalls each write: "", "full" or "slow".
    """

    def __init__(self, draw: Any) -> None:
        self._draw = draw
        # One name for all of a process, since it stands in what is logged: a history follows from its seed.
        self.folder = Path(tempfile.gettempdir()) / f"simulated-{os.getpid()}"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.run = 0
        self.written: Callable[[], None] = lambda: None
        self.saved: dict[tuple[int, int], set[Path]] = {}
        self.mode = draw.choice(MODES)

    def write(self, folder: Path, name: str, parts: list[Buffer], real: Callable[..., None] = snapshot._write) -> None:
        """In the place of what writes a file and gives it its name."""
        if self.mode == "full" and self._draw.random() < 0.7:
            (folder / f"{name}.{self._draw.getrandbits(128):032x}.part").write_bytes(b"".join(parts)[:100])
            raise OSError(errno.ENOSPC, "No space left on device")
        if self.mode == "slow":
            primitives.sleep(self._draw.choice((0.1, 2.0)))
        real(folder, name, parts)
        number = int(name.rpartition("-")[2].partition(".")[0])
        self.saved.setdefault((self.run, number), set()).add(folder / name)
        self.written()

    def damage(self) -> None:
        """One file has lost its end, or a bit of it has turned."""
        files = sorted(self.folder.glob("*.snapshot"), key=lambda path: path.name)
        if files:
            path = self._draw.choice(files)
            data = bytearray(path.read_bytes())
            if self._draw.random() < 0.5:
                del data[self._draw.randrange(len(data)) :]
            else:
                data[self._draw.randrange(len(data))] ^= 1 << self._draw.randrange(8)
            path.write_bytes(data)
            for files_of in self.saved.values():
                files_of.discard(path)

    def whole(self, shards: int) -> int:
        """The last step of which there are all shards' files of one run; 0 if there is none."""
        return max((n for (_, n), paths in self.saved.items() if sum(p.exists() for p in paths) >= shards), default=0)

    def empty(self) -> None:
        """Somebody has moved all of it away."""
        shutil.rmtree(self.folder)
        self.saved.clear()


class Restarts(Job):
    """A parameter server with snapshots, whose machines lose power, and which is begun again from the newest ones."""

    kind = "restarts"

    def draw(self) -> None:
        draw = self.random
        self.spec, self.size, self.shards = (
            draw.choice(("bsp", "bsp", "ssp:2")),
            draw.randint(1, 3),
            draw.choice((1, 2, 2, 3)),
        )
        self.steps, self.every, self.runs = draw.randint(12, 30), draw.randint(1, 4), draw.randint(2, 5)
        self.deadline_s = 60.0
        self.disk = Disk(draw)
        self.at_end.callback(shutil.rmtree, self.disk.folder, ignore_errors=True)
        self.run_number, self.least = -1, 0
        self.values_of: dict[tuple[int, int], tuple[int, list[torch.Tensor]]] = {}
        self.told: list[str] = []

    @property
    def longest_s(self) -> float:
        return 600.0

    def start(self) -> list[Process]:
        self._begin()
        return []

    def disturb(self, ranks: list[Process]) -> None:
        """Power is lost in each run but the last, and disks have their faults; they are drawn as runs begin."""
        self._lose_power()

    def store(self) -> SimulatedStore:
        return SimulatedStore(self.network, self.meeting, self.values)

    def replaced(self) -> list[tuple[Any, str, Any]]:
        def token(nbytes: int) -> str:
            return f"{self.random.getrandbits(8 * nbytes):0{2 * nbytes}x}"

        named = types.SimpleNamespace(uuid4=lambda: types.SimpleNamespace(hex=token(16)))
        return [
            (snapshot, "_write", self.disk.write),
            (snapshot, "uuid", named),
            (snapshot, "shutil", types.SimpleNamespace(disk_usage=lambda folder: types.SimpleNamespace(free=100))),
            (saver, "secrets", types.SimpleNamespace(token_hex=token)),
        ]

    def _begin(self) -> None:
        self.run_number += 1
        run, self.values = self.run_number, {}
        self.least, self.disk.run = self.disk.whole(self.shards), run
        restore = bool(contents(self.disk.folder))
        self.told.append(f"run {run} {'goes on from' if restore else 'has no'} snapshots, at least {self.least}")
        self.world.note(self.told[-1])
        self.current: list[Process] = []
        self.meeting = self.world.start(f"meet-{run}", functools.partial(self._meet, run, self.current))
        snapshots = Snapshots(str(self.disk.folder), self.every, restore)
        for n in range(self.shards):
            self.current.append(self.world.start(f"shard{n}-{run}", functools.partial(self._serve, snapshots)))
        for place in range(self.size):
            work = functools.partial(self._work, run, place)
            self.current.append(self.world.start(f"worker{place}-{run}", work))

    def _meet(self, run: int, others: list[Process]) -> None:
        while not all(p.over for p in others):
            primitives.sleep(1.0)
        if run == self.run_number and not any((run, place) in self.values_of for place in range(self.size)):
            self._begin_anew(others)

    def _begin_anew(self, others: list[Process]) -> None:
        """Nobody came to the end: of snapshots that no job can go on from somebody makes room for new ones."""
        said = "; ".join(str(p.error) for p in others if p.error is not None)
        if self.least or "nothing to go on from" not in said:
            raise Violation(f"run {self.run_number} should have gone on from {self.least}: {said}")
        self.disk.empty()
        self._begin()

    def _power_cut(self, run: int) -> None:
        if run != self.run_number or all(p.over for p in self.current):
            return
        self.told.append(f"power is lost at {self.world.now - 1000.0:.2f}")
        for process in (self.meeting, *self.current):
            self.world.kill(process)
        last = run + 2 >= self.runs
        while self.random.random() < 0.3:
            self.disk.damage()
        self.disk.mode = "" if last else self.random.choice(MODES)
        self._begin()
        if not last:
            self._lose_power()

    def _lose_power(self) -> None:
        """At any time, or at the worst: when of some step one shard's file is there, and no other's."""
        cut = functools.partial(self._power_cut, self.run_number)
        if self.random.random() < 0.3:
            self.world.after(self.random.random() * self.steps / 2, cut)  # a step takes half a second
            return
        steps = self.random.choice((1, 1, 2))

        def written() -> None:
            if sum(run == self.run_number for run, _ in self.disk.saved) == steps:
                self.disk.written = lambda: None
                self.world.after(0.0, cut)

        self.disk.written = written

    def _serve(self, snapshots: Snapshots) -> None:
        given: dict[str, Any] = {"endpoint": "simulated", "wait": self.deadline_s, "timeout": self.deadline_s}
        with contextlib.suppress(commlib.PeerLost):
            self.world.note(serve("meet:1", snapshots=snapshots, **given))

    def _work(self, run: int, place: int) -> None:
        model = Lineage()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        server = commlib.ParameterServer(
            model,
            optimizer,
            self.spec,
            "meet:1",
            mean=False,
            workers=self.size,
            shards=self.shards,
            rank=place,
            nbytes=8 * _HALF,
            timeout=self.deadline_s,
            endpoint="simulated",
        )
        begun = server.begun_at
        with server:
            for _ in range(begun, self.steps):
                optimizer.zero_grad()
                model(place, run).backward()
                server.step()
                primitives.sleep(self.world.random.random())
            server.sync()
        self.values_of[run, place] = begun, [row.detach().clone() for row in model.rows]

    def check(self, results: list[Any]) -> None:
        told = f"{self}: {'; '.join(self.told)}"
        ended = [self.values_of.get((self.run_number, place)) for place in range(self.size)]
        if any(each is None for each in ended):
            raise Violation(f"a worker of the last run did not end well: {told}")
        for begun, rows in ended:  # type: ignore[misc]
            if begun < self.least:
                raise Violation(f"it went on from step {begun}, where {self.least} was saved: {told}")
            chunks = [chunk for row in rows for chunk in (row[:_HALF], row[_HALF:])]
            for chunk in chunks:
                counts = chunk[_STEPS : _STEPS + self.size]
                most = self.steps if self.spec == "bsp" else self.steps + 3 * (self.run_number + 1)
                if not bool(((counts >= self.steps) & (counts <= most)).all()):
                    raise Violation(f"workers' steps are {counts.tolist()}, and should be {self.steps}: {told}")
                if self.spec == "bsp" and not torch.equal(chunk, chunks[0]):
                    raise Violation(f"chunks are of different runs: {chunk.tolist()}, {chunks[0].tolist()}: {told}")

    def __str__(self) -> str:
        return f"{super().__str__()}, {self.shards} shards, {self.spec}, {self.steps} steps, saved each {self.every}"
