"""``attach``: the one line on a DDP training loop."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commlib.handshake import publish_absence
from commlib.hook import HookState, hook
from commlib.model import check_ddp
from commlib.policy import Exact, Policy
from commlib.route import Plan, Rules

_EXACT = Exact()


def attach(ddp: DistributedDataParallel, compressor: Rules | Policy | Plan = _EXACT, **options: Any) -> HookState:
    """Compresses the gradient exchange of a DDP model from now on. Collective.

    Args:
        ddp: a DistributedDataParallel without a communication hook.
        compressor: see :class:`HookState`. By default commlib chooses, layer by layer, the fastest route that loses
            nothing on this link; ``"none"`` is dense throughout, and equals plain DDP bit for bit.
        **options: those of :class:`HookState`.

    Returns:
        The hook's state: ``plan``, ``stats()``, ``state_dict()``, ``load_state_dict()``.

    Raises:
        TypeError: not a DDP model.
        ValueError: a hook is registered already; and whatever :class:`HookState` raises.
    """
    try:
        check_ddp(ddp)
    except (TypeError, ValueError) as e:
        publish_absence(getattr(ddp, "process_group", options.get("process_group") or dist.group.WORLD), e)
        raise
    state = HookState(ddp, compressor, **options)
    ddp.register_comm_hook(state, hook)
    return state
