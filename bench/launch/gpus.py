"""Which GPU a rank of a benchmark has, and how several ranks share one over NCCL.

NCCL refuses two ranks of one host on one GPU. It takes ``NCCL_HOSTID`` for the host, so ranks that share a GPU are
given one each: then they are hosts of their own, and what they send goes by sockets, on this machine's loopback or, in
a lab of emulated hosts, on their links. So one GPU is enough to train over NCCL on slow links.
"""

from __future__ import annotations

import os
import socket

import torch

HOST = "NCCL_HOSTID"


def visible() -> int:
    """Number of GPUs that PyTorch sees here."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def take_gpu() -> torch.device:
    """The GPU of this rank, by torchrun's environment, made the current one; ranks take turns if there are too few.

    Called before the first process group: NCCL reads where a rank is when it makes one.
    """
    local, here = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = visible()
    if here > gpus:
        os.environ[HOST] = f"{os.environ.get(HOST) or socket.gethostname()}-{local}"
    device = torch.device("cuda", local % gpus)
    torch.cuda.set_device(device)
    return device
