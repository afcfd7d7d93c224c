"""``push_pull``: to servers, which add up what all ranks push, and back (Poseidon, USENIX ATC 2017, section 3).

Every rank sends its gradient once and gets the sum once, where a ring sends and gets 2(P − 1)/P of it: up to twice as
fast, where the servers have links of their own and are enough (BytePS, OSDI 2020; :mod:`commlib.planning.cost.volume`
has the figures).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commlib.codecs.base import Compressor, LayerSpec
from commlib.exchange.base import Exchange
from commlib.exchange.collectives import Among, Collective, PushPull, Rounds
from commlib.exchange.layer_task import LayerTask
from commlib.groups.world import World
from commlib.messaging.frame import DTYPES


class PushPullExchange(Exchange):
    """Push of gradients to parameter servers, and pull of the sums."""

    name = "push_pull"
    ROUNDS = 1

    def refuse(self, codec: Compressor, spec: LayerSpec) -> str | None:
        """Only gradients as they are: servers add up values, and know no codec."""
        if not codec.lossless:
            return "servers add up gradients as they are (none)"
        if str(spec.dtype).removeprefix("torch.") not in DTYPES:
            return f"no message carries {spec.dtype}"
        return None

    def wire_bytes(self, codec: Compressor, spec: LayerSpec, world: int) -> float:
        """Bytes a rank sends a step: the gradient, however many ranks there are."""
        return float(spec.nbytes)

    def rounds(self, items: Sequence[LayerTask], world: World, buffer: Tensor | None) -> Rounds:
        """Divide by P, push; what comes is the mean.

        Divided *before* the sum, as DDP does: so a sum of finite values is finite, and between two ranks the mean is
        DDP's to the last bit. What is pushed is a copy, for the bucket is where the mean goes.
        """
        calls: list[Collective] = []
        for item in items:
            with item.meter.phase("compress"):
                grad = item.grad.view(-1)
                own = item.arena.empty(grad.shape, grad.dtype, torch.device("cpu"))
                if grad.is_cpu:
                    torch.mul(grad, 1 / world.size, out=own)  # DDP's own operation: a division rounds differently
                else:
                    own.copy_(grad).mul_(1 / world.size)
            calls.append(Among("servers", PushPull(item.spec.name, grad, own, [(item.meter, own.nbytes)])))
        yield calls
