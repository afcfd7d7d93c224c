"""Where the rows of a linear layer's gradient are caught: in the backward pass, before its weight gradient exists.

y = x·Wᵀ + b has dW = VᵀU with U the input rows (K, M) and V the rows of the output's gradient (K, N), and db is the
sum of V's rows. A tapped layer computes neither: autograd gets a placeholder of zeros that takes no memory, so that
DDP's bucket becomes ready as always, and the exchange writes the mean gradient into it. Where somebody may see what
autograd gets (within ``no_sync``, or by a hook on a parameter) it is the layer's own gradient.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from commlib.exchange.factors.retained import RetainedInput, has_gradient
from commlib.runtime.autograd import at_end_of_backward, untraced

_BREAK = (
    "commlib catches this layer's rows in Python, by its route: for a graph without this break give it another, "
    'as commlib.attach(ddp, "none")'
)
Rows = tuple[Tensor, Tensor]
"""(K, M) inputs and (K, N) output gradients, in one dtype."""
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, None]
"""Of a layer's bias, input and weight, and none of its tap."""


class TapOwner(Protocol):
    """Owner of the taps, which knows what step it is."""

    def on(self, name: str) -> bool:
        """Whether this layer's factors are exchanged in the step under way; if not, it is as good as a plain one."""

    def watching(self) -> bool:
        """Whether somebody wants to know when rows come."""

    def sighted(self, name: str, rows: int) -> None:
        """So many rows of a layer have come; its weight gradient has not been computed yet."""

    def syncing(self) -> bool:
        """Whether this backward pass ends with an exchange (and not within ``no_sync``)."""

    def complete(self, name: str) -> None:
        """All rows of the layer have come."""


class Tap:
    """Tap of one layer: the rows that were caught between two exchanges.

    Args:
        name: the layer's.
        module: a plain ``nn.Linear``; tapped by :meth:`put`, and what is copied or pickled of it is plain again.
        owner: is asked, and told.
        traced: whether ``torch.compile`` gets to see a plain layer.
    """

    def __init__(self, name: str, module: nn.Linear, owner: TapOwner, *, traced: bool = False) -> None:
        self.name, self.module, self.traced = name, module, traced
        self.foreign = self.retired = False
        self._owner = owner
        self._rows: list[Rows] = []
        self._calls = 0
        self._hidden = False  # called without grad while training: a checkpoint, which calls again later
        self._zero = torch.zeros((), device=module.weight.device)
        self._hooks: list[Any] = []
        self._kept = RetainedInput(list(module.parameters()))
        self.untraced, self.backward = untraced(Tap.forward, _BREAK), untraced(_backward)

    def put(self) -> None:
        """Make the layer tapped; more than once does no harm."""
        if "_tap" in vars(self.module):
            return
        parameters: list[Any] = list(self.module.parameters())
        watch = untraced(Tap._watch)
        self._hooks = [p.register_hook(functools.partial(watch, self, i)) for i, p in enumerate(parameters)]
        vars(self.module)["_tap"] = self
        swapped: Any = self.module
        swapped.__class__ = _Tapped

    def remove(self) -> None:
        """Make the layer plain again; more than once does no harm."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        tapped: Any = self.module
        if "_tap" in vars(tapped):
            del vars(tapped)["_tap"]
            tapped.__class__ = nn.Linear

    def retire(self) -> None:
        """Make the layer plain for good, between two exchanges: rows that are kept are in ``grad``, and go as that.

        What passed forward before, and comes back only now, has an ordinary gradient.
        """
        self.retired = True
        self.remove()
        self.take()

    def take(self) -> list[Rows]:
        """Take what was caught; the tap is empty then."""
        if self._kept.waiting:  # no row has come in this pass, and grad goes out as it is
            self._drop()
        rows, self._rows = self._rows, []
        self._kept.forget()
        self._calls, self._hidden = 0, False
        return rows

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        weight, bias = self.module.weight, self.module.bias
        if not self.live():
            y = functional.linear(x, weight, bias)
            if y.requires_grad and self._owner.watching():
                y.register_hook(functools.partial(untraced(Tap.passed), self))  # type: ignore[no-untyped-call]
            return y
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        traced: Any = _Linear.apply(bias, x, weight, self)  # type: ignore[no-untyped-call]
        return cast(Tensor, traced)

    def live(self) -> bool:
        """Whether the rows of a call that is made now are to be caught in its backward pass; if so, it is counted."""
        if not torch.is_grad_enabled():
            self._hidden |= self.module.training
        live = torch.is_grad_enabled() and self._owner.on(self.name) and not self.altered()
        self._calls += live
        return live

    def passed(self, grad: Tensor) -> None:
        """The backward pass has come to a call that is not live."""
        if not self.retired and self._owner.watching():
            self._owner.sighted(self.name, grad.numel() // grad.shape[-1])

    def caught(self, x: Tensor, grad: Tensor) -> tuple[bool, bool]:
        """The rows of one call, in the backward pass.

        Returns:
            Whether they leave, so that nobody needs their product here; whether they are kept beside it.
        """
        u, v = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        leave, parameters = self._owner.syncing(), list(self.module.parameters())
        if self._owner.watching():
            self._owner.sighted(self.name, len(u))
        if self._kept.waiting:
            if not self._kept.untouched():
                self._drop()
            elif leave:  # instead of what they made
                for p in parameters:
                    if p.grad is not None:
                        p.grad.zero_()
        if not leave:
            return False, self._keep(u, v)
        self._rows.append((u, v))
        if len(self._rows) == self._calls and not self._hidden:
            self._owner.complete(self.name)
        return True, False

    def made(self, products: list[Tensor]) -> None:
        """The products of rows that are kept."""
        if not self._kept.under_way:
            at_end_of_backward(self._pass_ended)
        self._kept.made(products)

    def begin(self) -> None:
        """A forward pass of the model begins: a backward pass that is still under way has broken off."""
        if self._kept.under_way:
            self._drop()
            self._kept.forget()

    def _keep(self, u: Tensor, v: Tensor) -> bool:
        """Keep rows beyond this pass, unless ``grad`` has something already that is not made of rows."""
        keep = bool(self._rows) or not has_gradient(list(self.module.parameters()))
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

    def altered(self) -> bool:
        """Whether somebody else's hook sees, and may change, the local gradient of a parameter: then it must exist."""
        parameters: list[Any] = list(self.module.parameters())
        return any(
            len(p._backward_hooks or ()) > 1 or p._post_accumulate_grad_hooks or hasattr(p, "_in_backward_optimizers")
            for p in parameters
        )

    def placeholder(self, like: Tensor) -> Tensor:
        """Zeros that take no memory."""
        return self._zero.to(like.dtype).expand(like.shape)

    def _watch(self, index: int, grad: Tensor) -> None:
        """Sees all gradient of a parameter: what is not the placeholder came from elsewhere, as a penalty's does."""
        if self._kept.saw(index, grad):
            return
        plain = all(s == 0 for s, n in zip(grad.stride(), grad.shape, strict=True) if n > 1)
        value = grad[(0,) * grad.dim()] if plain and grad.numel() else grad
        if self._owner.on(self.name) and bool(value.any()):
            self.foreign = True


