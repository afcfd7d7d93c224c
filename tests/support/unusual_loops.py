"""Loops that are unusual and that plain DDP trains: what a step does, and what is registered before."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Step = Callable[[Any, Tensor, int], None]
"""(DDP model, this rank's batch (6, 8), rank)"""

SEEN: list[Tensor] = []
"""What hooks of cases have seen."""


def plain_step(ddp: Any, x: Tensor, rank: int) -> None:
    """One forward and one backward pass."""
    ddp(x).square().mean().backward()


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


def tied_later(ddp: Any) -> object:
    ddp.module.b.bias = ddp.module.a.bias
    return ddp


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


def first_only(ddp: Any, x: Tensor, rank: int) -> None:
    ddp(x)[0].square().mean().backward()


def accumulating(ddp: Any) -> Any:
    return torch.autograd.graph.get_gradient_edge(ddp.module.a.weight).node


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


def changed_weight(ddp: Any, x: Tensor, rank: int) -> None:
    for p in ddp.parameters():
        p.data = p.data * 1.01  # other memory under the same parameter
    ddp(x).square().mean().backward()


def between(change: Callable[[Any], Callable[[], object]]) -> Step:
    """Something is changed after the forward pass, and changed back after the backward pass."""

    def step(ddp: Any, x: Tensor, rank: int) -> None:
        loss = ddp(x).square().mean()
        back = change(ddp.module)
        loss.backward()
        back()

    return step


def hooked(m: Any) -> Callable[[], object]:
    return m.a.weight.register_hook(lambda grad: 2 * grad).remove  # type: ignore[no-any-return]


def frozen(m: Any) -> Callable[[], object]:
    m.a.weight.requires_grad_(False)
    return lambda: m.a.weight.requires_grad_(True)


def scaled(m: Any) -> Callable[[], object]:
    for p in m.parameters():
        p.data.mul_(1.5)
    return lambda: [p.data.div_(1.5) for p in m.parameters()]


def frozen_by_turns(ddp: Any, x: Tensor, rank: int) -> None:
    ddp.module.a.requires_grad_(not ddp.module.a.weight.requires_grad)
    ddp(x).square().mean().backward()


def pruned(ddp: Any, x: Tensor, rank: int) -> None:
    prune.l1_unstructured(ddp.module.a, "weight", 0.5)
    ddp(x).square().mean().backward()
    prune.remove(ddp.module.a, "weight")


def backward_in_a_thread(ddp: Any, x: Tensor, rank: int) -> None:
    thread = threading.Thread(target=ddp(x).square().mean().backward)
    thread.start()
    thread.join()


def copied_too(ddp: Any, x: Tensor, rank: int) -> None:
    if "copy" not in vars(ddp):
        vars(ddp)["copy"] = copy.deepcopy(ddp)  # past nn.Module, or it were a part of the model
    other = vars(ddp)["copy"]
    ddp(x).square().mean().backward()
    other.zero_grad()
    other(x + 1).square().mean().backward()
    SEEN.extend(p.grad.clone() for p in other.parameters())


def fails_at_first(fail: Callable[[Any], Any]) -> Step:
    """Before the first step, a backward pass that ``fail`` makes fail by a hook, which it returns."""

    def step(ddp: Any, x: Tensor, rank: int) -> None:
        if "failed" not in vars(ddp):
            vars(ddp)["failed"] = True
            hook = fail(ddp.module)
            with contextlib.suppress(ZeroDivisionError):
                ddp(x).square().mean().backward()
            hook.remove()
            ddp.zero_grad()
        ddp(x).square().mean().backward()

    return step


def in_a_layer(m: Any) -> Any:
    return m.a.register_full_backward_hook(lambda *_: 1 / 0)


def at_a_weight(m: Any) -> Any:
    return m.b.weight.register_hook(lambda _: 1 / 0)
