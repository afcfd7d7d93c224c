"""A linear layer of which each rank keeps some outputs. Forward and backward as Spark's data and model parallelism has
them, with every rank as worker and master: equal to a dense layer under DDP, but for the order of sums.

::

    forward    x (K, M) ─ all-gather ─▶ X (PK, M) ─ X·Wⱼᵀ + bⱼ ─▶ (PK, N/P) ─ all-to-all ─▶ y (K, N)
    backward   g (K, N) ─ all-to-all ─▶ Gⱼ (PK, N/P) ─ GⱼᵀX/P ─▶ dWⱼ (N/P, M), which stays
                                                      └ Gⱼ·Wⱼ ─▶ (PK, M) ─ all-to-all, sum ─▶ dx (K, M)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from commlib.exchange.factors.delivery import block
from commlib.placement.communication import DTYPES, LayerCall, PlacementChannel
from commlib.runtime.amp import finite


class PlacedLinear(nn.Module):
    """``y = x·Wᵀ + b`` with W's rows shared out; :func:`commlib.place` makes it of an ``nn.Linear``.

    Every rank calls it, and goes backward, as often and in the same order, each with rows of its own, as many as it
    likes. ``weight.grad`` is the mean over ranks, of this rank's rows of W: DDP must leave it alone. The bias is whole
    on every rank, and DDP's.

    Args:
        linear: it, whose bias is taken over; the weight is cut.
        name: of the layer in its model.
        number: of the layer among those of the channel.
        channel: to the other ranks.
    """

    weight: nn.Parameter
    """(own outputs, in_features)."""

    def __init__(self, linear: nn.Linear, name: str, number: int, channel: PlacementChannel) -> None:
        super().__init__()
        self.name, self.number, self.channel = name, number, channel
        self.in_features, self.out_features = linear.in_features, linear.out_features
        size = channel.world.size
        self.cuts = [block(linear.out_features, size, rank) for rank in range(size)]
        self.weight = nn.Parameter(linear.weight.detach()[self.own].clone())
        self.bias = linear.bias
        self.train(linear.training)
        self._untraced = _untraced()

    @property
    def own(self) -> slice:
        """This rank's outputs."""
        return self.cuts[self.channel.world.rank]

    def forward(self, x: Tensor) -> Tensor:
        """(…, M) → (…, N). Collective.

        Raises:
            TypeError, ValueError: an input of another dtype or width.
            PlanMismatch, PeerLost: as :meth:`PlacementChannel.meet`.
        """
        return self._untraced(self, x)

    def extra_repr(self) -> str:
        """As torch prints it."""
        own = self.own
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, own={own.start}:{own.stop}, "
            f"bias={self.bias is not None}"
        )

    def whole_weight(self) -> Tensor:
        """W, (N, M), on every rank. Collective."""
        counts = tuple(c.stop - c.start for c in self.cuts)
        return self.channel.gather(LayerCall(self.name, counts, False, False), self.weight.detach(), exact=True)

    # -- state dicts: a part goes by the name of its rows, so that no rank takes another's for its own --

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + self.part] = destination.pop(prefix + "weight")

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        """Takes the whole weight, of which it cuts its own rows, or its own part by that name."""
        whole, part = prefix + "weight", prefix + self.part
        shape = (self.out_features, self.in_features)
        if whole in state and tuple(state[whole].shape) == shape:
            own = {**state, whole: state[whole][self.own]}
        elif part in state:
            own = {**{k: v for k, v in state.items() if k != part}, whole: state[part]}
        else:
            own = state
        super()._load_from_state_dict(own, prefix, *args)

    @property
    def part(self) -> str:
        """Name of this rank's part of the weight in a state dict."""
        return f"weight[{self.own.start}:{self.own.stop}]"


def _forward(layer: PlacedLinear, x: Tensor) -> Tensor:
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    elif x.dtype != layer.weight.dtype:
        raise TypeError(f"layer {layer.name!r} has weights of {layer.weight.dtype}, and got an input of {x.dtype}")
    if x.dtype not in DTYPES or x.dim() == 0 or x.shape[-1] != layer.in_features:
        raise ValueError(
            f"layer {layer.name!r} takes (…, {layer.in_features}) of floating point, got {tuple(x.shape)} of {x.dtype}"
        )
    flat = x.reshape(-1, layer.in_features)
    call = layer.channel.meet(layer.number, layer.name, flat, trained=torch.is_grad_enabled())
    with torch.autocast(kind, enabled=False):
        y: Any = _Placed.apply(flat, layer.weight, layer.bias, layer, call)  # type: ignore[no-untyped-call]
    return cast(Tensor, y).reshape(*x.shape[:-1], layer.out_features)


@functools.cache
def _untraced() -> Callable[[PlacedLinear, Tensor], Tensor]:
    """:func:`_forward` for code that ``torch.compile`` sees: a graph break, for collectives with headers are Python.

    Made with the first layer: it loads torch._dynamo.
    """
    untraced: Callable[[PlacedLinear, Tensor], Tensor] = torch.compiler.disable(_forward)  # type: ignore[no-untyped-call]
    return untraced


class _Placed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: PlacedLinear, call: LayerCall
    ) -> Tensor:
        everyones = layer.channel.gather(call, x)
        ctx.save_for_backward(everyones, weight)
        ctx.layer, ctx.call, ctx.bias = layer, call, None if bias is None else bias.dtype
        part = None if bias is None else bias[layer.own].to(x.dtype)
        return layer.channel.to_rows(call, functional.linear(everyones, weight.to(x.dtype), part), layer.cuts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        everyones, weight = ctx.saved_tensors
        layer, call = cast(PlacedLinear, ctx.layer), cast(LayerCall, ctx.call)
        columns = layer.channel.to_columns(call, grad, layer.cuts)
        back = layer.channel.sum_rows(call, columns @ weight.to(grad.dtype)) if call.input_grad else None
        own = (columns.t() @ everyones).to(weight.dtype).div_(layer.channel.world.size)  # while it is on its way
        bias = None if ctx.bias is None else grad.sum(0).to(ctx.bias)
        dx = None if back is None else back()
        _spread(layer, own, bias)
        return dx if ctx.needs_input_grad[0] else None, own, bias, None, None


def _spread(layer: PlacedLinear, own: Tensor, bias: Tensor | None) -> None:
    """Values that are not finite in one rank's part must be seen by all, or a GradScaler would skip the step on some.

    With a bias nothing more need be sent: DDP adds it up.
    """
    spoilt = not finite(own)
    if bias is None:
        spoilt = layer.channel.any(f"tell what is finite of {layer.name!r}", spoilt, own.device)
    if spoilt:
        (own if bias is None else bias).fill_(torch.nan)


def placed_layers(model: nn.Module) -> Mapping[str, PlacedLinear]:
    """Name → layer, of those of a model that are placed."""
    return {name: m for name, m in model.named_modules() if isinstance(m, PlacedLinear)}
