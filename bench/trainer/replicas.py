"""Are all replicas the same, bit for bit?"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import nn

from commlib.errors import CommlibError


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
