"""Where the rows of a linear layer's gradient are caught: in the backward pass, before its weight gradient exists.

y = x·Wᵀ + b has dW = VᵀU with U the input rows (K, M) and V the rows of the output's gradient (K, N), and db is the
sum of V's rows. A tapped layer computes neither: autograd gets a placeholder of zeros that takes no memory, so that
DDP's bucket becomes ready as always, and the exchange writes the mean gradient into it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

Rows = tuple[Tensor, Tensor]
"""(K, M) inputs and (K, N) output gradients, in one dtype."""


class Owner(Protocol):
    """Who knows what step it is."""

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
    """What is caught at one layer between two exchanges.

    Args:
        name: the layer's.
        module: a plain ``nn.Linear``; tapped by :meth:`put`, and what is copied or pickled of it is plain again.
        owner: is asked, and told.
        traced: whether ``torch.compile`` gets to see a plain layer.
    """

    def __init__(self, name: str, module: nn.Linear, owner: Owner, *, traced: bool = False) -> None:
        self.name, self.module, self.traced = name, module, traced
        self.foreign = self.retired = False
        self._owner = owner
        self._rows: list[Rows] = []
        self._calls = 0
        self._hidden = False  # called without grad while training: a checkpoint, which calls again later
        self._zero = torch.zeros((), device=module.weight.device)
        self._hooks: list[Any] = []
        self.untraced = _untraced()

    def put(self) -> None:
        """Make the layer tapped; more than once does no harm."""
        if "_tap" in vars(self.module):
            return
        parameters: list[Any] = list(self.module.parameters())
        self._hooks = [p.register_hook(self._watch) for p in parameters]
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
        """Make the layer plain for good, between two exchanges: rows that were caught become gradient.

        What passed forward before, and comes back only now, has an ordinary gradient.
        """
        self.retired = True
        self.remove()
        for u, v in self.take():
            for name, own in (("weight", v.t() @ u), ("bias", v.sum(0))):
                grad = getattr(self.module._parameters[name], "grad", None)
                if grad is not None:  # there is one: of the placeholder
                    grad.add_(own.to(grad.dtype))

    def take(self) -> list[Rows]:
        """What was caught; the tap is empty then."""
        rows, self._rows = self._rows, []
        self._calls, self._hidden = 0, False
        return rows

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        weight, bias = self.module.weight, self.module.bias
        if not self.live():
            y = functional.linear(x, weight, bias)
            if y.requires_grad and self._owner.watching():
                y.register_hook(lambda grad: self.passed(grad.numel() // grad.shape[-1]))  # type: ignore[no-untyped-call]
            return y
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        traced: Any = _Linear.apply(x, weight, bias, self)  # type: ignore[no-untyped-call]
        return cast(Tensor, traced)

    def live(self) -> bool:
        """Whether the rows of a call that is made now are to be caught in its backward pass; if so, it is counted."""
        if not torch.is_grad_enabled():
            self._hidden |= self.module.training
        live = torch.is_grad_enabled() and self._owner.on(self.name) and not self.altered()
        self._calls += live
        return live

    def passed(self, rows: int) -> None:
        """The backward pass has come to a call that is not live."""
        if not self.retired and self._owner.watching():
            self._owner.sighted(self.name, rows)

    def caught(self, x: Tensor, grad: Tensor) -> None:
        """The rows of one call, in the backward pass."""
        u, v = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        if not self._owner.syncing():  # it outlives this backward pass, and its input may be used again
            u, v = u.clone(), v.clone()
        self._rows.append((u, v))
        if self._owner.watching():
            self._owner.sighted(self.name, len(u))
        if self._owner.syncing() and len(self._rows) == self._calls and not self._hidden:
            self._owner.complete(self.name)

    def empty(self) -> bool:
        """Whether nothing was caught since :meth:`take`."""
        return not self._rows

    def altered(self) -> bool:
        """Whether somebody else's hook sees, and may change, the local gradient of a parameter: then it must exist."""
        return any(len(p._backward_hooks or ()) > 1 for p in self.module.parameters())

    def placeholder(self, like: Tensor) -> Tensor:
        """Zeros that take no memory."""
        return self._zero.to(like.dtype).expand(like.shape)

    def _watch(self, grad: Tensor) -> None:
        """Sees all gradient of a parameter: what is not the placeholder came from elsewhere, as a penalty's does."""
        plain = all(s == 0 for s, n in zip(grad.stride(), grad.shape, strict=True) if n > 1)
        value = grad[(0,) * grad.dim()] if plain and grad.numel() else grad
        if self._owner.on(self.name) and bool(value.any()):
            self.foreign = True


@functools.cache
def _untraced() -> Callable[[Tap, Tensor], Tensor]:
    """:meth:`Tap.forward` for code that ``torch.compile`` sees: rows are caught by Python, in the backward pass.

    Made with the first tap: it loads torch._dynamo, a second that who imports commlib need not wait. (DDP loads it.)
    """
    untraced: Callable[[Tap, Tensor], Tensor] = torch.compiler.disable(Tap.forward)  # type: ignore[no-untyped-call]
    return untraced


class _Linear(torch.autograd.Function):
    """``functional.linear`` whose backward pass hands the rows to a tap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tap: Tap) -> Tensor:
        w = weight.to(x.dtype)
        ctx.save_for_backward(x, weight, w if w is not weight else None)
        ctx.tap, ctx.has_bias = tap, bias is not None
        return functional.linear(x, w, None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight, w = ctx.saved_tensors
        tap: Tap = ctx.tap
        leave = _accumulates(ctx) and not (tap.retired or torch.is_grad_enabled() or tap.altered())
        if leave:
            tap.caught(x, grad)  # first: they travel while the next line is computed
        back = grad.matmul(weight.to(x.dtype) if w is None or not leave else w) if ctx.needs_input_grad[0] else None
        if leave:
            bias = tap.placeholder(tap.module.bias) if ctx.has_bias else None
            return back, tap.placeholder(weight), bias, None
        flat = grad.reshape(-1, grad.shape[-1])
        own = (flat.t() @ x.reshape(-1, x.shape[-1])).to(weight.dtype)
        return back, own, flat.sum(0).to(weight.dtype) if ctx.has_bias else None, None


def _accumulates(node: Any) -> bool:
    """Whether this backward pass adds to the weight's and bias's ``grad``; not so in ``torch.autograd.grad``.

    If not, or if somebody wants to differentiate what comes out, the gradient itself must be there.
    """
    try:
        return all(torch._C._will_engine_execute_node(leaf) for leaf, _ in node.next_functions[1:] if leaf is not None)
    except RuntimeError:  # they are what torch.autograd.grad was asked for
        return False


class _Tapped(nn.Linear):
    """An ``nn.Linear`` with a tap; its class is swapped, so its parameters, hooks and name stay what they were."""

    _tap: Tap

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and self._tap.traced:
            return functional.linear(input, self.weight, self.bias)
        return self._tap.untraced(self._tap, input)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new_linear, (), {k: v for k, v in vars(self).items() if k != "_tap"}


def _new_linear() -> nn.Linear:
    return nn.Linear.__new__(nn.Linear)


_Tapped.__name__ = _Tapped.__qualname__ = "Linear"
