"""``attach``: the one line on a DDP training loop."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commlib.door import check_free
from commlib.handshake import publish_absence
from commlib.hook import HookState
from commlib.policy import Exact, Policy
from commlib.route import Plan, Rules

_EXACT = Exact()


def attach(ddp: DistributedDataParallel, compressor: Rules | Policy | Plan = _EXACT, **options: Any) -> HookState:
    """Compresses the gradient exchange of a DDP model from now on. Collective.

    Args:
        ddp: a DistributedDataParallel without a communication hook, or one that was detached.
        compressor: see :class:`HookState`. By default commlib chooses, layer by layer, the fastest route that loses
            nothing on this link; ``"none"`` is dense throughout, and equals plain DDP bit for bit.
        **options: those of :class:`HookState`.

    Returns:
        The hook's state: ``plan``, ``stats()``, ``trace()``, ``state_dict()``, ``load_state_dict()``.

    Raises:
        TypeError: not a DDP model.
        ValueError: commlib is attached already, or a hook of somebody else is registered; and whatever
            :class:`HookState` raises.
    """
    try:
        check_free(ddp)
    except (TypeError, ValueError) as e:
        publish_absence(getattr(ddp, "process_group", options.get("process_group") or dist.group.WORLD), e)
        raise
    state = HookState(ddp, compressor, **options)
    state.follow(ddp)
    return state
