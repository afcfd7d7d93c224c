"""Where the rows of a linear layer's gradient are caught: in the backward pass, before its weight gradient exists.

y = x·Wᵀ + b has dW = VᵀU with U the input rows (K, M) and V the rows of the output's gradient (K, N), and db is the
sum of V's rows. A tapped layer computes neither: autograd gets none, so that DDP's bucket becomes ready as always with
zeros, and the exchange writes the mean gradient into it. Where somebody may see what autograd gets (within ``no_sync``,
or by a hook on a parameter) it is the layer's own gradient.
"""

from __future__ import annotations

import copyreg
import functools
import logging
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from commlib.exchange.factors.guard import (
    HookTable,
    call_refusal,
    called_by_another,
    mark_node,
    marked,
    may_be_called_again,
    node_hooks,
    parameter_refusal,
)
from commlib.exchange.factors.retained import RetainedInput, has_gradient
from commlib.runtime.autograd import at_end_of_backward, untraced

_BREAK = (
    "commlib catches this layer's rows in Python, by its route: for a graph without this break give it another, "
    'as commlib.attach(ddp, "none")'
)
_UNKNOWN = "DDP waits for no gradient of it: it was frozen when DDP was made, or moved to another dtype or device since"
_log = logging.getLogger("commlib")
Rows = tuple[Tensor, Tensor]
"""(K, M) inputs and (K, N) output gradients, in one dtype."""
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, None]
"""Of a layer's bias, input and weight, and none of its tap."""


class TapOwner(Protocol):
    """Owner of the taps, which knows what step it is."""

    @property
    def ddp(self) -> nn.Module | None:
        """The DDP model whose exchange this is."""

    def on(self, name: str) -> bool:
        """Whether this layer's factors are exchanged in the step under way; if not, it is as good as a plain one."""

    def watching(self) -> bool:
        """Whether somebody wants to know when rows come."""

    def sighted(self, name: str, rows: int) -> None:
        """So many rows of a layer have come; its weight gradient has not been computed yet."""

    def syncing(self) -> bool:
        """Whether this backward pass ends with an exchange (and not within ``no_sync``)."""

    def none_is_unused(self) -> bool:
        """Whether DDP takes a parameter that gets no gradient for one that no rank has used, and leaves it without."""

    def complete(self, name: str) -> None:
        """All rows of the layer have come."""


