"""A model that is all gradient: the shapes of a real one, and a backward pass that costs next to nothing.

What is left of a DDP step when the model computes nothing is the exchange of its gradients. So one can
measure that exchange for VGG-19 on a machine that cannot train it, and give the backward pass whatever
length a faster machine would need, with the cores free meanwhile, as they are while an accelerator computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_OFFSETS = 1 << 16  # so many parameters get gradients that begin at different places of the pool
_STRIDE = 7919  # odd, so that it reaches all of them
_NAP_S = 1e-3  # shorter sleeps are saved up: the system would round each of them up


class Replay(nn.Module):
    """A module whose backward pass hands out prepared gradients; ``module()`` is its loss, a scalar 0.

    Gradients are standard normal, differ from rank to rank and from parameter to parameter, and are the same
    in every step. They become ready in reverse order of ``shapes``, as those of a chain of layers do.

    Args:
        shapes: (name, shape) of every parameter, with the names ``named_parameters`` shall have.
        backward_s: seconds the backward pass sleeps in all, spread over the parameters by their size.
        seed: of the gradients, together with this process's rank in the default group.
        rows: linear layer → rows of a step. Its gradient is made of so many, and can leave as them
            (commlib.exchange.factors).

    Raises:
        ValueError: no parameters, a name twice, names that no module can have, or a negative time.
    """

    def __init__(
        self,
        shapes: Iterable[tuple[str, tuple[int, ...]]],
        *,
        backward_s: float = 0.0,
        seed: int = 0,
        rows: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        if not backward_s >= 0:
            raise ValueError(f"backward_s must be a number of seconds ≥ 0, got {backward_s!r}")
        listed = [(name, nn.Parameter(torch.zeros(shape))) for name, shape in shapes]
        if not listed:
            raise ValueError("a model without parameters has no gradients to replay")
        for name, parameter in listed:
            _register(self, name, parameter, linear=name.rpartition(".")[0] in (rows or {}))
        self._order = dict(listed)
        self._clock = _Clock(backward_s, sum(p.numel() for _, p in listed))
        rank = dist.get_rank() if dist.is_initialized() else 0
        largest = max(p.numel() for _, p in listed)
        generator = torch.Generator().manual_seed(seed + rank)
        # One pool for all, or the gradients of a large model would need as much memory again.
        self._pool = torch.randn(largest + _OFFSETS, generator=generator)
        self._homes: dict[str, Tensor] = {}
        self._places = {name: i * _STRIDE % _OFFSETS for i, name in enumerate(self._order)}
        self._rows = {layer: self._draw(layer, count, generator) for layer, count in (rows or {}).items()}
        self._products = {name: g for layer, uv in self._rows.items() for name, g in self._product(layer, *uv).items()}

    def gradient(self, name: str) -> Tensor:
        """Gradient that this rank's backward pass hands to a parameter; a view, not to be changed.

        Raises:
            KeyError: no parameter of that name.
        """
        if name in self._products:
            return self._products[name]
        parameter, start = self._order[name], self._places[name]
        return self._pool[start : start + parameter.numel()].view(parameter.shape)

    def take_back(self) -> None:
        """As ``zero_grad()``; but the next gradients will be put where these are now, not into memory of their own.

        Those are the buckets of a DDP model with ``gradient_as_bucket_view``, which then has nothing to copy.
        """
        for name, parameter in self._order.items():
            if parameter.grad is not None:
                self._homes[name], parameter.grad = parameter.grad, None

    def hand(self, name: str) -> Tensor:
        """A copy of the gradient, for whoever takes it writes into it: DDP leaves the mean there."""
        home = self._homes.get(name)
        return self.gradient(name).clone() if home is None else home.copy_(self.gradient(name)).view_as(home)

    def rows(self, layer: str) -> tuple[Tensor, Tensor]:
        """U (K, M) and V (K, N), of which this rank's gradient of a linear layer is made: VᵀU."""
        return self._rows[layer]

    def forward(self) -> Tensor:
        """The loss. Each parameter's node hangs on the one before, so backward takes them in reverse order."""
        self._clock.restart()
        loss = self._pool.new_zeros(())
        for name, parameter in self._order.items():
            layer, _, leaf = name.rpartition(".")
            if layer not in self._rows:
                loss = _Hand.apply(loss, parameter, self, name)  # type: ignore[no-untyped-call]
            elif leaf == "weight":
                bias, tap = self._order.get(f"{layer}.bias"), vars(self.get_submodule(layer)).get("_tap")
                live = tap is not None and tap.live()
                loss = _HandRows.apply(loss, parameter, bias, self, layer, tap, live)  # type: ignore[no-untyped-call]
        return loss

    def _draw(self, layer: str, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        n, m = self._order[f"{layer}.weight"].shape
        # Of size one in the product, as the other gradients are.
        return torch.randn(count, m, generator=generator), torch.randn(count, n, generator=generator) / count**0.5

    def _product(self, layer: str, u: Tensor, v: Tensor) -> dict[str, Tensor]:
        made = {f"{layer}.weight": v.t() @ u}
        return made | ({f"{layer}.bias": v.sum(0)} if f"{layer}.bias" in self._order else {})

    def spend(self, name: str) -> None:
        """Sleeps the time the backward pass of this parameter takes."""
        self._clock.spend(self._order[name].numel())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Replay:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # Not a buffer: DDP would give every rank the gradients of rank 0.
        self._pool = fn(self._pool)
        self._order = {name: self.get_parameter(name) for name in self._order}
        self._rows = {layer: (fn(u), fn(v)) for layer, (u, v) in self._rows.items()}
        self._products = {name: fn(g) for name, g in self._products.items()}
        return self


class _Hand(torch.autograd.Function):
    """Passes the loss on; backward returns a parameter's prepared gradient."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, parameter: Tensor, owner: Replay, name: str) -> Tensor:
        ctx.owner, ctx.name = owner, name
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        ctx.owner.spend(ctx.name)
        return grad, ctx.owner.hand(ctx.name), None, None


class _HandRows(torch.autograd.Function):
    """The same for a linear layer, whose tap, if it has one, is treated as the layer's own passes would treat it."""

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, weight: Tensor, bias: Tensor | None, owner: Replay, layer: str, tap: Any, live: bool
    ) -> Tensor:
        ctx.owner, ctx.layer, ctx.has_bias, ctx.tap, ctx.live = owner, layer, bias is not None, tap, live
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        owner: Replay = ctx.owner
        names = [f"{ctx.layer}.{leaf}" for leaf in ("weight", "bias")[: 1 + ctx.has_bias]]
        u, v = owner.rows(ctx.layer)
        if ctx.live:
            ctx.tap.caught(u, v)
        elif ctx.tap is not None:
            ctx.tap.passed(v)
        for name in names:
            owner.spend(name)
        if ctx.live and not ctx.tap.proving:
            grads = ctx.tap.placeholders()
        else:
            grads = [owner.hand(name) for name in names]
            if ctx.live:
                ctx.tap.owns(grads)
        return (grad, *grads, *([None] * (6 - len(grads))))


