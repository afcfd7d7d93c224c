"""The raw line between two ranks of the default process group."""

from __future__ import annotations

import torch.distributed as dist

from commlib.groups.handshake import store_of
from commlib.groups.world import World
from commlib.messaging.network import network
from commlib.messaging.throughput import Stream, measure


def measure_line(seconds: float = 0.3) -> Stream | None:
    """The line between two hosts (:func:`commlib.messaging.throughput.measure`), over the interface that the backend
    uses.

    So it is the same under Gloo and NCCL.

    Returns:
        None in a group of one rank.

    Raises:
        ValueError, PeerLost: as there.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return measure(None, "", World(rank, size), "", seconds)
    store = store_of(dist.group.WORLD)
    key = f"commlib/line/{store.add(f'commlib/line/count/{rank}', 1)}"
    return measure(store, key, World(rank, size), own_address(), seconds)


def own_address() -> str:
    """The IPv4 address the backend's sockets have on this machine (Gloo's choice, else NCCL's, else the loopback)."""
    found = network()
    for name in (found["gloo"], found["nccl"]):
        for address in found["interfaces"][name]["addresses"] if name in found["interfaces"] and name else []:
            if ":" not in address:
                return address
    return "127.0.0.1"