class Tap:
    """Tap of one layer: the rows that were caught between two exchanges.

    A layer is tapped while the DDP model's passes are under way, from :meth:`put` to :meth:`remove`: between two steps
    the model is made of ordinary modules. What is copied or pickled meanwhile is ordinary, too.

    Args:
        name: the layer's.
        module: a plain ``nn.Linear``.
        owner: is asked, and told.
        traced: whether ``torch.compile`` gets to see a plain layer.

    Attributes:
        foreign: whether gradient has reached a parameter that is not of these rows.
        barred: why nothing is ever caught, as where another DDP model reduces a parameter of it; empty if it may be.
        again: whether a call may be made once more in the backward pass (activation checkpointing).
        proving: whether autograd gets the true gradient in this step, though rows leave: so both can be compared.
        why: why a call was not caught, or why there was other gradient; the last reason, empty if there was none.
    """

    def __init__(self, name: str, module: nn.Linear, owner: TapOwner, *, traced: bool = False) -> None:
        self.name, self.module, self.traced = name, module, traced
        self.foreign = self.retired = self.again = self.proving = False
        self.barred = self.why = self._refused = ""
        self.leaves: list[nn.Parameter] = [p for p in module._parameters.values() if p is not None]  # the weight first
        self._owner = owner
        self._rows: list[Rows] = []
        self._calls = 0
        self._hidden = False  # called without grad while training: a checkpoint, which calls again later
        self._zeros = {p.dtype: torch.zeros((), dtype=p.dtype, device=p.device) for p in self.leaves}
        self._given = False  # autograd has a placeholder for this layer's parameters already, in this step
        self._hooks: list[Any] = []
        self._node_hooks: list[HookTable] = []
        self._nodes: list[object] = []  # marks on the nodes that DDP knows
        self._kept = RetainedInput(self.leaves)
        self._own: dict[int, list[Tensor]] = {}  # products of the rows, where it is proving; by parameter
        self.grad_is_rows = False  # what grad has already is made of the rows that are kept
        self.untraced, self.backward = untraced(Tap.forward, _BREAK), untraced(_backward)

    def enable(self) -> None:
        """Look at all gradient of the layer's parameters; more than once does no harm."""
        if not self._hooks:
            self._node_hooks = [table for p in self.leaves for table in node_hooks(p)]
            self._nodes = [mark_node(p) for p in self.leaves]
            watch, parameters = untraced(Tap._watch), list[Any](self.leaves)
            self._hooks = [p.register_hook(functools.partial(watch, self, i)) for i, p in enumerate(parameters)]

    def disable(self) -> None:
        """Leave the layer and its parameters as they were; more than once does no harm."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.remove()

    def node_watched(self) -> bool:
        """Whether a hook on the node that accumulates a parameter's gradient sees and may change it."""
        return any(table() for table in self._node_hooks)

    def _replaced(self) -> bool:
        """Whether a parameter has another node than the one that DDP waits for."""
        return any(marked(p) is not mark for p, mark in zip(self.leaves, self._nodes, strict=True))

    @property
    def enabled(self) -> bool:
        """Whether it looks at the layer's parameters."""
        return bool(self._hooks)

    def put(self) -> None:
        """Catch what the layer is called with. More than once does no harm, nor if it is no ``nn.Linear`` any more."""
        if type(self.module) is nn.Linear:
            vars(self.module)["_tap"] = self
            swapped: Any = self.module
            swapped.__class__ = _Tapped

    def remove(self) -> None:
        """Make the layer ordinary again; more than once does no harm."""
        tapped: Any = self.module
        if vars(tapped).get("_tap") is self:
            del vars(tapped)["_tap"]
            tapped.__class__ = nn.Linear

    def retire(self) -> None:
        """Make the layer ordinary for good, between two exchanges: rows that are kept are in ``grad``, and go as that.

        What passed forward before, and comes back only now, has an ordinary gradient.
        """
        self.retired = True
        self.disable()
        self.take()

    def take(self) -> list[Rows]:
        """Take what was caught; the tap is empty then."""
        if self._kept.waiting or self._kept.under_way:  # no row has left in this pass, and grad goes out as it is
            self._drop()
        rows, self._rows = self._rows, []
        self._kept.forget()
        self._own, self.grad_is_rows = {}, False
        self._calls, self._hidden = 0, False
        return rows

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        if not self.live(x):
            y = functional.linear(x, self.module.weight, self.module.bias)
            if not self._refused and y.requires_grad and self._owner.watching():
                y.register_hook(functools.partial(untraced(Tap.passed), self))  # type: ignore[no-untyped-call]
            return y
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        weight, bias = self.leaves[0], self.leaves[1] if len(self.leaves) > 1 else None
        traced: Any = _Linear.apply(bias, x, weight, self)  # type: ignore[no-untyped-call]
        return cast(Tensor, traced)

    def live(self, x: Tensor | None = None) -> bool:
        """Whether the rows of a call that is made now are to be caught in its backward pass; if so, it is counted.

        Args:
            x: the call's input; None if there is none, and only the layer is looked at.
        """
        self._refused = ""
        if not torch.is_grad_enabled():
            self._hidden |= self.module.training
            self.again |= self.module.training
            return False
        on = self._owner.on(self.name)
        if on or self._owner.watching():
            self._refused = self._refusal(x)
            self.why = self._refused or self.why
        if not on or self._refused:
            return False
        self.again |= may_be_called_again()
        self._calls += 1
        return True

    def _refusal(self, x: Tensor | None) -> str:
        """Why the rows of a call do not stand for its gradient; whatever goes wrong is a reason."""
        if self.barred:
            return self.barred
        if self.node_watched():
            return "a hook on the node that accumulates a parameter's gradient sees it"
        try:
            if called_by_another(self._owner.ddp):
                self.barred = "another DDP model calls it, too"  # so the rows of calls before it stay, too
                return self.barred
            found = parameter_refusal(self.leaves) if x is None else call_refusal(x, self.module, self.leaves)
            return found or (_UNKNOWN if self._replaced() else "")
        except Exception:
            _log.warning("layer %s goes as dense gradient: its call was not understood", self.name, exc_info=True)
            self.barred = "its call was not understood (see the warning)"
            return self.barred

    def passed(self, grad: Tensor | None) -> None:
        """The backward pass has come to a call that is not live; without a gradient if nothing used its output."""
        if grad is not None and not self.retired and self._owner.watching():
            self._owner.sighted(self.name, grad.numel() // grad.shape[-1])

    def caught(self, x: Tensor, grad: Tensor) -> tuple[bool, bool]:
        """The rows of one call, in the backward pass.

        Returns:
            Whether they leave, so that nobody needs their product here; whether they are kept beside it.
        """
        u, v = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        leave = self._owner.syncing()
        if self._owner.watching():
            self._owner.sighted(self.name, len(u))
        if self._kept.waiting:
            if not self._kept.untouched():
                self._drop()
            elif leave and self.proving:
                self.grad_is_rows = True
            elif leave:  # instead of what they made
                for p in self.leaves:
                    if p.grad is not None:
                        p.grad.zero_()
        if not leave:
            return False, self._keep(u, v)
        self._rows.append((u, v))
        self._if_complete()
        return True, False

    def unused(self) -> None:
        """The backward pass has come to a call whose output has no gradient."""
        self._calls -= 1
        if self._rows and self._owner.syncing():
            self._if_complete()

    def _if_complete(self) -> None:
        if len(self._rows) == self._calls and not self._hidden:
            self._owner.complete(self.name)

    def made(self, products: list[Tensor]) -> None:
        """The products of rows that are kept."""
        if not self._kept.under_way:
            at_end_of_backward(self._pass_ended)
        self._kept.made(products)

    def begin(self) -> None:
        """A forward pass of the model begins: a backward pass that is still under way has broken off."""
        self._given = False
        if self._kept.under_way:
            self._drop()
            self._kept.forget()

    def _keep(self, u: Tensor, v: Tensor) -> bool:
        """Keep rows beyond this pass, unless ``grad`` has something already that is not made of rows."""
        keep = bool(self._rows) or not has_gradient(self.leaves)
        if keep:
            self._rows.append((u.clone(), v.clone()))  # the input may be used again
        else:
            self._calls -= 1
        return keep

    def _pass_ended(self) -> None:
        if self._kept.under_way and not self._kept.end():
            self._drop()

    def _drop(self) -> None:
        """Give up what was caught: ``grad`` has it, or nobody wants it any more."""
        self._calls -= len(self._rows)
        self._rows = []

    def empty(self) -> bool:
        """Whether nothing was caught since :meth:`take`."""
        return not self._rows

    def placeholders(self) -> list[Tensor | None]:
        """Placeholders for autograd, by parameter: nothing; or, where that would mean that it was not used, zeros.

        The zeros take no memory, but autograd makes a ``grad`` of them that does. Of several calls only the first has
        them: their sum could not be told from gradient.
        """
        first, self._given = not self._given, True
        if not (first and self._owner.none_is_unused()):
            return [None] * len(self.leaves)
        return [self._zeros[p.dtype].expand(p.shape) for p in self.leaves]

    def _is_placeholder(self, grad: Tensor) -> bool:
        zero = self._zeros.get(grad.dtype)
        return zero is not None and grad.untyped_storage().data_ptr() == zero.untyped_storage().data_ptr()

    def _watch(self, index: int, grad: Tensor | None) -> None:
        """Sees all gradient of a parameter: what is not the placeholder came from elsewhere, as a penalty's does.

        Nobody reads its values: a device would have to be waited for.
        """
        if grad is None or self._kept.saw(index, grad):
            return
        if self.proving and self._owner.on(self.name):
            self._watch_product(index, grad)
            return
        if self._owner.on(self.name) and not self._is_placeholder(grad):
            self.foreign = True
            self.why = self.why or "gradient that is not of its rows has reached a parameter"

    def owns(self, products: list[Tensor]) -> None:
        """The products of rows that leave, which autograd gets too; in the order of the parameters."""
        for index, product in enumerate(products):
            self._own.setdefault(index, []).append(product)

    def _watch_product(self, index: int, grad: Tensor) -> None:
        """As :meth:`_watch`, where autograd gets products and not placeholders: sums of several are rounded."""
        own = self._own.pop(index, [])
        rest = grad - sum(own[1:], start=own[0]) if own else grad
        size = sum(float(x.abs().max()) for x in own if x.numel())
        if rest.numel() and not float(rest.abs().max()) <= 4 * len(own) * torch.finfo(grad.dtype).eps * size:
            self.foreign = True
            self.why = self.why or "gradient that is not of its rows has reached a parameter"


class _Linear(torch.autograd.Function):
    """``functional.linear`` whose backward pass hands the rows to a tap.

    The bias comes first, as there: gradients become ready in the order of the arguments, and DDP fills its buckets in
    that order. So a model has the same buckets with taps as without, during and after.
    """

    @staticmethod
    def forward(ctx: Any, bias: Tensor | None, x: Tensor, weight: Tensor, tap: Tap) -> Tensor:
        w = weight.to(x.dtype)
        ctx.save_for_backward(x, weight, w if w is not weight else None)
        ctx.set_materialize_grads(False)  # where DDP has no gradient, there is none here
        ctx.tap, ctx.has_bias = tap, bias is not None
        return functional.linear(x, w, None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Gradients:
        back: Gradients = ctx.tap.backward(ctx, grad)
        return back


def _backward(ctx: Any, grad: Tensor | None) -> Gradients:
    x, weight, w = ctx.saved_tensors
    tap: Tap = ctx.tap
    if grad is None:
        tap.unused()
        return None, None, None, None
    leave = kept = False
    if not (tap.retired or torch.is_grad_enabled()) and _accumulates(ctx, tap):
        leave, kept = tap.caught(x, grad)  # first: they travel while the next line is computed
    back = grad.matmul(weight.to(x.dtype) if w is None or not leave else w) if ctx.needs_input_grad[1] else None
    if leave and not tap.proving:
        zeros = tap.placeholders()
        return zeros[1] if ctx.has_bias else None, back, zeros[0], None
    flat = grad.reshape(-1, grad.shape[-1])
    own = (flat.t() @ x.reshape(-1, x.shape[-1])).to(weight.dtype)
    bias = flat.sum(0).to(weight.dtype) if ctx.has_bias else None
    products = [own] if bias is None else [own, bias]
    if kept:
        tap.made(products)
    elif leave:
        tap.owns(products)
    return bias, back, own, None


def _accumulates(ctx: Any, tap: Tap) -> bool:
    """Whether this backward pass adds to the weight's and bias's ``grad``, which nobody looks at before the exchange.

    It does not in ``torch.autograd.grad``, nor where somebody wants to differentiate what comes out. Then, and where a
    hook sees it, the gradient itself must be there.
    """
    nodes = [node for i, (node, _) in enumerate(ctx.next_functions) if i != int(ctx.has_bias)]  # not the input's
    if tap.barred or tap.node_watched() or parameter_refusal(tap.leaves) or len(nodes) != len(tap.leaves):
        return False
    for node, p in zip(nodes, reversed(tap.leaves), strict=True):
        if getattr(node, "variable", None) is not p:
            return False
    try:
        return all(torch._C._will_engine_execute_node(node) for node in nodes)
    except RuntimeError:  # they are what torch.autograd.grad was asked for
        return False


class _Tapped(nn.Linear):
    """An ``nn.Linear`` with a tap; its class is swapped, so its parameters, hooks and name stay what they were."""

    _tap: Tap

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and self._tap.traced:
            return functional.linear(input, self.weight, self.bias)
        return cast(Tensor, self._tap.untraced(self._tap, input))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy, or a pickle, is an ordinary layer, for which commlib need not be installed."""
        state = {k: v for k, v in vars(self).items() if k != "_tap"}
        return copyreg._reconstructor, (nn.Linear, object, None), state  # type: ignore[attr-defined]


_Tapped.__name__ = _Tapped.__qualname__ = "Linear"
