"""Public reports of trouble with DDP and what is used with it, each with a small model and loop: a table, and its page.

``python -m tests.support.public_reports`` prints the table of docs/reports.md.
"""

from __future__ import annotations

import dataclasses
import re

import torch
from torch import nn
from torch.distributed.nn.functional import all_gather

from tests.support.reported_models import (
    FLAT,
    STATIC,
    VIEWS,
    NoneForWeight,
    Outputs,
    accumulates_at_once,
    accumulates_later,
    alternating,
    by_key,
    by_turns,
    cell,
    chain,
    clip,
    conditioned,
    contrast,
    curvature,
    depthwise,
    detached_in_place,
    dropped_before,
    dropped_layers,
    embedded,
    energy,
    experts,
    frozen_double_last,
    gathered,
    joined,
    moved_away,
    new_parameter,
    of_complex,
    of_dataclass,
    of_two_types,
    one_part_at_a_time,
    other_layer_before,
    other_order,
    own_scale,
    parts,
    penalty_on_the_gradient,
    pointwise,
    projected,
    recycled,
    redirected,
    reduced_by_hand,
    reduced_inside,
    reentrant,
    replaced_gradients,
    scalar,
    shared_in_checkpoints,
    sharpness_aware,
    skipped_together,
    some_keys,
    some_rows,
    spectral,
    synced_at_last,
    tangents,
    touched,
    truncated,
    two,
    two_frames,
    under_two_names,
    with_buffer,
    with_graph,
    with_statistics,
    zero_on_one,
    zeroed_in_place,
)
from tests.support.unusual_loops import two_forwards
from tests.support.unusual_models import UNUSED, Case
from tests.support.unusual_modules import WIDTH


@dataclasses.dataclass(frozen=True)
class Report:
    """A thread, and what of it is tried here.

    Attributes:
        title: of the thread.
        url: of the thread.
        situation: what its author did.
        case: the same as a small model and loop; None where a test of its own has it.
        raises: what plain DDP's error begins with; empty where it trains.
        test: the test of its own, if it has one.
        beside: what commlib is compared to.
    """

    title: str
    url: str
    situation: str
    case: Case | None = None
    raises: str = ""
    test: str = ""
    beside: str = "DDP"

    @property
    def thread(self) -> str:
        """As GitHub abbreviates it."""
        owner, name, _, number = self.url.removeprefix("https://github.com/").split("/")
        return f"{owner}/{name}#{number}"

    @property
    def result(self) -> str:
        """What is shown of it."""
        if self.raises:
            return f"{self.beside}'s own error: “{self.raises}”"
        apart = self.case is not None and not self.case.alike
        return f"{self.beside}'s gradients" + ("; ranks have different ones, as with plain DDP" if apart else "")


