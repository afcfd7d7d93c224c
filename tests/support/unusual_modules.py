"""Modules that are unusual and that plain DDP trains: layers, and what is done with them and the input."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, jvp, vmap
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Net(nn.Module):
    """Two linear layers; ``body`` says what is done with them and the input."""

    def __init__(self, body: Callable[[Any, Tensor], Any] | None = None, *, bias: bool = True) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH, bias=bias), nn.Linear(WIDTH, WIDTH, bias=bias)
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.b(torch.tanh(self.a(x))) if self.body is None else self.body(self, x)


def net(body: Callable[[Any, Tensor], Any] | None = None, *, bias: bool = True) -> Callable[[], nn.Module]:
    return lambda: Net(body, bias=bias)


def transposed() -> nn.Module:
    made = Net()
    made.a.weight = nn.Parameter(made.a.weight.detach().t().contiguous().t())
    return made


class Conv1D(nn.Module):
    """A linear layer whose weight is (inputs, outputs), as GPT-2's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4), nn.Parameter(torch.zeros(WIDTH))
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.after(torch.addmm(self.bias, x, self.weight))
        return y


def channels_last() -> nn.Module:
    made = nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 3, 2, padding=1), nn.Flatten(), nn.Linear(27, WIDTH))
    return made.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def called_with(change: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    """The second layer is called with a weight that is made of its own."""

    def body(m: Any, x: Tensor) -> Any:
        return functional_call(m.b, {"weight": change(m.b.weight)}, (torch.tanh(m.a(x)),))

    return net(body, bias=True)


def frozen_call(m: Any, x: Tensor) -> Any:
    y = m.a(x)
    m.b.requires_grad_(False)
    first = m.b(y)
    m.b.requires_grad_(True)
    return first + m.b(y.detach()).square()


def bias_frozen_call(m: Any, x: Tensor) -> Any:
    m.b.bias.requires_grad_(False)
    first = m.b(m.a(x))
    m.b.bias.requires_grad_(True)
    return first


def no_grad_call(m: Any, x: Tensor) -> Any:
    with torch.no_grad():
        target = m.b(m.a(x))
    return m.b(m.a(x)) - 0.5 * target


def functional_use(m: Any, x: Tensor) -> Any:
    return functional.linear(m.b(m.a(x)), m.b.weight.t())


def by_its_class(m: Any, x: Tensor) -> Any:
    return m.b(nn.Linear.forward(m.a, x))


def interpolated(m: Any, x: Tensor) -> Any:
    mixed = {n: 0.5 * (p + q) for (n, p), q in zip(m.a.named_parameters(), m.b.parameters(), strict=True)}
    return functional_call(m.a, mixed, (m.b(x),)) + m.a(x)


class Labelled(Tensor):
    """A subclass that does nothing of its own."""


def dual(m: Any, x: Tensor) -> Any:
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(m.b(forward_ad.make_dual(m.a(x), torch.ones_like(x))))
    return out.primal + out.tangent


def each_row(m: Any, x: Tensor) -> Any:
    return vmap(m.b)(m.a(x))


def tangent(m: Any, x: Tensor) -> Any:
    return sum(jvp(m.b, (m.a(x),), (torch.ones_like(x),)))


def jagged(m: Any, x: Tensor) -> Any:
    nested = torch.nested.nested_tensor_from_jagged(m.a(x), torch.tensor([0, 2, 6]))
    return m.b(nested).values()


class OwnFunction(torch.autograd.Function):
    """A weight's gradient that is made elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


def own_function(m: Any, x: Tensor) -> Any:
    return m.b(m.a(x)) + OwnFunction.apply(x, m.b.weight)


def many_times(m: Any, x: Tensor) -> Any:
    for _ in range(3):
        x = torch.tanh(m.a(x))
    return m.b(x)


def shapes(m: Any, x: Tensor) -> Any:
    rows = torch.stack([m.a(row) for row in x])  # one dimension
    cube = m.a(x.view(2, 3, WIDTH)).reshape(6, WIDTH)
    strided = m.a(x.t().contiguous().t())
    wide = m.a(x[:1].expand(6, WIDTH))
    return m.b(rows + cube + strided + wide)


def in_place(m: Any, x: Tensor) -> Any:
    return m.b(m.a(x).mul_(2.0).relu_()).add_(1.0)


def unused_output(m: Any, x: Tensor) -> Any:
    return m.a(x), m.b(x)


def one_rank_only(m: Any, x: Tensor) -> Any:
    return m.b(m.a(x)) if torch.distributed.get_rank() else m.a(x)


def calls_by_rank(m: Any, x: Tensor) -> Any:
    for _ in range(1 + torch.distributed.get_rank()):
        x = torch.tanh(m.a(x))
    return m.b(x)


def checkpointed(reentrant: bool) -> Callable[[Any, Tensor], Any]:
    def body(m: Any, x: Tensor) -> Any:
        return m.b(checkpoint(lambda y: torch.tanh(m.a(y)), x.requires_grad_(), use_reentrant=reentrant))

    return body


def saved_on_cpu(m: Any, x: Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return m.b(torch.tanh(m.a(x)))


def autocast_inside(m: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        x = m.a(x)
    with torch.autocast("cpu", enabled=False):
        return m.b(x.float())


def tied() -> nn.Module:
    made = Net()
    made.b.weight = made.a.weight
    return made


def normed() -> nn.Module:
    made = Net()
    weight_norm(made.a)
    return made


def wrapped(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        made = Net()
        made.a = wrap(made.a)  # type: ignore[assignment]
        return wrap(made)

    return make


class Renamed(Net):
    """Whose parameters are given out under other names."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return ((f"other.{name}", p) for name, p in super().named_parameters(*args, **kwargs))


class Sizes(nn.Module):
    """Linear layers of odd sizes, one of them empty."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.thin, self.none = nn.Linear(WIDTH, 1), nn.Linear(1, WIDTH), nn.Linear(WIDTH, 0)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.thin(self.one(x)) + self.none(x).sum()
        return y


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.cell(x.unsqueeze(0))[0])
        return y


class Typed(nn.Linear):
    """A subclass that does something of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight * 0.5, self.bias)


