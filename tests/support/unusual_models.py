"""Models and loops that are unusual and that plain DDP trains: a table of kinds, from public reports and from attacks.

A case has a model, options of DDP, and what a step does with the DDP model, this rank's batch and its rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.func import functional_call, jvp, vmap
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

WIDTH = 8
Step = Callable[[Any, Tensor, int], None]
"""(DDP model, this rank's batch (6, 8), rank)"""


def plain_step(ddp: Any, x: Tensor, rank: int) -> None:
    """One forward and one backward pass."""
    ddp(x).square().mean().backward()


@dataclasses.dataclass(frozen=True)
class Case:
    """Kind of model or loop.

    Attributes:
        model: makes the model.
        step: forward and backward passes of a step.
        ddp: options of DistributedDataParallel.
        before: called with the DDP model after attaching; it registers hooks and the like.
        alike: whether plain DDP leaves the same gradients on all ranks.
        bound: on the difference to plain DDP, of a gradient's largest value.
    """

    model: Callable[[], nn.Module]
    step: Step = plain_step
    ddp: dict[str, Any] = dataclasses.field(default_factory=dict)
    before: Callable[[Any], object] = lambda ddp: None
    alike: bool = True
    bound: float = 2e-6  # rows are added in another order


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


def penalty(ddp: Any, x: Tensor, rank: int) -> None:
    (ddp(x).square().mean() + 0.01 * ddp.module.a.weight.square().sum()).backward()


def gradient_penalty(ddp: Any, x: Tensor, rank: int) -> None:
    x = x.requires_grad_()
    out = ddp(x).square().mean()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    (out + slope.square().sum()).backward()


def unused_forward(ddp: Any, x: Tensor, rank: int) -> None:
    ddp(x)
    with ddp.no_sync():
        ddp(x + 1).square().mean().backward()


def out_and_in(ddp: Any, x: Tensor, rank: int) -> None:
    first = ddp(x).square().mean()
    with ddp.no_sync():
        second = ddp(x + 1).square().mean()
    (first + second).backward()


def accumulated(ddp: Any, x: Tensor, rank: int) -> None:
    for shift in range(2):
        with ddp.no_sync():
            ddp(x + shift).square().mean().backward()
    ddp(x + 2).square().mean().backward()


def backward_outside_no_sync(ddp: Any, x: Tensor, rank: int) -> None:
    with ddp.no_sync():
        loss = ddp(x).square().mean()
    loss.backward()
    ddp(x + 1).square().mean().backward()


def second_backward(ddp: Any, x: Tensor, rank: int) -> None:
    y = ddp(x)
    y.sum().backward(retain_graph=True)
    y.square().sum().backward()


def second_backward_after_zero(ddp: Any, x: Tensor, rank: int) -> None:
    y = ddp(x)
    y.sum().backward(retain_graph=True)
    ddp.zero_grad()
    y.square().sum().backward()
    ddp(x + 1).square().mean().backward()


def two_losses(ddp: Any, x: Tensor, rank: int) -> None:
    first, second = ddp(x)
    (first.square().mean() + second.square().mean()).backward()


def two_forwards(ddp: Any, x: Tensor, rank: int) -> None:
    (ddp(x).square().mean() + ddp(x.flip(0) + 1).square().mean()).backward()


def two_forwards_two_backwards(ddp: Any, x: Tensor, rank: int) -> None:
    first, second = ddp(x).square().mean(), ddp(x + 1).square().mean()
    first.backward()
    second.backward()


def adversarial(ddp: Any, x: Tensor, rank: int) -> None:
    ddp(x).square().mean().backward()  # of real ones
    ddp(x + 1).mean().backward()  # of made ones


def patched_forward(ddp: Any) -> object:
    layer, original = ddp.module.a, ddp.module.a.forward
    layer.forward = lambda x: 2 * original(x)  # as libraries that put hooks around a module do
    return layer


def by_its_class(m: Any, x: Tensor) -> Any:
    return m.b(nn.Linear.forward(m.a, x))


def tied_later(ddp: Any) -> object:
    ddp.module.b.bias = ddp.module.a.bias
    return ddp


def interpolated(m: Any, x: Tensor) -> Any:
    mixed = {n: 0.5 * (p + q) for (n, p), q in zip(m.a.named_parameters(), m.b.parameters(), strict=True)}
    return functional_call(m.a, mixed, (m.b(x),)) + m.a(x)


def inner_call(ddp: Any, x: Tensor, rank: int) -> None:
    (ddp(x).square().mean() + ddp.module(x + 1).square().mean()).backward()


def inner_backward_first(ddp: Any, x: Tensor, rank: int) -> None:
    ddp.module(x + 1).square().mean().backward()
    ddp(x).square().mean().backward()


def evaluated_between(ddp: Any, x: Tensor, rank: int) -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        ddp.eval()
        with mode():
            ddp(x)
            ddp.module(x)
        ddp.train()
    y = ddp(x)
    with torch.no_grad():
        ddp.module(x)
    y.square().mean().backward()


def grad_of_weight_first(ddp: Any, x: Tensor, rank: int) -> None:
    loss = ddp(x).square().mean()
    torch.autograd.grad(loss, [ddp.module.a.weight, ddp.module.b.bias], retain_graph=True)
    loss.backward()


def unlike_batches(ddp: Any, x: Tensor, rank: int) -> None:
    ddp(x[: 2 + rank]).square().sum().backward()


def empty_batch(ddp: Any, x: Tensor, rank: int) -> None:
    ddp(x[: 6 * (rank == 0)]).square().sum().backward()


def error_then_step(ddp: Any, x: Tensor, rank: int) -> None:
    with contextlib.suppress(RuntimeError):
        ddp(x[:, :3])
    ddp(x).square().mean().backward()


def zero_in_place(ddp: Any, x: Tensor, rank: int) -> None:
    for p in ddp.parameters():
        p.grad = torch.zeros_like(p)
    ddp(x).square().mean().backward()


def never_zeroed(ddp: Any, x: Tensor, rank: int) -> None:
    for p in ddp.parameters():
        p.grad = torch.full_like(p, 0.25 * (rank + 1))
    ddp(x).square().mean().backward()


def under(mode: Callable[[], contextlib.AbstractContextManager[object]]) -> Step:
    def step(ddp: Any, x: Tensor, rank: int) -> None:
        with mode():
            loss = ddp(x).square().mean()
        loss.backward()

    return step


class Doubles(TorchFunctionMode):
    """Every linear layer's output is doubled, by whoever looks at functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return 2 * out if func is functional.linear else out


class Looks(TorchDispatchMode):
    """Every operator is seen, as a profiler or a counter of FLOPs does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


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


def first_only(ddp: Any, x: Tensor, rank: int) -> None:
    ddp(x)[0].square().mean().backward()


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


def accumulating(ddp: Any) -> Any:
    return torch.autograd.graph.get_gradient_edge(ddp.module.a.weight).node


SEEN: list[Tensor] = []
"""What hooks of cases have seen."""


def doubled_by_hook(ddp: Any) -> object:
    return ddp.module.a.weight.register_hook(lambda grad: 2 * grad)


def doubled_by_node(ddp: Any) -> object:
    node = accumulating(ddp)
    return node.register_prehook(lambda grads: (2 * grads[0],)), node


def seen_by_node(ddp: Any) -> object:
    node = accumulating(ddp)
    return node.register_prehook(lambda grads: SEEN.append(grads[0].clone())), node


def several_hooks(ddp: Any) -> object:
    return torch.autograd.graph.register_multi_grad_hook(
        list(ddp.module.parameters()), lambda grads: SEEN.extend(g.clone() for g in grads if g is not None)
    )


def module_hooks(ddp: Any) -> object:
    return (
        ddp.module.a.register_forward_hook(lambda m, args, out: 3 * out),
        ddp.module.a.register_forward_pre_hook(lambda m, args: (args[0] + 1,)),
        ddp.module.b.register_full_backward_hook(lambda m, given, made: (given[0] / 2,)),
    )


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


def changed_weight(ddp: Any, x: Tensor, rank: int) -> None:
    for p in ddp.parameters():
        p.data = p.data * 1.01  # other memory under the same parameter
    ddp(x).square().mean().backward()


UNUSED = {"find_unused_parameters": True}
_KNOWN = inspect.signature(DistributedDataParallel).parameters
SKIPPED = {"skip_all_reduce_unused_params": True} if "skip_all_reduce_unused_params" in _KNOWN else {}  # torch 2.7
CASES = {
    "plain": Case(net()),
    "without biases": Case(net(bias=False)),
    "a weight that lies transposed": Case(transposed),
    "a weight of inputs × outputs": Case(Conv1D),
    "channels last": Case(channels_last),
    "called with half its weight": Case(called_with(lambda w: 0.5 * w)),
    "called with its weight detached": Case(called_with(lambda w: w.detach() + 0 * w.sum())),
    "called with its weight masked": Case(called_with(lambda w: w * (torch.arange(WIDTH) % 2))),
    "called with a copy of its weight": Case(called_with(torch.clone)),
    "called while frozen, and while not": Case(net(frozen_call)),
    "called while its bias is frozen": Case(net(bias_frozen_call), ddp=UNUSED),
    "called without grad, too": Case(net(no_grad_call)),
    "its weight used by a function, too": Case(net(functional_use)),
    "its weight used by an autograd function, too": Case(net(own_function)),
    "a penalty on the weight": Case(net(), penalty),
    "a penalty on the input's gradient": Case(net(), gradient_penalty),
    "a forward pass whose output is dropped": Case(net(), unused_forward),
    "two forward passes, one in no_sync": Case(net(), out_and_in),
    "accumulation": Case(net(), accumulated),
    "accumulation into a bucket view": Case(net(), accumulated, {"gradient_as_bucket_view": True}),
    "backward outside of no_sync": Case(net(), backward_outside_no_sync),
    "a second backward pass": Case(net(), second_backward, alike=False),
    "a second backward pass after zero_grad": Case(net(), second_backward_after_zero),
    "two outputs": Case(net(unused_output), two_losses),
    "two forward passes": Case(net(), two_forwards),
    "two forward passes, and their backward passes one by one": Case(net(), two_forwards_two_backwards, alike=False),
    "a step of two exchanges": Case(net(), adversarial),
    "a forward method that is patched": Case(net(), before=patched_forward),
    "forward called by the class": Case(net(by_its_class)),
    "a bias that is tied after attaching": Case(net(), ddp=UNUSED, before=tied_later),
    "called with a mixture of two layers' weights": Case(net(interpolated)),
    "the inner model called, too": Case(net(), inner_call),
    "the inner model's backward pass before": Case(net(), inner_backward_first),
    "evaluation in between": Case(net(), evaluated_between),
    "the weight's gradient asked for before": Case(net(), grad_of_weight_first),
    "other batch sizes on other ranks": Case(net(), unlike_batches),
    "no batch on other ranks": Case(net(), empty_batch),
    "a forward pass that fails before": Case(net(), error_then_step),
    "gradients of zeros before": Case(net(), zero_in_place),
    "gradients that are never zeroed": Case(net(), never_zeroed),
    "other memory under a parameter": Case(net(), changed_weight),
    "vmap": Case(net(each_row)),
    "jvp": Case(net(tangent)),
    "forward-mode differentiation": Case(net(dual)),
    "a TorchFunctionMode": Case(net(), under(Doubles)),
    "a TorchDispatchMode": Case(net(), under(Looks)),
    "a default device": Case(net(), under(lambda: torch.device("cpu"))),
    "a tensor subclass": Case(net(lambda m, x: m.b(m.a(x.as_subclass(Labelled))).as_subclass(Tensor))),
    "a nested tensor": Case(net(jagged)),
    "the same layer three times": Case(net(many_times)),
    "inputs of all shapes": Case(net(shapes)),
    "outputs changed in place": Case(net(in_place)),
    "an output that the loss does not use": Case(net(unused_output), first_only, UNUSED),
    "an output that is not used, skipped by DDP": Case(net(unused_output), first_only, UNUSED | SKIPPED),
    "a layer that one rank does not use": Case(net(one_rank_only), ddp=UNUSED),
    "other numbers of calls on other ranks": Case(net(calls_by_rank)),
    "a static graph": Case(net(many_times), ddp={"static_graph": True}),
    "checkpoint": Case(net(checkpointed(False))),
    "checkpoint, reentrant": Case(net(checkpointed(True))),
    "activations saved on the CPU": Case(net(saved_on_cpu)),
    "autocast for one layer": Case(net(autocast_inside), bound=0.01),  # rows are of bfloat16
    "a hook that doubles the weight's gradient": Case(net(), before=doubled_by_hook),
    "a hook of the accumulating node that doubles it": Case(net(), before=doubled_by_node),
    "a hook of the accumulating node that looks": Case(net(), before=seen_by_node),
    "a hook on several gradients": Case(net(), before=several_hooks),
    "hooks of modules that change what passes": Case(net(), before=module_hooks),
    "tied layers": Case(tied),
    "weight_norm": Case(normed),
    "checkpoint_wrapper": Case(wrapped(checkpoint_wrapper)),
    "offload_wrapper": Case(wrapped(offload_wrapper)),
    "parameters under other names": Case(Renamed),
    "layers of odd sizes": Case(Sizes),
    "a transformer's layer": Case(attention, lambda ddp, x, rank: ddp(x.view(2, 3, WIDTH)).square().mean().backward()),
    "an LSTM": Case(Recurrent),
    "a subclass of nn.Linear": Case(with_subclass),
}


def page() -> str:
    """The part of docs/compatibility.md that is made of this table: ``python -m tests.support.unusual_models``."""
    return "\n".join(f"- {name}" for name in CASES)


if __name__ == "__main__":
    print(page())
