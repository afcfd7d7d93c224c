"""Models and loops of public reports, as small as they can be: :mod:`tests.support.public_reports` says whose."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import jvp
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.support.unusual_loops import Step
from tests.support.unusual_modules import WIDTH

Body = Callable[..., Any]
FLAT = {"broadcast_buffers": False}
VIEWS = {"gradient_as_bucket_view": True}
STATIC = {"static_graph": True}


class Parts(nn.Module):
    """Layers a, b and c, and whatever else; ``body`` says what is done with them and the arguments."""

    def __init__(self, body: Body, **layers: Callable[[], Any]) -> None:
        super().__init__()
        for name in "abc":
            setattr(self, name, layers.pop(name)() if name in layers else nn.Linear(WIDTH, WIDTH))
        for name, make in layers.items():
            setattr(self, name, make())
        self.body = body

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


def parts(body: Body, **layers: Callable[[], Any]) -> Callable[[], nn.Module]:
    return lambda: Parts(body, **layers)


def no_layer() -> nn.Module | None:
    return None


def two(body: Body, **layers: Callable[[], Any]) -> Callable[[], nn.Module]:
    """As :func:`parts`, without c."""
    return parts(body, c=no_layer, **layers)


def chain(m: Any, x: Tensor) -> Any:
    return m.b(torch.tanh(m.a(x)))


def visit(ddp: Any) -> int:
    """How many steps this model has had before."""
    ddp.visits = getattr(ddp, "visits", -1) + 1
    return int(ddp.visits)


def mean(y: Tensor) -> Tensor:
    return y.square().mean()


def coin(x: Tensor, sides: int = 2) -> int:
    """A number that is another one on other ranks and in other steps."""
    return int(x[0, 0].abs() * 1000) % sides


# -- several passes ---------------------------------------------------------------------------


def frames(m: Any, x: Tensor, mask: Tensor | None = None) -> Any:
    y = m.a(x)
    return m.b(y) if mask is None else m.decoder(m.c(y * mask))


def under_two_names() -> nn.Module:
    made = Parts(frames)
    made.decoder = made.b
    return made


def two_frames(ddp: Any, x: Tensor, rank: int) -> None:
    first = ddp(x)
    (mean(first) + mean(ddp(x.flip(0), first.sigmoid().detach()))).backward()


def projected(ddp: Any, x: Tensor, rank: int) -> None:
    """PCGrad: each loss has a backward pass of its own through the same graph."""
    first, second = ddp(x)
    mean(first).backward(retain_graph=True)
    before = [p.grad for p in ddp.parameters()]
    ddp.zero_grad()
    (first.mean() - mean(second)).backward()
    for p, g in zip(ddp.parameters(), before, strict=True):
        h = p.grad
        p.grad = g + h - min(0.0, float((g * h).sum())) * g / g.square().sum().clamp(min=1e-6)


def conditioned(ddp: Any, x: Tensor, rank: int) -> None:
    """Self-conditioning: in half of the passes the model first sees its own prediction."""
    seen = torch.zeros_like(x)
    if coin(x):
        with torch.no_grad():
            seen = ddp(x)
    mean(ddp(x + seen)).backward()


def by_turns(m: Any, x: Tensor, first: bool) -> Any:
    return m.a(x) if first else m.b(x)


def other_layer_before(ddp: Any, x: Tensor, rank: int) -> None:
    with ddp.no_sync():
        mean(ddp(x, True)).backward()
    mean(ddp(x, False)).backward()


def one_part_at_a_time(m: Any, x: Tensor, turn: int) -> Any:
    with torch.set_grad_enabled(turn % 2 == 0):
        y = torch.tanh(m.a(x))
    if turn % 2:
        return m.b(y)
    return functional.linear(y, m.b.weight.detach(), m.b.bias.detach())


def alternating(ddp: Any, x: Tensor, rank: int) -> None:
    mean(ddp(x, visit(ddp))).backward()


def skipped_together(ddp: Any, x: Tensor, rank: int) -> None:
    for shift in range(1 + dist.get_world_size()):
        loss = mean(ddp(x + shift))
        valid = torch.tensor(0 if shift == rank else 1)
        dist.all_reduce(valid, dist.ReduceOp.MIN)
        if valid:
            loss.backward()


def dropped_before(ddp: Any, x: Tensor, rank: int) -> None:
    ddp(x)
    mean(ddp(x + 1)).backward()


def accumulates_at_once(ddp: Any, x: Tensor, rank: int) -> None:
    with ddp.no_sync():
        mean(ddp(x)).backward()
    mean(ddp(x + 1)).backward()


def accumulates_later(ddp: Any, x: Tensor, rank: int) -> None:
    if visit(ddp) == 0:
        mean(ddp(x)).backward()
    else:
        accumulates_at_once(ddp, x, rank)


def redirected(ddp: Any, x: Tensor, rank: int) -> None:
    """As Fabric calls ``training_step``: through DDP's forward, and the model's own is replaced for one call."""
    original = ddp.module.forward

    def training_step(x: Tensor) -> Tensor:
        ddp.module.forward = original
        return mean(ddp.module(x))

    ddp.module.forward = training_step
    ddp(x).backward()


def sharpness_aware(ddp: Any, x: Tensor, rank: int) -> None:
    with ddp.no_sync():
        mean(ddp(x)).backward()
    kept = [p.detach().clone() for p in ddp.parameters()]
    with torch.no_grad():
        for p in ddp.parameters():
            p.add_(0.05 * p.grad)
    ddp.zero_grad()
    mean(ddp(x)).backward()
    with torch.no_grad():
        for p, value in zip(ddp.parameters(), kept, strict=True):
            p.copy_(value)


def truncated(ddp: Any, x: Tensor, rank: int) -> None:
    state = torch.zeros(2, WIDTH)
    for chunk in x.split(2):
        ddp.zero_grad()
        out, state = ddp(chunk, state.detach())
        (mean(out) + mean(state)).backward()


def cell(m: Any, x: Tensor, state: Tensor) -> Any:
    state = torch.tanh(m.a(x) + m.b(state))
    return m.c(state), state


def recycled(m: Any, x: Tensor) -> Any:
    for turn in range(3):
        x = torch.tanh(m.a(x))
        if turn < 2:
            x = x.detach_()
    return m.b(x)


def joined(ddp: Any, x: Tensor, rank: int) -> None:
    with ddp.join():
        for shift in range(1 + rank):
            with ddp.no_sync():
                mean(ddp(x + shift)).backward()
            mean(ddp(x - shift)).backward()


def other_order(m: Any, x: Tensor, turn: int) -> Any:
    return m.b(torch.tanh(m.a(x))) if turn < 2 else m.a(torch.tanh(m.b(x)))


# -- gradients of gradients, functions of one's own -------------------------------------------


def penalty_on_the_gradient(ddp: Any, x: Tensor, rank: int) -> None:
    loss = mean(ddp(x))
    grads = torch.autograd.grad(loss, list(ddp.parameters()), create_graph=True)
    (loss + 0.1 * torch.stack([g.square().sum() for g in grads]).sum()).backward()


def curvature(ddp: Any, x: Tensor, rank: int) -> None:
    """A product with the Hessian, and no other backward pass."""
    grads = torch.autograd.grad(mean(ddp(x)), list(ddp.parameters()), create_graph=True)
    torch.autograd.backward([(g * (i + 1)).sum() for i, g in enumerate(grads)])


def with_graph(ddp: Any, x: Tensor, rank: int) -> None:
    mean(ddp(x)).backward(create_graph=True)


def energy(m: Any, x: Tensor) -> Any:
    x = x.requires_grad_()
    layers = nn.Sequential(m.a, nn.Tanh(), m.b, nn.Tanh())
    value = checkpoint_sequential(layers, 2, x, use_reentrant=False).sum()
    return torch.autograd.grad(value, x, create_graph=True)[0]


class NoneForWeight(torch.autograd.Function):
    """A product whose weight gets None for a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.saved_tensors[0], None