class _Linear(torch.autograd.Function):
    """``functional.linear`` whose backward pass hands the rows to a tap.

    The bias comes first, as there: gradients become ready in the order of the arguments, and DDP fills its buckets in
    that order. So a model has the same buckets with taps as without, during and after.
    """

    @staticmethod
    def forward(ctx: Any, bias: Tensor | None, x: Tensor, weight: Tensor, tap: Tap) -> Tensor:
        w = weight.to(x.dtype)
        ctx.save_for_backward(x, weight, w if w is not weight else None)
        ctx.tap, ctx.has_bias = tap, bias is not None
        return functional.linear(x, w, None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        back: Gradients = ctx.tap.backward(ctx, grad)
        return back


def _backward(ctx: Any, grad: Tensor) -> Gradients:
    x, weight, w = ctx.saved_tensors
    tap: Tap = ctx.tap
    leave = kept = False
    if _accumulates(ctx) and not (tap.retired or torch.is_grad_enabled() or tap.altered()):
        leave, kept = tap.caught(x, grad)  # first: they travel while the next line is computed
    back = grad.matmul(weight.to(x.dtype) if w is None or not leave else w) if ctx.needs_input_grad[1] else None
    if leave:
        return tap.placeholder(tap.module.bias) if ctx.has_bias else None, back, tap.placeholder(weight), None
    flat = grad.reshape(-1, grad.shape[-1])
    own = (flat.t() @ x.reshape(-1, x.shape[-1])).to(weight.dtype)
    bias = flat.sum(0).to(weight.dtype) if ctx.has_bias else None
    if kept:
        tap.made([own] if bias is None else [own, bias])
    return bias, back, own, None


def _accumulates(node: Any) -> bool:
    """Whether this backward pass adds to the weight's and bias's ``grad``; not so in ``torch.autograd.grad``.

    If not, or if somebody wants to differentiate what comes out, the gradient itself must be there.
    """
    try:
        leaves = [leaf for i, (leaf, _) in enumerate(node.next_functions) if i != int(node.has_bias)]  # not the input's
        return all(torch._C._will_engine_execute_node(leaf) for leaf in leaves if leaf is not None)
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
        return _new_linear, (), {k: v for k, v in vars(self).items() if k != "_tap"}


def _new_linear() -> nn.Linear:
    return nn.Linear.__new__(nn.Linear)


_Tapped.__name__ = _Tapped.__qualname__ = "Linear"
