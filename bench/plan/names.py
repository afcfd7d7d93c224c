"""Layers by name, many at a time: the same layer of every block is one line."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Sequence

from .model import Layer


@dataclasses.dataclass(frozen=True)
class Group:
    """Layers of one shape whose names differ in their numbers only.

    Args:
        name: with ``*`` for what differs; the layer's own where there is only one.
        layers: in the order of the forward pass.
    """

    name: str
    layers: tuple[Layer, ...]


def groups(layers: Sequence[Layer]) -> list[Group]:
    """All layers, in the order in which each group's first comes."""
    found: dict[tuple[object, ...], list[Layer]] = {}
    for x in layers:
        key = (_pattern(x.name), x.kind, x.parameters, x.flops, x.inputs, x.outputs, x.rows)
        found.setdefault(key, []).append(x)
    return [Group(_common([x.name for x in its]), tuple(its)) for its in found.values()]


def briefly(chosen: Collection[str], layers: Sequence[Layer]) -> str:
    """Names of the chosen ones of these layers, a group at a time."""
    said = []
    for group in groups(layers):
        names = [x.name for x in group.layers if x.name in chosen]
        if len(names) == len(group.layers):
            said.append(group.name)
        elif names:
            said.append(f"{len(names)} of {len(group.layers)} {group.name}")
    return ", ".join(said)


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _common(names: Sequence[str]) -> str:
    """The name with ``*`` for the numbers in which they differ."""
    parts = [re.split(r"(\d+)", name) for name in names]
    return "".join(of[0] if len(set(of)) == 1 else "*" for of in zip(*parts, strict=True))
