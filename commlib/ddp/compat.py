"""Compatibility of what else people put on a DDP model: DDP features that have the hook, hooks that see gradients too
early."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commlib.runtime.autograd import others_post_accumulate
from commlib.runtime.layers import all_parameters, inside, plain_name

_WRAP_ANEW = "wrap the model in a new DistributedDataParallel"
_ZERO = "it is that of ZeroRedundancyOptimizer with overlap_with_ddp=True; make that optimizer without it"
_OWN_HOOKS = {
    "_reducer_allreduce_and_upcast_hook": (
        "it is that of DDP's mixed_precision=; use torch.autocast, or a model in bfloat16"
    ),
    "apply_optim_in_backward_hook": (
        "it is that of an optimizer in the backward pass (_apply_optimizer_in_backward); step after the backward pass"
    ),
    "hook_then_optimizer_wrapper": "it is that of _register_fused_optim; step after the backward pass",
    "hook_with_zero_fn": _ZERO,
    "hook_with_zero_interleaved_fn": _ZERO,
}


class CommHooks(list[tuple[Any, Any]]):
    """A DDP model's own list of communication hooks; a copy of the model, or a pickle, has an empty list.

    The reducer of a copy is new and has no hook. So a copy is plain DDP, and is loaded where commlib is not installed.
    """

    def __reduce__(self) -> Any:
        return list, ()


class CopiedState:
    """State of a copy of a DDP model, in place of the hook's: its reducer, which is new, has no hook."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"this came with a copy of a DDP model, and has no {name}: a copy is plain; attach to it")


def nobody() -> CopiedState:
    """Make the state of a copy or pickle."""
    return CopiedState()


def advice(hook: str) -> str:
    """Advice about a communication hook that is there already.

    Args:
        hook: its qualified name.
    """
    return next((f"{what}, and {_WRAP_ANEW}" for name, what in _OWN_HOOKS.items() if hook.endswith(name)), _WRAP_ANEW)


def check_beside(module: nn.Module) -> None:
    """Looks for what does not go with a communication hook, and what does not see what it leaves.

    Args:
        module: the DDP model, or the one inside.

    Raises:
        ValueError: DDP was made for the Python reducer or its own mixed precision; an optimizer steps within the
            backward pass.

    Warns:
        UserWarning: a parameter has a hook that sees this rank's gradient alone.
    """
    if isinstance(module, DistributedDataParallel):
        _check_ddp(module)
    parameters: dict[str, Any] = {plain_name(n): p for n, p in all_parameters(inside(module)).items()}
    stepped = [name for name, p in parameters.items() if getattr(p, "_in_backward_optimizers", None)]
    if stepped:
        raise ValueError(
            f"{_some(stepped)} an optimizer in the backward pass (_apply_optimizer_in_backward), which DDP runs in a "
            "communication hook of its own, and there can be one: step after the backward pass"
        )
    early = [name for name, p in parameters.items() if others_post_accumulate(p)]
    if early:
        warnings.warn(
            f"{_some(early)} a post-accumulate hook: it runs before the exchange and sees this rank's gradient. An "
            "optimizer that steps there makes replicas different, with plain DDP too",
            stacklevel=2,
        )


def _check_ddp(ddp: DistributedDataParallel) -> None:
    if getattr(ddp, "_use_python_reducer", False):
        raise ValueError(
            "DDP was made with torch._dynamo.config.optimize_ddp='python_reducer', which has no buckets and gives a "
            "communication hook nothing to exchange: make it with another value, as True (the default) or False"
        )
    if ddp.mixed_precision is not None:
        own = "_reducer_allreduce_and_upcast_hook"
        raise ValueError(f"this DDP model has a communication hook of its own ({own}): {advice(own)}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 1} more parameters have" if len(names) > 1 else " has"
    return names[0] + more


def builtin_hook(ddp: DistributedDataParallel) -> str:
    """The communication hook in C++ that a model has (``_register_builtin_comm_hook``); empty if it has none."""
    told: Any = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    return str(told.get("comm_hook", "")) if not ddp._comm_hooks else ""


def check_ddp(ddp: Any) -> None:
    """Raises TypeError if it is no DDP model, ValueError if it has a communication hook already."""
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            f"commlib.attach needs a torch.nn.parallel.DistributedDataParallel, got {type(ddp).__name__}: "
            "wrap the model first, ddp = DistributedDataParallel(model)"
        )
    hooks = [hook for hook, state in getattr(ddp, "_comm_hooks", ()) if not isinstance(state, CopiedState)]
    name = getattr(hooks[0], "__qualname__", "unknown") if hooks else builtin_hook(ddp)
    if name:
        raise ValueError(
            f"this DDP model already has a communication hook ({name}); PyTorch allows one for its lifetime: "
            + advice(name)
        )