GITHUB = "https://github.com/"
PYTORCH, LIGHTNING = GITHUB + "pytorch/pytorch/", GITHUB + "Lightning-AI/pytorch-lightning/"
ACCELERATE = GITHUB + "huggingface/accelerate/"
TWICE = "Expected to mark a variable ready only once"
REPORTS = (
    Report(
        'DDP error, when I use "if" branch in forward function.',
        PYTORCH + "issues/47824",
        "A video model has one decoder under two names, and calls it by one in the first frame and by the other later.",
        Case(under_two_names, two_frames),
    ),
    Report(
        'Error with DistributedDataParallel and parameter_sharing="layerwise"',
        GITHUB + "tatp22/linformer-pytorch/issues/23",
        "A layer that several blocks share is inside the reentrant checkpoint of each of them.",
        Case(two(shared_in_checkpoints), alike=False),
    ),
    Report(
        "torch.utils.checkpoint + DDP",
        GITHUB + "microsoft/FocalNet/issues/4",
        "Blocks are in reentrant checkpoints; with a static graph a layer may be in several.",
        Case(two(shared_in_checkpoints), ddp=STATIC),
    ),
    Report(
        "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. …",
        ACCELERATE + "issues/2017",
        "Gradient checkpointing (reentrant) is used with find_unused_parameters.",
        Case(two(reentrant), ddp=UNUSED),
        TWICE,
    ),
    Report(
        "DDP usage example",
        GITHUB + "isl-org/MultiObjectiveOptimization/issues/47",
        "Two losses have a backward pass each through one graph, and only one of them uses the second head.",
        Case(two(lambda m, x: (m.a(x), m.b(torch.tanh(m.a(x))))), projected),
        TWICE,
    ),
    Report(
        "support distributed training",
        GITHUB + "WeiChengTseng/Pytorch-PCGrad/issues/5",
        "PCGrad: a backward pass for each loss with retain_graph; then projected gradients are written.",
        Case(two(lambda m, x: (m.a(torch.tanh(m.b(x))), m.b(torch.tanh(m.a(x))))), projected, alike=False),
    ),
    Report(
        "The self-conditioning part",
        GITHUB + "Yuanhy1997/SeqDiffuSeq/issues/25",
        "In half of the passes, which each rank draws, the model first sees its own output, made without grad.",
        Case(two(chain), conditioned),
    ),
    Report(
        "DDP only syncs parameters used in most recent pass when `find_unused_parameters` is True.",
        PYTORCH + "issues/69031",
        "A layer is used in a pass under no_sync, but not in the pass that exchanges.",
        Case(two(by_turns), other_layer_before, UNUSED),
    ),
    Report(
        "Cannot update part of the parameters in DistributedDataParallel.",
        PYTORCH + "issues/22049",
        "Two parts of a model are trained by turns, and the other part is called without grad.",
        Case(two(one_part_at_a_time), alternating, UNUSED),
    ),
    Report(
        "Wrong gradients when using DistributedDataParallel and autograd.grad.",
        PYTORCH + "issues/47562",
        "The loss has a penalty on the gradient of all parameters, by autograd.grad with create_graph.",
        Case(two(chain), penalty_on_the_gradient),
    ),
    Report(
        "DDP Gradient reduction is not triggered after calling autograd.backward()",
        PYTORCH + "issues/63740",
        "The backward pass is a product with the Hessian: autograd.backward of what autograd.grad gave.",
        Case(two(chain), curvature),
    ),
    Report(
        "Calling backward with create_graph on the output of a DistributedDataParallel throws error",
        PYTORCH + "issues/63812",
        "The backward pass has create_graph=True; a parameter is a scalar.",
        Case(two(lambda m, x: chain(m, x) * m.p.pow(2), p=scalar(1.5)), with_graph),
        "a leaf Variable that requires grad is being used in an in-place operation",
    ),
    Report(
        "Using `torch.utils.checkpoint.checkpoint_sequential` and `torch.autograd.grad` breaks when used in "
        "combination with `DistributedDataParallel`",
        PYTORCH + "issues/24005",
        "Forward returns the gradient of an energy by its input; the energy's layers are in checkpoint_sequential.",
        Case(two(energy)),
    ),
    Report(
        "AccumulateGrad short circuits before calling variable hooks when the incoming grad is None",
        PYTORCH + "issues/60796",
        "A function of one's own gives None for a weight's gradient.",
        Case(two(lambda m, x: m.b(NoneForWeight.apply(x, m.a.weight) + m.a.bias))),
    ),
    Report(
        "When using DDP, model outputs that are are custom dataclasses would make things silently wrong",
        PYTORCH + "issues/124666",
        "Forward returns a dataclass, and does not use one of the layers.",
        Case(parts(lambda m, x: Outputs(m.a(x), m.b(x))), of_dataclass, UNUSED),
    ),
    Report(
        "Backward hangs with DDP during training.",
        PYTORCH + "issues/49321",
        "Forward takes a dict and returns a dict; each rank has other keys, and calls the parts that belong to them.",
        Case(two(by_key), some_keys, UNUSED),
    ),
    Report(
        "Hanging on when one gpu node return zero as loss in the context of distributed data parallel training",
        PYTORCH + "issues/23425",
        "A rank without ground truth multiplies its loss by zero.",
        Case(two(chain), zero_on_one),
    ),
    Report(
        "fix(speculative): keep DFlash DDP ranks in lockstep on no-valid-anchor skips",
        GITHUB + "NVIDIA-NeMo/Automodel/pull/2468",
        "Ranks agree after the forward pass to drop a batch, and have no backward pass for it.",
        Case(two(chain), skipped_together),
    ),
    Report(
        "Inconsistent Gradients with DDP and AMP when GradScaler Scales Differ Across Processes",
        PYTORCH + "issues/136009",
        "Ranks have different loss scales, and each divides by its own.",
        Case(two(chain), own_scale, alike=False),
    ),
    Report(
        'Spurious "Grad strides do not match bucket view strides" warning for 1x1 convolution',
        PYTORCH + "issues/157862",
        "A 1×1 convolution gets a channels_last batch.",
        Case(two(pointwise, a=lambda: nn.Conv2d(2, 2, 1)), ddp=VIEWS),
    ),
    Report(
        "A warning appears in DDP using ConvNeXt",
        GITHUB + "facebookresearch/ConvNeXt/issues/142",
        "A depthwise convolution is called with a permuted batch.",
        Case(two(depthwise, a=lambda: nn.Conv2d(2, 2, 3, padding=1, groups=2))),
    ),
    Report(
        "DDP + Complex Dtype Appears to be Bugged",
        PYTORCH + "issues/158753",
        "Complex and real layers are in one model; passes are under no_sync, gradients all-reduced by hand.",
        Case(
            parts(
                of_complex,
                a=lambda: nn.Linear(WIDTH, WIDTH, dtype=torch.complex64),
                b=lambda: nn.Linear(WIDTH, WIDTH, dtype=torch.complex64),
            ),
            reduced_by_hand,
        ),
    ),
    Report(
        "DistributedDataParallel does not get the same grad at all.",
        PYTORCH + "issues/12603",
        "A layer gets a new parameter after DDP was made.",
        Case(two(chain), before=new_parameter),
        "Expected to have finished reduction in the prior iteration",
    ),
    Report(
        "Extremely weird DDP issue for train_second.py",
        GITHUB + "yl4579/StyleTTS2/issues/7",
        "A discriminator with nn.utils.spectral_norm is called twice before the backward pass; buffers are not sent.",
        Case(spectral, two_forwards, FLAT),
    ),
    Report(
        "`RuntimeError: inplace operation` when doing two forward passes through DDP-wrapped BatchNorm module "
        "(PyTorch ≥ 2.6)",
        PYTORCH + "issues/175024",
        "A discriminator with BatchNorm is called twice before the backward pass.",
        Case(with_statistics, two_forwards),
    ),
    Report(
        "Inplace error if DistributedDataParallel module that contains a buffer is called twice",
        PYTORCH + "issues/22095",
        "Outputs are multiplied with a buffer; the model is called twice before the backward pass.",
        Case(with_buffer, two_forwards),
    ),
    Report(
        "RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation",
        GITHUB + "rosinality/stylegan2-pytorch/issues/236",
        "A discriminator with BatchNorm is called twice, with broadcast_buffers=False.",
        Case(with_statistics, two_forwards, FLAT),
    ),
    Report(
        "Static graph training fails if forward is called multiple times before backward",
        PYTORCH + "issues/58111",
        "With a static graph, a forward pass has no backward pass.",
        Case(two(chain), dropped_before, STATIC),
    ),
    Report(
        "DDP static graph fails for static model",
        PYTORCH + "issues/97030",
        "With a static graph, the loss uses one of two outputs, each of a layer of its own.",
        Case(two(lambda m, x: (m.a(x), m.b(x))), lambda ddp, x, rank: ddp(x)[0].sum().backward(), STATIC),
        "Expected to have finished reduction in the prior iteration",
    ),
    Report(
        "Training with devices > 1 and accumulate_grad_batches > 1 fails",
        GITHUB + "Noble-Lab/casanovo/issues/512",
        "With a static graph, the first pass is under no_sync.",
        Case(two(chain), accumulates_at_once, STATIC),
        "expect_autograd_hooks_ INTERNAL ASSERT FAILED",
    ),
    Report(
        "DDP model synchronization issue when static_graph=True",
        LIGHTNING + "issues/20704",
        "With a static graph, passes are under no_sync after a first step that exchanges.",
        Case(two(chain), accumulates_later, STATIC),
    ),
    Report(
        "Fix LightningModule step methods bypassing DDP wrapper in Fabric",
        LIGHTNING + "pull/17424",
        "Another method goes through DDP's forward: the model's forward is replaced for one call.",
        Case(two(chain), redirected),
    ),
    Report(
        "how to use multiple GPUs,the default is to use the first CUDA device",
        GITHUB + "openai/CLIP/issues/111",
        "A contrastive loss of all ranks' features, gathered after the forward pass; the temperature is a scalar.",
        Case(two(clip, scale=scalar()), contrast(gathered)),
    ),
    Report(
        "`gather-with-grad` without `local-loss`?",
        GITHUB + "mlfoundations/open_clip/issues/616",
        "The same by an all-gather with a gradient, which sends during the backward pass.",
        Case(two(clip, scale=scalar()), contrast(lambda y: torch.cat(all_gather(y)))),
    ),
    Report(
        "Training Tips for multiple GPUs may be invalid!",
        GITHUB + "davda54/sam/issues/78",
        "SAM: a pass under no_sync, a step uphill by this rank's gradient, a pass that exchanges, the step taken back.",
        Case(two(chain), sharpness_aware),
    ),
    Report(
        "torch.func.jvp fails when acting on a DistributedDataParallel model",
        PYTORCH + "issues/102197",
        "torch.func.jvp of the DDP model itself.",
        Case(two(chain), tangents),
        "Cannot access data pointer of Tensor that doesn't have storage",
    ),
    Report(
        "TypeError: cannot pickle 'torch._C._distributed_c10d._ProcessGroupWrapper' object",
        PYTORCH + "issues/73825",
        "The model all-reduces activations in its forward pass.",
        Case(two(reduced_inside)),
    ),
    Report(
        "nn.Embedding with max_norm shows unstable behavior and causes sometimes runtime error.",
        PYTORCH + "issues/26596",
        "An embedding with max_norm changes its weight in the forward pass, and the weight is used elsewhere, too.",
        Case(two(embedded, a=lambda: nn.Embedding(WIDTH, WIDTH, max_norm=1.0))),
    ),
    Report(
        "Fix truncated_bptt_steps hiddens detach() and improve docs",
        LIGHTNING + "pull/8145",
        "Truncated backpropagation through time: a hidden state goes from pass to pass, detached.",
        Case(parts(cell), truncated),
    ),
    Report(
        "DPP training incompatibility with checkpoint and detach",
        PYTORCH + "issues/83074",
        "A layer is called several times (recycling), and all results but the last are detached in place.",
        Case(two(recycled)),
    ),
    Report(
        "DistributedDataParallel fails for Stochastic Depth",
        GITHUB + "catalyst-team/catalyst/issues/1110",
        "Each rank drops another layer in each step.",
        Case(parts(dropped_layers, scale=scalar()), ddp=UNUSED),
    ),
    Report(
        "[Feature request] Efficient stochastic path without unused layers",
        GITHUB + "lucidrains/x-transformers/issues/294",
        "A layer is called with some of the batch's rows, as many as each rank draws, and added by index_add.",
        Case(two(some_rows)),
    ),
    Report(
        "Option to let DistributedDataParallel know in advance unused parameters at each forward pass",
        PYTORCH + "issues/90171",
        "A function of one's own takes the parameters that are not used, and gives zeros for their gradients.",
        Case(parts(touched)),
    ),
    Report(
        'Back out "Make grad point to bucket buffer in DDP to save memory usage"',
        PYTORCH + "pull/43557",
        "With gradient_as_bucket_view, gradients are zeroed by detach_ and zero_.",
        Case(two(chain), detached_in_place, VIEWS),
        "Can't detach views in-place",
    ),
    Report(
        "[ShardedDDP] Intercept zero_grad()",
        GITHUB + "facebookresearch/fairscale/issues/354",
        "With gradient_as_bucket_view, gradients are zeroed in place in one step, and set to None in another.",
        Case(two(chain), zeroed_in_place, VIEWS),
    ),
    Report(
        "(PyTorch1.1 and 1.2) RuntimeError: Can't detach views in-place. Use detach() instead",
        PYTORCH + "issues/25814",
        "Gradients are replaced by views of processed ones, and the next pass adds to them.",
        Case(two(chain), replaced_gradients),
    ),
    Report(
        "[c10d] Fixed DistributedDataParallel cannot kick off all-reduce in a corner case",
        PYTORCH + "pull/14675",
        "The last parameter is frozen, and alone has its type.",
        Case(frozen_double_last),
    ),
    Report(
        "Added mixed-precision support in distributed training",
        PYTORCH + "pull/4891",
        "Layers of one model have different types.",
        Case(parts(of_two_types, b=lambda: nn.Linear(WIDTH, WIDTH, dtype=torch.float64))),
    ),
    Report(
        "DDP Uneven inputs join() API doesn't work with model.no_sync()",
        PYTORCH + "issues/44425",
        "Ranks have different numbers of batches, under join, and accumulate under no_sync.",
        Case(two(chain), joined, alike=False),
    ),
    Report(
        "[DDP] Rebuild gradient buckets when computation graph changes",
        PYTORCH + "pull/162667",
        "From the third step on layers are called in another order.",
        Case(two(other_order), alternating),
    ),
    Report(
        "fix: handle zero active experts for 1 ep rank in GroupedExperts",
        GITHUB + "NVIDIA-NeMo/Automodel/pull/935",
        "A mixture of experts: each gets the rows that chose it, and some get none.",
        Case(parts(experts, d=lambda: nn.Linear(WIDTH, WIDTH))),
    ),
    Report(
        "DDP: moving model to CPU and back to GPU breaks gradient synchronization",
        PYTORCH + "issues/104336",
        "In mid-training the DDP model is moved away and back; here to float64 and back. DDP averages no more.",
        Case(two(chain), moved_away, alike=False),
    ),
    Report(
        "Better control over DDP's `no_sync`",
        ACCELERATE + "issues/1726",
        "All forward passes are under no_sync, and DDP is told to exchange in the last of their backward passes.",
        Case(two(chain), synced_at_last),
    ),
)

