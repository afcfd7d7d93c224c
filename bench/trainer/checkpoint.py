"""Checkpoints that are whole or not there: written beside, renamed, then pointed to.

::

    FOLDER/<comm>/seed-0/latest            name of the newest whole checkpoint
                         step-00000100/    run.pt (rank 0)   rank-0.pt rank-1.pt … (each rank its own)
                         result.json       once the run is finished

All ranks must see the same folder.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
import torch.distributed as dist

import commlib
from commlib.errors import CheckpointMismatch


def run_path(root: Path, comm: str, seed: int) -> Path:
    """The folder of one run; different specs never share one."""
    return root / quote(comm, safe="=,:").replace(":", "+") / f"seed-{seed}"


class RunFolder:
    """The checkpoints of one run (one codec, one seed).

    Args:
        root: the folder given by the user.
        comm: the codec's spec.
        seed: the run's seed.
        identity: what must be equal for a checkpoint to fit: JSON values by name.
    """

    def __init__(self, root: Path, comm: str, seed: int, identity: Mapping[str, object]) -> None:
        self.path = run_path(root, comm, seed)
        self.identity = dict(identity)

    def save(self, step: int, run: Mapping[str, object], own: Mapping[str, object]) -> None:
        """Write a checkpoint. Collective; older ones go once the new one is whole.

        Args:
            step: steps done.
            run: what all ranks share, written by rank 0.
            own: what belongs to this rank.
        """
        folder = self.path / f"step-{step:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / f"rank-{dist.get_rank()}.pt", own)
        if dist.get_rank() == 0:
            _write(folder / "run.pt", {**run, "identity": self.identity, "ranks": dist.get_world_size()})
        dist.barrier()
        if dist.get_rank() == 0:
            _write_text(self.path / "latest", folder.name)
            for old in self.path.glob("step-*"):
                if old.name != folder.name:
                    shutil.rmtree(old)
        dist.barrier()

    def load(self) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
        """The newest checkpoint, or None: what all ranks share, and what each of its ranks owned.

        Collective: rank 0 chooses which.

        Raises:
            CheckpointMismatch: it belongs to another run, is damaged, or is not seen by this rank.
        """
        chosen = [_read_text(self.path / "latest") if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(chosen, src=0)
        if chosen[0] is None:
            return None
        folder = self.path / chosen[0]
        run = _read(folder / "run.pt")
        self._compare(run["identity"], folder)
        return run, [_read(folder / f"rank-{r}.pt") for r in range(run["ranks"])]

    def save_result(self, result: Mapping[str, object], goal: str) -> None:
        """Keep the result of a finished run; ``goal`` says how long it was."""
        document = {"identity": self.identity, "goal": goal, "result": result}
        _write_text(self.path / "result.json", json.dumps(document))

    def load_result(self, goal: str) -> dict[str, Any] | None:
        """The stored result of the same run of the same length, or None. Collective, as :meth:`load`."""
        text = [_read_text(self.path / "result.json") if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(text, src=0)
        if text[0] is None:
            return None
        document = json.loads(text[0])
        self._compare(document["identity"], self.path / "result.json")
        return dict(document["result"]) if document["goal"] == goal else None

    def _compare(self, theirs: Mapping[str, object], where: Path) -> None:
        differ = [k for k in self.identity if theirs.get(k) != self.identity[k]]
        if differ:
            said = ", ".join(f"{k} {theirs.get(k)!r} (now {self.identity[k]!r})" for k in differ)
            raise CheckpointMismatch(
                f"{where} was written with {said}: use the same flags, or another --checkpoint folder"
            )


def comm_state(owned: list[dict[str, Any]], rank: int, ranks: int, nodes: str | None = None) -> dict[str, Any]:
    """A rank's codec memory from a checkpoint, merged if the number of ranks, or their nodes, are others now."""
    if len(owned) == ranks and owned[rank]["comm"].get("nodes") == nodes:
        return dict(owned[rank]["comm"])
    return dict(commlib.merge_state_dicts([o["comm"] for o in owned]))


def _write(path: Path, value: object) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("wb") as f:
        torch.save(value, f)
        f.flush()
        os.fsync(f.fileno())
    beside.replace(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as e:
        raise CheckpointMismatch(f"{path} is missing: all ranks must see the same --checkpoint folder") from e
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as e:
        raise CheckpointMismatch(f"{path} is no readable checkpoint ({e})") from e
    return dict(value)


def _write_text(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def _read_text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None
