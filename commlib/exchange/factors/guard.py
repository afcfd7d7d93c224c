"""Guard of a tapped layer: whether the gradient of a call is made of its rows, and of nothing else.

The rows that :mod:`commlib.exchange.factors.tap` catches stand for what autograd adds to the parameters only where the
layer is plain: ``y = x·Wᵀ + b`` with the registered parameters themselves, with nobody looking at their local gradient.
Whatever is not known to be so is no error: such a call computes its gradient as any other layer does.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from commlib.runtime.autograd import others_post_accumulate

HookTable = Callable[[], "Mapping[int, object] | None"]
"""Weak reference to a table of hooks, which its node keeps."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Of rows that can travel."""


def call_refusal(x: Tensor, module: nn.Linear, leaves: Sequence[nn.Parameter]) -> str:
    """Why a call's gradient has to be computed as usual; empty if its rows can stand for it.

    Args:
        x: input of the call.
        module: the layer.
        leaves: its weight, and its bias if it has one, as DDP knows them.
    """
    weight, *bias = leaves
    if module.weight is not weight or (module.bias is not bias[0] if bias else module.bias is not None):
        return "it is called with another weight or bias than its own (functional_call, or one assigned later)"
    if reason := _transform() or parameter_refusal(leaves):
        return reason
    if type(x) not in (Tensor, nn.Parameter) or x.layout is not torch.strided or x.is_nested:
        return f"its input is no plain tensor ({type(x).__name__}, {x.layout})"
    kind = x.device.type
    cast = torch.is_autocast_enabled(kind)
    if x.device != weight.device or (x.dtype != weight.dtype and not cast):
        return f"its input is {x.dtype} on {x.device}, its weight {weight.dtype} on {weight.device}"
    if (torch.get_autocast_dtype(kind) if cast else x.dtype) not in DTYPES:
        return f"rows of {x.dtype} cannot travel"
    return ""


def called_by_another(ddp: object) -> bool:
    """Whether a call is within the forward pass of another DDP model than this one, which a shallow copy of it is."""
    active = DistributedDataParallel._active_ddp_module
    return active is not None and active is not ddp


def parameter_refusal(leaves: Sequence[nn.Parameter]) -> str:
    """Why the local gradient of these parameters must exist at this moment; empty if nobody would miss it."""
    for p in leaves:
        if not p.requires_grad:
            return "it is called while a parameter of it is frozen"
        if not p.is_contiguous() or p.layout is not torch.strided:
            return "a parameter of it is not contiguous in memory"
        if watched(p):
            return "a hook sees the local gradient of a parameter"
    return ""


def may_be_called_again() -> bool:
    """Whether a call that is made now may be made once more in the backward pass, as checkpoints do."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # nobody knows in torch 2.7
    return top is None or top(False) is not None


def watched(p: Any) -> bool:
    """Whether a hook on a parameter, other than the tap's, sees and may change its local gradient."""
    return len(p._backward_hooks or ()) > 1 or others_post_accumulate(p) or hasattr(p, "_in_backward_optimizers")


def node_hooks(p: nn.Parameter) -> list[HookTable]:
    """Tables of the hooks on the node that accumulates a parameter's gradient: before it and after it.

    PyTorch does not list these hooks. But all hooks of a node are in one table, to which whoever registers one has a
    reference: so one is registered here and taken away again.
    """
    node: Any = torch.autograd.graph.get_gradient_edge(p).node
    handles = [node.register_prehook(_no_hook), node.register_hook(_no_hook)]
    for handle in handles:
        handle.remove()
    return [handle.hooks_dict_ref for handle in handles]


_MARK = "commlib"


def mark_node(p: nn.Parameter) -> object:
    """Mark of the node that accumulates a parameter's gradient; the same again if it has one.

    ``p.data = …`` with values of another type gives the parameter another node, of which DDP does not know.
    """
    return _metadata(p).setdefault(_MARK, object())


def marked(p: nn.Parameter) -> object:
    """Mark of the node that a parameter has now; None if it has none."""
    return _metadata(p).get(_MARK)


def _metadata(p: nn.Parameter) -> dict[str, object]:
    node: Any = torch.autograd.graph.get_gradient_edge(p).node
    found: dict[str, object] = node.metadata
    return found


def _no_hook(*_: object) -> None:
    """Hook that is never called."""


def _transform() -> str:
    """The transform that a call is under, which does not see through the tap's own autograd function."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "it is called under torch.func (vmap, grad, functionalize)"
    if forward_ad._current_level >= 0:
        return "it is called under forward-mode differentiation"
    if torch._C._get_tracing_state() is not None:
        return "it is being traced"
    modes: list[object] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    if any(not isinstance(mode, DeviceContext) for mode in modes):
        return "it is called under a TorchFunctionMode"
    return ""


def sharing(ddp: DistributedDataParallel, parameters: Sequence[nn.Parameter]) -> set[int]:
    """``id`` of each of these parameters that another DDP model reduces, too: it would miss the local gradient."""
    _look_around()
    mine = {id(p) for p in parameters}
    for again in (False, True):
        if again:
            gc.collect()  # what was found may be a model that nothing refers to any more
        found = {id(p) for other in list(_models) if other is not ddp for p in other.parameters() if id(p) in mine}
        if not found:
            break
    return found


_models: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
_registered = 0


def ddp_models_made() -> int:
    """Number of DDP models that have been made: when it is another, :func:`sharing` may be, too."""
    return _registered


def _register(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    global _registered
    if isinstance(module, DistributedDataParallel):
        _models.add(module)
        _registered += 1


register_module_module_registration_hook(_register)  # as DDP registers what it wraps


@functools.cache
def _look_around() -> None:
    """Register DDP models that were made before this module was imported.

    It is done once: to look through all objects takes a tenth of a second for 300,000 of them.
    """
    _models.update(x for x in gc.get_objects() if DistributedDataParallel in type(x).__mro__)