class _Clock:
    """Sleeps ``seconds`` in all over ``total`` values; what one sleep takes too much, the next ones take less."""

    def __init__(self, seconds: float, total: int) -> None:
        self._per_value = seconds / total
        self._total = total
        self.restart()

    def restart(self) -> None:
        self._owed, self._left = 0.0, self._total

    def spend(self, values: int) -> None:
        self._owed += values * self._per_value
        self._left -= values
        if self._owed >= _NAP_S or (self._left == 0 and self._owed > 0):
            start = time.perf_counter()
            time.sleep(self._owed)
            self._owed -= time.perf_counter() - start


def _register(root: nn.Module, name: str, parameter: nn.Parameter, *, linear: bool) -> None:
    *path, leaf = name.split(".")
    owner = root
    try:
        for depth, piece in enumerate(path, 1):
            if piece not in owner._modules:
                owner.add_module(piece, _empty_linear() if linear and depth == len(path) else nn.Module())
            owner = owner.get_submodule(piece)
        if owner._parameters.get(leaf) is not None:
            raise ValueError(f"two parameters are called {name!r}")
        owner.register_parameter(leaf, parameter)
    except KeyError as e:
        raise ValueError(f"no module can have a parameter called {name!r}: {e.args[0]}") from e


def _empty_linear() -> nn.Linear:
    """An ``nn.Linear`` that has yet to get its parameters."""
    linear = nn.Linear(1, 1, bias=False)
    linear.register_parameter("weight", None)
    return linear
