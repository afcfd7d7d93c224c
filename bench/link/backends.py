"""Which torch.distributed backends can be measured here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from commlib.errors import unknown

_NOTHING = ("undefined", "fake")  # torch's own names for none, and for one that moves no bytes


def known() -> list[str]:
    """Every backend this process could make a group of: those built into torch and those registered with it."""
    return [b for b in dist.Backend.backend_list if b not in _NOTHING and dist.is_backend_available(b)]


def choose(names: Sequence[str], ranks_here: int) -> tuple[str, ...]:
    """The backends asked for, or by default those that work without a question: Gloo; NCCL with a GPU a rank.

    Args:
        names: as given; empty for the default.
        ranks_here: ranks on this machine.

    Raises:
        ValueError: a name that is not known, or NCCL without the GPUs.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    there = known()
    for name in names:
        if name not in there:
            raise ValueError(unknown("backend", name, there))
        if name == "nccl" and gpus < ranks_here:
            raise ValueError(f"backend nccl needs a GPU for each of {ranks_here} ranks here, and torch sees {gpus}")
    if names:
        return tuple(dict.fromkeys(names))
    enough = {"gloo": True, "nccl": gpus >= ranks_here}
    return tuple(name for name in there if enough.get(name, False))
