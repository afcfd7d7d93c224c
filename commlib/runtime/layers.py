"""Layers of a model: what its parameters are called, what they are, and what a route is chosen for."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Kind = Literal["linear.weight", "conv.weight", "embedding.weight", "norm", "bias", "other"]


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """Specification of a layer: one parameter, as every rank sees it, for which a route is chosen.

    Args:
        name: fully qualified parameter name, without DDP's or torch.compile's prefixes.
        shape: the parameter's shape; ``()`` is a scalar. A complex one has one more dimension, of 2 (:func:`real`).
        dtype: the gradient's dtype; must be floating point, as the parts of a complex value are.
        device: where the gradient lives.
        kind: the role of the parameter in its module.
        rows: K, the batch rows seen per step, where the gradient factors and K is known; otherwise None.
        layer: the name of the linear layer whose rows its gradient is made of (``exchange.factors``); otherwise None.
        sparse: whether its gradient has only the rows that were looked up (an embedding with ``sparse=True``).

    Raises:
        TypeError: if ``dtype`` is not a real floating-point type.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    kind: Kind = "other"
    rows: int | None = None
    layer: str | None = None
    sparse: bool = False

    def __post_init__(self) -> None:
        if not self.dtype.is_floating_point:
            raise TypeError(
                f"parameter {self.name!r} is {self.dtype}: only real floating-point gradients can be "
                "compressed; freeze it (requires_grad=False) or keep it as a buffer"
            )

    @classmethod
    def of(cls, x: Tensor, name: str = "tensor") -> LayerSpec:
        """The spec of a bare tensor."""
        return _spec(name, tuple(x.shape), x.dtype, x.device)

    @property
    def numel(self) -> int:
        """Number of values."""
        return _product(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the uncompressed gradient."""
        return self.numel * self.dtype.itemsize

    def layout(self) -> str:
        """Shape and dtype as text: ``300x64 float32``."""
        return f"{'x'.join(map(str, self.shape)) or 'scalar'} {str(self.dtype).removeprefix('torch.')}"

    @property
    def matrix(self) -> tuple[int, int]:
        """(rows, columns) of the gradient seen as a matrix: dimension 0 against all others."""
        if len(self.shape) < 2:
            return self.numel, 1
        return self.shape[0], _product(self.shape[1:])

    def row_slice(self, start: int, stop: int) -> LayerSpec:
        """The spec of rows ``start:stop`` along dimension 0."""
        return dataclasses.replace(self, shape=(stop - start, *self.shape[1:]))


def real(x: Tensor) -> Tensor:
    """A tensor as its real values: a complex one, shape (…), as its real and imaginary parts, shape (…, 2), a view."""
    return torch.view_as_real(x.detach()) if x.is_complex() else x


def _product(shape: tuple[int, ...]) -> int:
    n = 1
    for s in shape:
        n *= s
    return n


@functools.lru_cache(maxsize=4096)  # a codec asks for the same again in every step
def _spec(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> LayerSpec:
    return LayerSpec(name=name, shape=shape, dtype=dtype, device=device)


_CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORM = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)


def inside(module: nn.Module) -> nn.Module:
    """The model that a DDP wraps; any other module itself."""
    inner: nn.Module = module.module if isinstance(module, DistributedDataParallel) else module
    return inner


class SubModel(nn.Module):
    """Some parameters of a model, under the names and in the modules that they have there.

    Args:
        model: the whole.
        names: of the trained parameters that are part of it.
    """

    def __init__(self, model: nn.Module, names: Collection[str]) -> None:
        super().__init__()
        self._whole, self._chosen = [model], frozenset(names)  # in a list it is no module of this one

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters that were chosen, by name."""
        everything = nn.Module.named_parameters(self._whole[0], *args, **kwargs)
        return ((n, p) for n, p in everything if plain_name(n) in self._chosen)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """All of the model."""
        yield from self._whole[0].named_modules(*args, **kwargs)


def all_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Name → parameter for all of a module, under the names of the modules that hold them; shared ones once.

    A wrapper may give out others, as ``checkpoint_wrapper`` does, and those are not the names of its modules.
    """
    return dict(module.named_parameters() if isinstance(module, SubModel) else nn.Module.named_parameters(module))


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Name → parameter for all that need a gradient; shared ones once, under their first name.

    The prefixes that wrappers add are left out (:func:`plain_name`), so a checkpoint does not depend on them.
    """
    return {plain_name(n): p for n, p in all_parameters(module).items() if p.requires_grad}


def layer_specs(module: nn.Module, left_out: Collection[str] = ()) -> list[LayerSpec]:
    """The specs of :func:`trained_parameters`, in the same order.

    Args:
        module: the model inside DDP.
        left_out: parameters that DDP does not reduce (names as :func:`all_parameters` has them): they have no spec.

    Raises:
        ValueError: the weight of an embedding with ``sparse=True`` that others use, too; nothing to train.
    """
    kinds, sparse = kinds_of(module), {id(p): name for name, p in sparse_weights(module).items()}
    ignored = {id(p) for name, p in all_parameters(module).items() if name in left_out}
    layers = {id(p): name for name, m in linear_layers(module, left_out).items() for p in m.parameters()}
    specs = [
        LayerSpec(
            name,
            tuple(real(p).shape),
            real(p).dtype,
            p.device,
            kinds.get(name, "other"),
            layer=layers.get(id(p)),
            sparse=id(p) in sparse,
        )
        for name, p in trained_parameters(module).items()
        if id(p) not in ignored
    ]
    if not specs:
        raise ValueError("the model has no parameter that requires a gradient: there is nothing to exchange")
    return specs


def linear_layers(module: nn.Module, left_out: Collection[str] = ()) -> dict[str, nn.Linear]:
    """Name → layer for every ``nn.Linear`` whose gradient is made of the rows that pass through it, and of no others.

    Those are plain ones (a subclass may do anything) with trained parameters that no other module has, contiguous in
    memory and not empty, none of them ``left_out`` of DDP (names as :func:`all_parameters` has them).
    """
    ignored = {id(p) for name, p in all_parameters(module).items() if name in left_out}
    modules = dict(module.named_modules())
    uses = collections.Counter(id(p) for m in modules.values() for p in m._parameters.values() if p is not None)
    found = {}
    for name, m in modules.items():
        if type(m) is nn.Linear and set(m._parameters) == {"weight", "bias"}:  # neither parametrized nor normed
            own = [p for p in m._parameters.values() if p is not None]
            known = all(p.requires_grad and uses[id(p)] == 1 and id(p) not in ignored for p in own)
            if own and known and all(p.is_contiguous() and p.numel() for p in own):
                found[plain_name(name)] = m
    return found


def check_frozen_integers(module: nn.Module, names: Mapping[str, object]) -> None:
    """Raises TypeError if a rule names, without wildcards, a parameter that has no gradient to compress."""
    for full, p in all_parameters(module).items():
        name = plain_name(full)
        if name in names and not p.requires_grad:
            inexact = p.is_floating_point() or p.is_complex()
            what = "is frozen (requires_grad=False)" if inexact else f"is {p.dtype}"
            raise TypeError(f"rule {name!r}: the parameter {what}, so it has no gradient to compress; remove the rule")


_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""Attributes in which ``torch.compile``, ``checkpoint_wrapper`` and ``offload_wrapper`` keep the module they wrap."""


def plain_name(name: str) -> str:
    """A parameter's or module's name without what wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def sparse_weights(module: nn.Module) -> dict[str, Tensor]:
    """Name → parameter for the trained weights of embeddings with ``sparse=True``: their gradients are sparse.

    Raises:
        ValueError: others use one of them, too: then its gradient is sparse in part only.
    """
    found: dict[str, Tensor] = {}
    uses = collections.Counter(id(p) for m in module.modules() for p in m._parameters.values() if p is not None)
    tables = [(n, m) for n, m in module.named_modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse]
    alike = collections.Counter(id(m.weight) for _, m in tables)
    for prefix, m in tables:
        name = plain_name(f"{prefix}.weight" if prefix else "weight")
        if uses[id(m.weight)] != alike[id(m.weight)]:
            raise ValueError(
                f"{name} is of an embedding with sparse=True, and other modules use it, too: their gradients of it are "
                "dense, and DDP exchanges one kind; set sparse=False"
            )
        if m.weight.requires_grad:
            found.setdefault(name, m.weight)
    return found


def refuse_complex(module: nn.Module, who: str) -> None:
    """Raises TypeError if a trained parameter is complex: ``who`` exchanges real values only."""
    for name, p in trained_parameters(module).items():
        if p.is_complex():
            raise TypeError(
                f"parameter {name!r} is {p.dtype}, and {who} exchanges real values only: keep it as its real and "
                "imaginary parts (torch.view_as_complex in forward), or wrap the model in DDP and commlib.attach() to "
                "that"
            )


def refuse_sparse(module: nn.Module, who: str) -> None:
    """Raises ValueError if an embedding has ``sparse=True``: ``who`` exchanges dense gradients only."""
    for name in sparse_weights(module):
        raise ValueError(
            f"{name} is of an embedding with sparse=True, and {who} exchanges no sparse gradients: set sparse=False, "
            "or wrap the model in DDP and commlib.attach() to that, which does"
        )


def kinds_of(module: nn.Module) -> dict[str, Kind]:
    """Parameter → its role."""
    kinds: dict[str, Kind] = {}
    for prefix, m in module.named_modules():
        for local in (n for n, p in m._parameters.items() if p is not None):
            name = plain_name(f"{prefix}.{local}" if prefix else local)
            kinds.setdefault(name, _kind(m, local))
    return kinds


def _kind(m: nn.Module, local: str) -> Kind:
    if isinstance(m, _NORM):
        return "norm"
    if local.startswith("bias"):
        return "bias"
    if local == "weight":
        if isinstance(m, nn.Linear):
            return "linear.weight"
        if isinstance(m, _CONV):
            return "conv.weight"
        if isinstance(m, nn.Embedding):
            return "embedding.weight"
    return "other"


def one_device(specs: list[LayerSpec]) -> torch.device:
    """The device of all layers.

    Raises:
        ValueError: they are on several kinds of device.
    """
    kinds = {s.device.type for s in specs}
    if len(kinds) > 1:
        raise ValueError(f"parameters on {', '.join(sorted(kinds))}: all must be on one kind of device")
    return specs[0].device


def name_of(parameter: Tensor, names: Mapping[int, str]) -> str:
    """The name under which a parameter that DDP reduces was planned.

    Args:
        parameter: of DDP's bucket.
        names: ``id`` of each planned parameter → its name.

    Raises:
        ValueError: it was not planned.
    """
    name = names.get(id(parameter))
    if name is None:
        raise ValueError(
            f"DDP reduces a parameter of shape {tuple(parameter.shape)} that was frozen when commlib was attached: "
            "freeze parameters before wrapping the model in DDP, or after attaching"
        )
    return name