def with_subclass() -> nn.Module:
    made = Net()
    made.a = Typed(WIDTH, WIDTH)
    return made


def in_two_threads(m: Any, x: Tensor) -> Any:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(m.a, (x, x + 1))
    return m.b(first + second)


def saved_rounded(m: Any, x: Tensor) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: (saved * 4).round() / 4, lambda kept: kept):
        return m.b(torch.tanh(m.a(x)))


def by_a_copy(m: Any, x: Tensor) -> Any:
    return m.b(torch.tanh(copy.copy(m.a)(x)) + m.a(x + 1))


class Recomputed(torch.autograd.Function):
    """The layer's forward pass is made in the backward pass, and a backward pass of its own with it."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            y: Tensor = layer(x)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.layer(x)
        torch.autograd.backward(y, grad)
        return None, x.grad, *(None for _ in ctx.layer.parameters())


def recomputed(m: Any, x: Tensor) -> Any:
    return m.b(Recomputed.apply(m.a, x.requires_grad_(), *m.a.parameters()))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH, dtype=torch.complex64), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x.to(torch.complex64)).abs())
        return y


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Linear(WIDTH, WIDTH)
        self.c = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x.double()).float()) + self.c(x.bfloat16()).float()
        return y


class Experts(nn.Module):
    """Each row of the batch goes to one of four layers."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        chosen, y = (x[:, 0].abs() * 7).long() % 4, torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            rows = (chosen == k).nonzero()[:, 0]
            y = y.index_add(0, rows, expert(x[rows]))
        out: Tensor = self.out(y)
        return out


def in_one_tensor() -> nn.Module:
    made, at = Net(), 0
    whole = nn.utils.parameters_to_vector(made.parameters()).detach()
    for layer in (made.a, made.b):
        for name, p in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(whole[at : at + p.numel()].view(p.shape)))
            at += p.numel()
    return made
