"""Form of a state dict: checked before anything of it is used, so that a damaged one is named and changes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

from commlib.codecs.slots import Slot
from commlib.errors import CheckpointMismatch

FORMAT = 1
LEVELS = 2
"""The format of states with slots in units of a node's mean: a version that knows none must not lose them."""

_ROLES = get_args(get_type_hints(Slot)["role"])
_MOST = 1 << 48  # steps: more than anybody takes


def check_form(state: Any) -> None:
    """That a state dict has the keys of one, and under each what belongs there. No value is read.

    Raises:
        CheckpointMismatch: with the key.
    """
    found = state.get("format") if isinstance(state, Mapping) else type(state).__name__
    if type(found) is not int or found != (LEVELS if "nodes" in state else FORMAT):
        raise CheckpointMismatch(f"not a commlib state dict of format {FORMAT} or {LEVELS} (found {found!r:.80})")
    missing = [k for k in ("world_size", "step", "layers", "routes", "ranks") if k not in state]
    if missing:
        raise CheckpointMismatch(f"damaged state dict: it has no {', '.join(missing)}")
    size = state["world_size"]
    _demand(_whole(size, 1), "'world_size'", size, "a number of ranks")
    _demand(_whole(state["step"], 0), "'step'", state["step"], "a number of steps")
    nodes = state.get("nodes", "0")
    _demand(isinstance(nodes, str) and bool(nodes.split()), "'nodes'", nodes, "a list of nodes as text")
    for part in ("layers", "routes"):
        found = state[part]
        _demand(isinstance(found, Mapping), f"{part!r}", found, "a map")
        for name, text in found.items():
            _demand(isinstance(name, str) and isinstance(text, str), f"{part!r}, {name!r:.80}", text, "text")
    ranks = state["ranks"]
    _demand(isinstance(ranks, Mapping), "'ranks'", ranks, "a map")
    for rank, layers in ranks.items():
        real = isinstance(rank, str) and rank.isdecimal() and str(int(rank)) == rank and int(rank) < size
        _demand(real, f"'ranks', {rank!r:.80}", rank, f"one of {size} ranks")
        _demand(isinstance(layers, Mapping), f"rank {rank}", layers, "a map of layers")
        for name, slots in layers.items():
            where = f"rank {rank}, {name!r:.80}"
            _demand(isinstance(name, str), where, name, "a layer's name")
            _demand(isinstance(slots, Mapping), where, slots, "a map of slots")
            for key, entry in slots.items():
                _check_entry(entry, f"{where}, {key!r:.80}", isinstance(key, str))


def lacking(state: Mapping[str, Any]) -> list[int]:
    """The first ranks, eight at most, that a state dict does not have."""
    absent = (r for r in range(state["world_size"]) if str(r) not in state["ranks"])
    return list(itertools.islice(absent, 8))


def check_values(ranks: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> None:
    """That what is in gradient units is rows of its layer, and that all values are finite.

    Args:
        ranks: rank → layer → slot → entry, of a state dict that has its form.
        shapes: layer → its shape.

    Raises:
        CheckpointMismatch: with the key.
    """
    for rank, name, key, entry in _entries(ranks):
        where, value = f"rank {rank}, {name!r:.80}, {key!r:.80}", entry["value"]
        _demand(name in shapes, where, name, "of a layer of this state dict")
        whole = tuple(shapes[name]) or (1,)
        shape, start = tuple(value.shape) or (1,), entry.get("start", 0)
        fits = len(shape) == len(whole) and shape[1:] == whole[1:] and start + shape[0] <= whole[0]
        if entry["role"] != "replicated":
            what = f"rows of {whole}, from row {start}"
            _demand(fits, where, f"of shape {tuple(value.shape)}", what)
        _demand(bool(value.isfinite().all()), where, "NaN or infinite somewhere", "made of finite values")


def _entries(ranks: Mapping[str, Any]) -> Iterator[tuple[str, str, str, Mapping[str, Any]]]:
    for rank, layers in ranks.items():
        for name, slots in layers.items():
            for key, entry in slots.items():
                yield rank, name, key, entry


def _check_entry(entry: Any, where: str, named: bool) -> None:
    _demand(named and isinstance(entry, Mapping), where, entry, "a slot's entry")
    value, role, start = entry.get("value"), entry.get("role"), entry.get("start", 0)
    _demand(isinstance(value, Tensor), f"{where}, 'value'", value, "a tensor")
    dense = value.layout == torch.strided and value.dtype == torch.float32 and not value.is_meta
    _demand(dense, f"{where}, 'value'", f"{value.dtype}, {value.layout} on {value.device}", "dense float32 values")
    _demand(role in _ROLES, f"{where}, 'role'", role, f"one of {', '.join(_ROLES)}")
    _demand(_whole(start, 0), f"{where}, 'start'", start, "a row")


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < _MOST


def _demand(true: bool, where: str, found: Any, wanted: str) -> None:
    if not true:
        shown = found if isinstance(found, str) else f"{type(found).__name__} {found!r:.80}"
        raise CheckpointMismatch(f"damaged state dict: {where} is {shown:.120}, and should be {wanted}")
