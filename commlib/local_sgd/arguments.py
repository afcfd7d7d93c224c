"""What local steps are asked to do, checked before anybody waits."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commlib.ddp.state import HookState
from commlib.local_sgd.outer_optimizers import Rule
from commlib.local_sgd.sync_schedule import Pace


def apart(model: nn.Module, state: HookState, ranks: int) -> int:
    """How many take steps of their own: ranks; or nodes, if each is one DDP."""
    if not isinstance(model, DistributedDataParallel):
        return ranks
    levels, together = state._levels, dist.get_process_group_ranks(model.process_group)
    if levels is None or len(together) != len(levels.local_ranks):
        size = 1 if levels is None else len(levels.local_ranks)
        raise ValueError(f"a node has {size} rank(s), and DDP has {len(together)}: give it a process group of a node's")
    return levels.inter.size


def check_delay(pace: Pace, fragments: int, delay: int, mix: float, rule: Rule) -> None:
    if not 0 <= delay < pace.tau:
        raise ValueError(f"delay is 0 steps or more, and less than tau={pace.tau}, got {delay}")
    if not 0 <= mix < 1:
        raise ValueError(f"mix must be in [0, 1), got {mix}")
    if pace.auto and (delay or fragments > 1):
        raise ValueError("tau=auto measures meetings of the whole model: fragments and delay need a number of steps")
    if rule.apart and delay:
        raise ValueError(f"{rule.name} keeps ranks apart by itself: it has no delay")
