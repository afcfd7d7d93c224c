"""Arguments that a user gives a parameter server, and what is meant by them."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commlib.runtime.layers import refuse_sparse
from commlib.server.job.staleness import Consistency
from commlib.server.job.worker_groups import Topology
from commlib.server.storage.snapshot_policy import Snapshots
from commlib.server.worker.sync_policy import SyncPolicy


def check_model(model: nn.Module) -> None:
    """That nobody else exchanges its gradients, and that they are dense.

    Raises:
        TypeError: DDP exchanges them.
        ValueError: an embedding has ``sparse=True``.
    """
    if isinstance(model, DistributedDataParallel):
        raise TypeError("the model is wrapped in DDP, which would average gradients too: give the module that it wraps")
    refuse_sparse(model, "a parameter server")


def check_background(background: bool, rhythm: SyncPolicy, scaler: Any) -> None:
    """That gradients and values can be moved in the background.

    Raises:
        ValueError: gradients add up in the host's memory first; or a scaler must have been asked before they leave.
    """
    if background and rhythm.accrues:
        raise ValueError("background=True is for rules that push in every step: here gradients add up on the host")
    if background and scaler is not None:
        raise ValueError("background=True moves gradients as they are: leave scaler out, or background")


def check_groups(rule: Consistency, *, late: bool, snapshots: bool) -> None:
    """That groups can be had (:class:`commlib.Topology`).

    Raises:
        ValueError: a latecomer, which has no group; or snapshots of several groups of servers, which never are at rest.
    """
    if late and isinstance(rule, Topology):
        raise ValueError(f"{rule} says who is in which group, so nobody can come late: leave late=True out")
    if snapshots and rule.server_groups > 1:
        raise ValueError(f"{rule} has {rule.server_groups} groups of servers, which save no snapshots: one group does")


def count(given: str, servers: str) -> int:
    """Shards of ``embedded:N``.

    Raises:
        ValueError: there is none such.
    """
    if not given.isdigit() or int(given) < 1:
        raise ValueError(f"servers is 'embedded', 'embedded:N' or 'HOST:PORT', got {servers!r}")
    return int(given)


def saved(folder: str | None, every: int, restore: bool, kind: str) -> Snapshots | None:
    """Where embedded shards save their state.

    Raises:
        ValueError: there is nothing to restore from, or the shards are no embedded ones.
    """
    if restore and folder is None:
        raise ValueError("restore=True needs snapshots: the folder that they are in")
    if folder is not None and kind != "embedded":
        raise ValueError("snapshots are the shards' to save, and these are elsewhere: commlib server run --snapshots")
    return Snapshots(folder, every, restore) if folder is not None else None


def world_of(workers: int | None, rank: int | None, group: Any = None) -> tuple[int, int]:
    """How many workers begin, and which of them this is: as given, or the process group's, or torchrun's.

    Args:
        workers, rank: as given, or None.
        group: process group of the workers; None: of all ranks, if there is one.

    Raises:
        ValueError: a rank that is none of these.
    """
    grouped = dist.is_available() and dist.is_initialized()
    size = workers or (dist.get_world_size(group) if grouped else int(os.environ.get("WORLD_SIZE", "1")))
    mine = rank if rank is not None else dist.get_rank(group) if grouped else int(os.environ.get("RANK", "0"))
    if not 0 <= mine < size:
        raise ValueError(f"this is worker {mine} of {size}: ranks are 0 to {size - 1}")
    return size, mine
