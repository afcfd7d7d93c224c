"""A model of one's own, made by ``module:factory`` and run once on the meta device, which computes nothing."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from commlib.bench.models.shapes import find_factory
from commlib.runtime.layers import linear_layers, trained_parameters

from .model import Kind, LayeredModel, ModelLayer

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

_EXAMPLE = re.compile(r"(int:)?([1-9][0-9]{0,8}(?:,[1-9][0-9]{0,8})*)")
_BATCH = 2  # a batch norm wants more than one value
_KINDS: tuple[tuple[Kind, tuple[type, ...]], ...] = (
    ("conv", (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)),
    ("norm", (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)),
    ("embedding", (nn.Embedding, nn.EmbeddingBag)),
    ("attention", (nn.MultiheadAttention,)),
)


def own(name: str, example: str | None) -> LayeredModel:
    """Model that ``module:factory`` returns, counted on an example.

    Linear layers are those whose factors ``commlib.attach`` would exchange.

    Args:
        name: ``module:factory``; the factory is called without arguments. The current directory counts.
        example: shape of one example without the batch: ``3,224,224``; ``int:128`` for 128 whole numbers (tokens).

    Raises:
        ValueError: nothing to call there, it returns no ``nn.Module``, the module cannot be run on such an example,
            or none was given; the message says which.
    """
    if example is None:
        raise ValueError(
            f"model {name!r}: say what one example looks like, so that its FLOPs and rows can be counted: "
            "--input 3,224,224 (or int:128 for 128 tokens)"
        )
    shape, dtype = parse_example(example)
    module = make(name)
    examples = torch.zeros((_BATCH, *shape), dtype=dtype, device="meta")
    try:
        layers = count(module, examples)
    except Exception as e:  # whatever their code does
        raise ValueError(
            f"model {name!r}: cannot be run on the meta device with {_BATCH} examples of --input {example} "
            f"({_said(e)}): is that its shape, and does it take whole numbers (int:128)?"
        ) from e
    if not sum(x.parameters for x in layers):
        raise ValueError(f"model {name!r}: has no parameters that are trained")
    if not sum(x.flops for x in layers):
        raise ValueError(f"model {name!r}: has no matrix product or convolution whose time could be told")
    return LayeredModel(name, layers, example.replace(",", " × "), 32)


def parse_example(text: str) -> tuple[tuple[int, ...], torch.dtype]:
    """``"3,224,224"`` → its shape and float32; ``"int:128"`` → int64.

    Raises:
        ValueError: no such thing.
    """
    match = _EXAMPLE.fullmatch(text.replace(" ", ""))
    if match is None:
        raise ValueError(f"--input is the shape of one example, as 3,224,224, or int:128 for tokens; got {text!r}")
    return tuple(map(int, match[2].split(","))), torch.int64 if match[1] else torch.float32


def make(name: str) -> nn.Module:
    """The module, on the meta device.

    Raises:
        ValueError: as :func:`own`.
    """
    factory = find_factory(name)
    try:
        with torch.device("meta"):
            made = factory()
    except Exception as e:
        raise ValueError(f"model {name!r}: the factory failed on the meta device ({_said(e)})") from e
    if not isinstance(made, nn.Module):
        raise ValueError(
            f"model {name!r}: returned {type(made).__name__}; a plan needs an nn.Module, to count its FLOPs"
        )
    return made.to("meta")


def count(module: nn.Module, examples: Tensor) -> tuple[ModelLayer, ...]:
    """Layers in the order in which the forward pass first calls them, with FLOPs and rows of one example.

    A parameter belongs to the module that has it, or where that is not called, to the nearest called one around it; one
    that is shared, to the first that is called. FLOPs outside of any inner module are the outer one's.

    Args:
        module: the model.
        examples: a batch; its first dimension counts the examples.
    """
    from torch.utils.flop_counter import FlopCounterMode  # brings Triton along, which takes longer than all of commlib

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        calls = _Calls(counter)
        hooks = [h for m in module.modules() for h in calls.watch(m)]
        try:
            module.train()(examples)
        finally:
            for hook in hooks:
                hook.remove()
    batch = len(examples)
    factorable = linear_layers(module)
    names = {m: name for name, m in module.named_modules()}
    sizes = _sizes(module, list(calls.flops))
    layers = []
    for m, flops in calls.flops.items():
        name = names[m]
        rows = calls.rows.get(m, 0) // batch if name in factorable else 0
        if rows and isinstance(m, nn.Linear):
            found = ModelLayer(name, "linear", sizes[m], flops // batch, m.in_features, m.out_features, rows)
        else:
            found = ModelLayer(name or type(m).__name__, _kind(m), sizes[m], flops // batch)
        if found.parameters or found.flops:
            layers.append(found)
    return tuple(layers)


def _kind(m: nn.Module) -> Kind:
    for kind, types in _KINDS:
        if isinstance(m, types):
            return kind
    return "other"


class _Calls:
    """Which modules are called, in their order, with FLOPs (without those of modules they call) and rows."""

    def __init__(self, counter: FlopCounterMode) -> None:
        self.flops: dict[nn.Module, int] = {}
        self.rows: dict[nn.Module, int] = {}
        self._counter = counter
        self._open: list[list[int]] = []  # FLOPs until a call under way began; of the calls it made

    def watch(self, m: nn.Module) -> tuple[torch.utils.hooks.RemovableHandle, torch.utils.hooks.RemovableHandle]:
        return m.register_forward_pre_hook(self._before), m.register_forward_hook(self._after)

    def _before(self, m: nn.Module, inputs: object) -> None:
        self.flops.setdefault(m, 0)
        self._open.append([self._counter.get_total_flops(), 0])

    def _after(self, m: nn.Module, inputs: object, out: object) -> None:
        begin, inner = self._open.pop()
        spent = self._counter.get_total_flops() - begin
        self.flops[m] += spent - inner
        if self._open:
            self._open[-1][1] += spent
        if isinstance(m, nn.Linear) and isinstance(out, Tensor):
            self.rows[m] = self.rows.get(m, 0) + out.numel() // m.out_features


def _sizes(module: nn.Module, called: list[nn.Module]) -> dict[nn.Module, int]:
    """Called module → trained values that are its own."""
    order = {m: i for i, m in enumerate(called)}
    modules = dict(module.named_modules())
    owner: dict[int, nn.Module] = {}  # of each parameter
    for name, m in modules.items():
        around = m
        while around not in order:
            name = name.rpartition(".")[0]
            around = modules[name]
        for p in m.parameters(recurse=False):
            first = owner.setdefault(id(p), around)
            owner[id(p)] = min(first, around, key=order.__getitem__)
    sizes = dict.fromkeys(called, 0)
    for p in trained_parameters(module).values():
        sizes[owner[id(p)]] += p.numel()
    return sizes


def _said(e: Exception) -> str:
    """An error in one line."""
    return f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
