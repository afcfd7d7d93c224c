"""How good a model is on a task's test set.

Are all replicas the same, bit for bit?
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from commlib.errors import CommlibError

from .tasks import Task, cross_entropy

_ROWS = 256  # examples per forward pass


@torch.no_grad()
def evaluate(
    model: nn.Module, task: Task, autocast: Callable[[], AbstractContextManager[object]]
) -> tuple[float, float]:
    """(mean loss in nats, accuracy in percent); each rank takes every ranks-th example. Collective.

    Args:
        model: the same on every rank, on the device of the task's data.
        task: whose test set is used.
        autocast: the context the model is called in.
    """
    x, y = (t[dist.get_rank() :: dist.get_world_size()] for t in task.test)
    loss_sum = hits = torch.zeros((), dtype=torch.float64, device=y.device)
    model.eval()
    for u, v in zip(torch.split(x, _ROWS), torch.split(y, _ROWS), strict=True):
        with autocast():
            logits: Tensor = model(u)
        loss_sum = loss_sum + cross_entropy(logits, v).double() * v.numel()
        hits = hits + (logits.argmax(-1) == v).sum()
    model.train()
    sums = torch.stack([loss_sum, hits])
    dist.all_reduce(sums)
    n = task.test[1].numel()
    return sums[0].item() / n, 100.0 * sums[1].item() / n


@torch.no_grad()
def accuracy(model: nn.Module, task: Task, rows: int) -> float:
    """Accuracy in percent, of the first so many test examples; of this rank alone."""
    x, y = (t[:rows] for t in task.test)
    model.eval()
    hits = int((model(x).argmax(-1) == y).sum())
    model.train()
    return 100.0 * hits / len(y)


class ReplicasDiffer(CommlibError):
    """The ranks of a data-parallel run hold different weights: its result means nothing."""


def digest(model: nn.Module) -> bytes:
    """SHA-256 (32 bytes) over the names, shapes and bits of all parameters and buffers."""
    h = hashlib.sha256()
    for name, t in model.state_dict().items():
        h.update(f"{name}{tuple(t.shape)}{t.dtype}".encode())
        h.update(t.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return h.digest()


def check_replicas(model: nn.Module, device: torch.device, label: str) -> str:
    """The digest all ranks agree on, as hex. Collective.

    Args:
        label: what was trained, for the message.

    Raises:
        ReplicasDiffer: on every rank, naming the ranks that hold the same weights.
    """
    mine = torch.frombuffer(bytearray(digest(model)), dtype=torch.uint8).to(device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    groups: dict[str, list[int]] = {}
    for rank, d in enumerate(every):
        groups.setdefault(bytes(d.cpu().tolist()).hex(), []).append(rank)
    if len(groups) > 1:
        sets = "; ".join(f"{h[:12]} on rank {', '.join(map(str, ranks))}" for h, ranks in groups.items())
        raise ReplicasDiffer(f"after training with {label!r} the replicas differ: {sets}")
    return next(iter(groups))
