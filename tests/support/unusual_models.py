"""Models and loops that are unusual and that plain DDP trains: a table of kinds, from public reports and from attacks.

A case has a model, options of DDP, and what a step does with the DDP model, this rank's batch and its rank.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.nn.parallel import DistributedDataParallel

from tests.support.unusual_loops import (
    Doubles,
    Looks,
    Step,
    accumulated,
    adversarial,
    at_a_weight,
    backward_in_a_thread,
    backward_outside_no_sync,
    between,
    changed_weight,
    copied_too,
    doubled_by_hook,
    doubled_by_node,
    empty_batch,
    error_then_step,
    evaluated_between,
    fails_at_first,
    first_only,
    frozen,
    frozen_by_turns,
    grad_of_weight_first,
    gradient_penalty,
    hooked,
    in_a_layer,
    inner_backward_first,
    inner_call,
    module_hooks,
    never_zeroed,
    out_and_in,
    patched_forward,
    penalty,
    plain_step,
    pruned,
    scaled,
    second_backward,
    second_backward_after_zero,
    seen_by_node,
    several_hooks,
    tied_later,
    two_forwards,
    two_forwards_two_backwards,
    two_losses,
    under,
    unlike_batches,
    unused_forward,
    zero_in_place,
)
from tests.support.unusual_modules import (
    WIDTH,
    Complex,
    Conv1D,
    Experts,
    Labelled,
    Mixed,
    Recurrent,
    Renamed,
    Sizes,
    attention,
    autocast_inside,
    bias_frozen_call,
    by_a_copy,
    by_its_class,
    called_with,
    calls_by_rank,
    channels_last,
    checkpointed,
    dual,
    each_row,
    frozen_call,
    functional_use,
    in_one_tensor,
    in_place,
    in_two_threads,
    interpolated,
    jagged,
    many_times,
    net,
    no_grad_call,
    normed,
    one_rank_only,
    own_function,
    recomputed,
    saved_on_cpu,
    saved_rounded,
    shapes,
    tangent,
    tied,
    transposed,
    unused_output,
    with_subclass,
    wrapped,
)


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
    "a hook added after the forward pass": Case(net(), between(hooked)),
    "a weight frozen after the forward pass": Case(net(), between(frozen)),
    "weights changed after the forward pass": Case(net(), between(scaled)),
    "a layer frozen in every second step": Case(net(), frozen_by_turns, UNUSED),
    "a layer pruned in every step": Case(net(), pruned),
    "a backward pass in another thread": Case(net(), backward_in_a_thread),
    "a layer called in two threads": Case(net(in_two_threads)),
    "a copy of the DDP model, trained too": Case(net(), copied_too),
    "a copy of the layer": Case(net(by_a_copy)),
    "activations that are saved rounded": Case(net(saved_rounded)),
    "a backward pass within the backward pass": Case(net(recomputed), ddp=UNUSED),
    "a first backward pass that fails in a layer, with a static graph": Case(
        net(), fails_at_first(in_a_layer), {"static_graph": True}, alike=False
    ),
    "a first backward pass that fails at a weight, with a static graph": Case(
        net(), fails_at_first(at_a_weight), {"static_graph": True}, alike=False
    ),
    "complex numbers": Case(Complex),
    "layers of three dtypes": Case(Mixed, bound=0.02),  # rows are summed in another order in bfloat16
    "layers that some rows of a batch reach": Case(Experts, ddp=UNUSED),
    "parameters that are parts of one tensor": Case(in_one_tensor),
}


def page() -> str:
    """The part of docs/compatibility.md that is made of this table: ``python -m tests.support.unusual_models``."""
    return "\n".join(f"- {name}" for name in CASES)


if __name__ == "__main__":
    print(page())