class Touch(torch.autograd.Function):
    """The first argument; all others get zeros for gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(*weights)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *(torch.zeros_like(w) for w in ctx.saved_tensors)


def touched(m: Any, x: Tensor) -> Any:
    y = m.a(x)
    skipped, used = (m.b, m.c) if coin(x) else (m.c, m.b)
    return Touch.apply(used(torch.tanh(y)), *skipped.parameters())


def tangents(ddp: Any, x: Tensor, rank: int) -> None:
    found: Any = jvp(ddp, (x,), (torch.ones_like(x),))
    out, along = found
    (mean(out) + mean(along)).backward()


def shared_in_checkpoints(m: Any, x: Tensor) -> Any:
    x = x.requires_grad_()
    for _ in range(2):
        x = checkpoint(lambda y: torch.tanh(m.a(y)), x, use_reentrant=True)
    return m.b(x)


def reentrant(m: Any, x: Tensor) -> Any:
    return m.b(checkpoint(lambda y: torch.tanh(m.a(y)), x.requires_grad_(), use_reentrant=True))


# -- what ranks do alone, and what the model sends itself -------------------------------------


@dataclasses.dataclass
class Outputs:
    """What a model returns."""

    first: Tensor
    second: Tensor


def of_dataclass(ddp: Any, x: Tensor, rank: int) -> None:
    out = ddp(x)
    (mean(out.first) + mean(out.second)).backward()


def by_key(m: Any, data: dict[str, Tensor]) -> Any:
    return {key: getattr(m, key)(value) for key, value in data.items()}


def some_keys(ddp: Any, x: Tensor, rank: int) -> None:
    keys = ["ab", "a", "b"][coin(x, 3)]
    torch.stack([mean(y) for y in ddp(dict.fromkeys(keys, x)).values()]).sum().backward()


def zero_on_one(ddp: Any, x: Tensor, rank: int) -> None:
    (mean(ddp(x)) * (1 - rank % 2)).backward()


def own_scale(ddp: Any, x: Tensor, rank: int) -> None:
    scale = 2.0 ** (10 + rank)
    (scale * mean(ddp(x))).backward()
    for p in ddp.parameters():
        p.grad /= scale


def dropped_layers(m: Any, x: Tensor) -> Any:
    for i, layer in enumerate((m.a, m.b, m.c)):
        x = x + torch.tanh(layer(x)) if coin(x, 3) != i else x
    return x * m.scale


def some_rows(m: Any, x: Tensor) -> Any:
    rows = torch.arange(len(x))[coin(x, 3) :: 2]
    return m.b(torch.index_add(x, 0, rows, torch.tanh(m.a(x[rows])), alpha=len(x) / len(rows)))


def experts(m: Any, x: Tensor) -> Any:
    chosen = m.a(x).argmax(1) % 3
    chosen[chosen == coin(x, 3)] = 0  # an expert gets no row, on another rank another one
    out = torch.zeros_like(x)
    for i, expert in enumerate((m.b, m.c, m.d)):
        out = out.index_put((torch.nonzero(chosen == i)[:, 0],), expert(x[chosen == i]))
    return out + m.a(x)


def gathered(y: Tensor) -> Tensor:
    """All ranks' rows, of which one's own have a graph."""
    found = [torch.empty_like(y) for _ in range(dist.get_world_size())]
    dist.all_gather(found, y.detach().contiguous())
    found[dist.get_rank()] = y
    return torch.cat(found)


def contrast(gather: Callable[[Tensor], Tensor]) -> Step:
    def step(ddp: Any, x: Tensor, rank: int) -> None:
        image, text, scale = ddp(x)
        logits = scale * gather(image) @ gather(text).t()
        labels = torch.arange(len(logits))
        (functional.cross_entropy(logits, labels) + functional.cross_entropy(logits.t(), labels)).backward()

    return step


def clip(m: Any, x: Tensor) -> Any:
    image, text = (functional.normalize(layer(x), dim=-1) for layer in (m.a, m.b))
    return image, text, m.scale.exp()


def reduced_inside(m: Any, x: Tensor) -> Any:
    y = m.a(x)
    other = y.detach().clone()
    dist.all_reduce(other)
    return m.b(torch.tanh(y + 0.1 * other))


# -- layers, types, layouts ---------------------------------------------------------------------


def scalar(value: float = 1.0) -> Callable[[], Any]:
    return lambda: nn.Parameter(torch.tensor(value))


def pointwise(m: Any, x: Tensor) -> Any:
    image = x.view(6, 2, 2, 2).contiguous(memory_format=torch.channels_last)
    return m.b(m.a(image).flatten(1))


def depthwise(m: Any, x: Tensor) -> Any:
    y = m.a(x.view(6, 2, 2, 2).permute(0, 3, 1, 2))
    return m.b(y.permute(0, 2, 3, 1).reshape(6, WIDTH))


def of_complex(m: Any, x: Tensor) -> Any:
    z = m.b(m.a(torch.complex(x, x.flip(0))))
    return m.c(z.real) + z.imag


def reduced_by_hand(ddp: Any, x: Tensor, rank: int) -> None:
    with ddp.no_sync():
        mean(ddp(x)).backward()
    for p in ddp.parameters():
        whole = torch.view_as_real(p.grad) if p.grad.is_complex() else p.grad
        dist.all_reduce(whole)
        p.grad /= dist.get_world_size()


def new_parameter(ddp: Any) -> object:
    ddp.module.a.weight = nn.Parameter(ddp.module.a.weight.detach().clone())
    return ddp


def spectral_layer() -> nn.Module:
    return nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))


def spectral() -> nn.Module:
    return Parts(chain, a=spectral_layer, b=spectral_layer, c=no_layer)


def with_statistics() -> nn.Module:
    first = nn.Linear(WIDTH, WIDTH, bias=False)  # a bias would have no gradient but rounding errors
    return nn.Sequential(first, nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def with_buffer() -> nn.Module:
    made = Parts(lambda m, x: chain(m, x) * m.factor, c=no_layer)
    made.register_buffer("factor", torch.ones(1, WIDTH))
    return made


def embedded(m: Any, x: Tensor) -> Any:
    indices = (x[:, 0].abs() * 10).long() % WIDTH
    y = m.a(indices) @ m.b.weight.t()
    return y + (m.a.weight @ m.b.weight.t()).mean(0) + m.b.bias


def detached_in_place(ddp: Any, x: Tensor, rank: int) -> None:
    mean(ddp(x)).backward()
    for p in ddp.parameters():
        p.grad.detach_()
        p.grad.zero_()


def zeroed_in_place(ddp: Any, x: Tensor, rank: int) -> None:
    for set_to_none in (False, True, False):
        ddp.zero_grad(set_to_none=set_to_none)
        mean(ddp(x)).backward()


def replaced_gradients(ddp: Any, x: Tensor, rank: int) -> None:
    mean(ddp(x)).backward()
    for p in ddp.parameters():
        p.grad = (0.5 * p.grad).reshape(1, -1)[0].view(p.shape)
    mean(ddp(x + 1)).backward()


def moved_away(ddp: Any, x: Tensor, rank: int) -> None:
    ddp.double()
    ddp.float()
    mean(ddp(x)).backward()


def synced_at_last(ddp: Any, x: Tensor, rank: int) -> None:
    with ddp.no_sync():
        losses = [mean(ddp(x + shift)) for shift in range(3)]
    for loss in losses[:-1]:
        loss.backward()
    ddp.reducer.prepare_for_backward([])
    losses[-1].backward()


def frozen_double_last() -> nn.Module:
    made = Parts(lambda m, x: chain(m, x) * m.last.float(), c=no_layer)
    made.last = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64), requires_grad=False)
    return made


def of_two_types(m: Any, x: Tensor) -> Any:
    return m.c(torch.tanh(m.b(m.a(x).double())).float())
