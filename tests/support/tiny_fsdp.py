"""A small FSDP2 training that tests look at closely."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import commlib
from commlib.groups.world import World


class Network(nn.Module):
    """33 → 29 → 18 → 5, with a layer that is used in odd steps only; nothing divides evenly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1234)
        self.first, self.second, self.last = nn.Linear(33, 29), nn.Linear(29, 18), nn.Linear(18, 5)
        self.sometimes = nn.Linear(18, 5)

    def forward(self, x: Tensor, more: bool = False) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(x))))
        out: Tensor = self.last(hidden)
        return out + self.sometimes(hidden) if more else out


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """(8, 33) inputs and (8,) classes; different on every rank and at every step."""
    gen = torch.Generator().manual_seed(7919 * step + rank)
    return torch.randn(8, 33, generator=gen), torch.randint(5, (8,), generator=gen)


class ShardedTrainer:
    """FSDP2 of two units, SGD with momentum, and commlib unless ``rule`` is None.

    Args:
        world: this rank.
        rule: what is attached.
        replicas: over how many the model is replicated (HSDP); 1: it is only sharded.
        scaler: used for the loss, and told to commlib.
        policy: of mixed precision.
        more: whether a step uses the layer that is used sometimes.
        shard: options of ``fully_shard``.
        wrap: ``fully_shard``, or ``replicate``.
        **options: of ``attach``; by default no layer is too small to compress.
    """

    def __init__(
        self,
        world: World,
        rule: Any,
        *,
        replicas: int = 1,
        scaler: torch.amp.GradScaler | None = None,
        policy: MixedPrecisionPolicy | None = None,
        more: Callable[[int], bool] = lambda step: False,
        shard: dict[str, Any] | None = None,
        wrap: Callable[..., Any] = fully_shard,
        **options: Any,
    ) -> None:
        self.world, self.scaler, self.more, self.step = world, scaler, more, 0
        self.model: Any = Network()
        shape = (world.size,) if replicas == 1 else (replicas, world.size // replicas)
        names = ("replicas", "shards")[-len(shape) :]
        given = {
            "mesh": init_device_mesh("cpu", shape, mesh_dim_names=names),
            "mp_policy": policy or MixedPrecisionPolicy(),
            **(shard or {}),
        }
        wrap(self.model.second, **given)
        wrap(self.model, **given)
        self.comm: Any = None
        if rule is not None:
            self.comm = commlib.attach(self.model, rule, **{"min_size": 0, "scaler": scaler, **options})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def train(self, steps: int, spoil: dict[int, float] | None = None) -> list[float]:
        """Trains; skips steps that are not finite. Returns the losses of this rank.

        Args:
            steps: how many.
            spoil: step → what the last rank's loss is multiplied with.
        """
        losses = []
        for _ in range(steps):
            x, y = batch(self.world.rank, self.step)
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(x, self.more(self.step)).float(), y)
            if spoil and self.step in spoil and self.world.rank == self.world.size - 1:
                loss = loss * spoil[self.step]
            (self.scaler.scale(loss) if self.scaler else loss).backward()
            losses.append(float(loss.detach()))
            if self.scaler:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            elif self.finite():
                self.optimizer.step()
            self.step += 1
        return losses

    def finite(self) -> bool:
        """Whether all ranks' parts of all gradients are."""
        own = torch.tensor([all(bool(g.isfinite().all()) for g in self.gradients())], dtype=torch.int32)
        dist.all_reduce(own, dist.ReduceOp.MIN)
        return bool(own.item())

    def gradients(self) -> list[Tensor]:
        """This rank's parts."""
        return [p.grad.to_local() for p in self.model.parameters() if p.grad is not None]

    def weights(self) -> Tensor:
        """All parameters, whole and flat."""
        self.model.reshard()  # after a forward pass alone the root is not
        return torch.cat([p.full_tensor().detach().reshape(-1) for p in self.model.parameters()])

    def close(self) -> None:
        """Ends commlib's threads."""
        if self.comm is not None:
            self.comm.close()