FRAMEWORKS = (
    Report(
        "fix: model.set_requires_gradient_sync(False) should be called to turn off gradient synchronization in FSDP2",
        ACCELERATE + "pull/3762",
        "FSDP2: gradients are accumulated with set_requires_gradient_sync(False).",
        test="test_fsdp2_trains_as_without",
        beside="FSDP2",
    ),
    Report(
        "FSDP Blocks LoRA Gradient Flow in Layers 1-31 (1% Coverage)",
        GITHUB + "meta-pytorch/torchforge/issues/592",
        "FSDP2: low-rank adapters are trained beside frozen layers of the same unit.",
        test="test_fsdp2_trains_as_without",
        beside="FSDP2",
    ),
    Report(
        "[FSPD2] Can FSDP modules share parameters?",
        GITHUB + "pytorch/torchtitan/issues/2817",
        "FSDP2: two modules that have a submodule in common are one unit, by fully_shard of a list.",
        test="test_fsdp2_trains_as_without",
        beside="FSDP2",
    ),
    Report(
        "torch.compile + DDP + activation checkpointing not working",
        PYTORCH + "issues/108269",
        "torch.compile of a DDP model whose layers are in checkpoint_wrapper.",
        test="test_a_compiled_model_with_checkpoints_trains_as_without",
        beside="compiled DDP",
    ),
    Report(
        "Fix GAN training exmaple using DDP due to find_unused_parameters",
        LIGHTNING + "issues/20866",
        "Lightning: a GAN in one module, with manual optimization, toggle_optimizer and find_unused_parameters.",
        test="test_a_gan_of_lightning_trains_as_without",
        beside="Lightning",
    ),
)
CASES = {r.thread: r.case for r in REPORTS if r.case is not None}


def escaped(text: str) -> str:
    return re.sub(r"([\[\]|])", r"\\\1", text)


def page() -> str:
    """The table of docs/reports.md."""
    head = "| report | situation | result with commlib |\n|---|---|---|\n"
    return head + "".join(
        f"| [{r.thread}]({r.url}): {escaped(r.title)} | {escaped(r.situation)} | {escaped(r.result)} |\n"
        for r in (*REPORTS, *FRAMEWORKS)
    )


if __name__ == "__main__":
    print(page(), end="")
