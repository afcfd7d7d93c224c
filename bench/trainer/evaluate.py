"""How good a model is on a task's test set."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn

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
    """In percent, of the first so many test examples; of this rank alone."""
    x, y = (t[:rows] for t in task.test)
    model.eval()
    hits = int((model(x).argmax(-1) == y).sum())
    model.train()
    return 100.0 * hits / len(y)
