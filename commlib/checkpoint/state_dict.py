"""State dicts: every rank's own, merged for a set of ranks, and fitted to another number of ranks.

Layout (strings, numbers and tensors only; keys differ from rank to rank, so a distributed checkpoint keeps them all)::

    {"format": 1, "world_size": P, "step": n, "layers": {name: "shape dtype"}, "routes": {name: route},
     "nodes": "0,1 2,3",  # under a hierarchy only, and then the format is 2
     "ranks": {"0": {name: {slot: {"value": float32 tensor, "role": …, "start": row}}}, …}}
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from commlib.checkpoint.state_form import FORMAT, LEVELS, check_form, check_values, lacking
from commlib.codecs import residuals
from commlib.codecs.base import LayerSpec, Slot
from commlib.codecs.memory_store import MemoryStore
from commlib.codecs.slots import NODE, OWNER
from commlib.errors import CheckpointMismatch
from commlib.exchange.hierarchy import Hierarchy, HierarchyShare, share
from commlib.groups.world import World
from commlib.planning.plan import Plan, PlannedLayer

_log = logging.getLogger("commlib")

StateDict = dict[str, Any]


def to_state(plan: Plan, store: MemoryStore, world: World, step: int, hierarchy: Hierarchy | None = None) -> StateDict:
    """This rank's state."""
    return {
        **({"format": FORMAT} if hierarchy is None else {"format": LEVELS, "nodes": str(hierarchy)}),
        "world_size": world.size,
        "step": step,
        "layers": _layers(plan),
        "routes": _routes(plan),
        "ranks": {str(world.rank): store.export()},
    }


def merge_state_dicts(states: Sequence[StateDict]) -> StateDict:
    """Merge the state dicts of all ranks of a run; any rank of any number of ranks can load the result.

    Raises:
        ValueError: nothing to merge.
        CheckpointMismatch: the parts come from different runs or steps, or a rank is there twice.
    """
    if not states:
        raise ValueError("no state dicts to merge: pass the state_dict() of every rank")
    for state in states:
        check_form(state)
    merged = {**states[0], "ranks": {}}
    for state in states:
        for key in ("format", "world_size", "nodes", "step", "layers", "routes"):
            one, other = merged.get(key), state.get(key)
            if one != other:
                raise CheckpointMismatch(
                    f"state dicts of different runs: {key} is {one!r} in one and {other!r} in another"
                )
        twice = set(state["ranks"]) & set(merged["ranks"])
        if twice:
            raise CheckpointMismatch(f"rank {', '.join(sorted(twice))} is there twice")
        merged["ranks"].update(state["ranks"])
    return merged


def from_state(
    state: Mapping[str, Any],
    plan: Plan,
    store: MemoryStore,
    world: World,
    hierarchy: Hierarchy | None = None,
    *,
    drop_residuals: bool,
) -> int:
    """Fills ``store``; returns the step. Bit for bit if routes, world size and nodes are those of the checkpoint.

    Gradient that is pending for a layer whose route here keeps none goes out with the layer's next gradient
    (:meth:`MemoryStore.drain`). With other ranks or nodes every rank gets the mean over the old ones, so that
    (1/P)·Σ residuals, all that later steps would have added to the mean gradient, is conserved. Under a hierarchy that
    sum is (1/N)·Σ over the stripes that ranks keep for N nodes; every rank gets its rows of the same mean.

    Raises:
        CheckpointMismatch: another format or model, ranks missing, or damaged; nothing is changed then.
    """
    _check_model(state, plan)
    if drop_residuals:
        store.clear()
        return int(state["step"])
    ranks: Mapping[str, Any] = state["ranks"]
    shapes = {name: layer.spec.shape for name, layer in plan.layers.items()}
    levels = state.get("nodes") == (None if hierarchy is None else str(hierarchy))
    shares = {p.spec.name: share(p.route, p.spec, world, hierarchy) for p in plan}
    if levels and state["world_size"] == world.size and str(world.rank) in ranks:
        check_values({str(world.rank): ranks[str(world.rank)]}, shapes)
        found = _own(ranks[str(world.rank)], plan, shares, same=state["routes"] == _routes(plan))
    else:
        if missing := lacking(state):
            other = "" if levels else " with another hierarchy"
            raise CheckpointMismatch(
                f"this is the state of rank {', '.join(sorted(ranks))} of {state['world_size']}, loaded by rank "
                f"{world.rank} of {world.size}{other}: collect every rank's state_dict() with "
                f"commlib.merge_state_dicts and load that (missing: rank {', '.join(map(str, missing))})"
            )
        check_values(ranks, shapes)
        nodes = len(state["nodes"].split()) if "nodes" in state else 1
        old = [ranks[str(r)] for r in range(state["world_size"])]
        found = [entry for p in plan for entry in _carry_over(p, old, nodes, shares[p.spec.name])]
    rows = sorted({name for name, *_ in found if plan.layers[name].spec.sparse})
    if rows:
        raise CheckpointMismatch(
            f"the checkpoint holds back gradient of {rows[0]}, which is sparse here and has no fixed shape: send "
            "it first (swap to 'none', and one step), or load with drop_residuals=True"
        )
    store.clear()
    for name, key, slot, value, start in found:
        store.restore(name, key, slot, value.to(plan.layers[name].spec.device), start=start)
    _say_rounded(found)
    return int(state["step"])


def _say_rounded(found: Sequence[_Entry]) -> None:
    """Tell the log of values that the format in which they are kept here does not have."""
    short = [(slot.dtype, value) for _, _, slot, value, _ in found if slot.dtype != value.dtype]
    rounded = [dtype for dtype, value in short if not residuals.exact(value, dtype)]
    if rounded:
        into = ", ".join(sorted({str(dtype).removeprefix("torch.") for dtype in rounded}))
        _log.info("%d residuals of the checkpoint are rounded to %s, in which they are kept here", len(rounded), into)


def needed_slots(plan: Plan, world: World, hierarchy: Hierarchy | None) -> dict[str, set[str]]:
    """Layer → the slots that its routes ask for, on this rank."""
    return {p.spec.name: set(_expected(p, share(p.route, p.spec, world, hierarchy))) for p in plan}


_Entry = tuple[str, str, Slot, Tensor, int]  # layer, key, slot, value, first row


def _own(entries: Mapping[str, Any], plan: Plan, shares: Mapping[str, HierarchyShare], *, same: bool) -> list[_Entry]:
    """All that this rank had and can use; checked, so that restoring cannot fail.

    Args:
        entries: layer → slot → value.
        plan: of here.
        shares: layer → what this rank exchanges of it.
        same: whether the routes are those of the checkpoint. If not, of slots that routes here do not have only what
            is pending is taken over.
    """
    found = []
    for name, slots in entries.items():
        if name not in plan.layers:
            raise CheckpointMismatch(f"damaged state dict: slots of {name!r}, which is no layer of the model")
        expected = _expected(plan.layers[name], shares[name])
        for key, entry in slots.items():
            value = entry["value"]
            slot, start = expected.get(key, (None, 0))
            if slot is None or tuple(value.shape) != slot.shape:
                if entry["role"] == "pending":  # of a route that is not here: of all of the layer, or of some rows
                    slot, start = Slot(tuple(value.shape), "pending"), entry.get("start", 0)
                elif not same:
                    continue
                else:
                    wanted = "unknown" if slot is None else f"not {slot.shape}"
                    raise CheckpointMismatch(
                        f"damaged state dict: slot {key!r} of {name!r} of shape {tuple(value.shape)} is {wanted}"
                    )
            found.append((name, key, slot, value, start))
    return found


def _expected(layer: PlannedLayer, part: HierarchyShare) -> dict[str, tuple[Slot, int]]:
    expected: dict[str, tuple[Slot, int]] = {}
    for route in (layer.dense, layer.route):
        expected.update({part.prefix + k: (s, part.start) for k, s in route.codec.slots(part.spec).items()})
        stripe = route.carrier().owned(route.codec, part.spec, part.world)
        if stripe is not None:
            owner = route.codec.slots(stripe.spec)
            expected.update({OWNER + k: (s, part.start + stripe.start) for k, s in owner.items()})
    return expected


def _carry_over(
    layer: PlannedLayer, old: Sequence[Mapping[str, Any]], nodes: int, part: HierarchyShare
) -> Iterator[_Entry]:
    """The slots of one layer on a rank of the new world, from those of all ranks of the old one."""
    name, spec = layer.spec.name, layer.spec
    wanted = {**layer.dense.codec.slots(part.spec), **layer.route.codec.slots(part.spec)}
    slots = [slot for rank in old for slot in rank.get(name, {}).items()]
    entries = [(key.removeprefix(NODE).removeprefix(OWNER), entry) for key, entry in slots]
    pending = {key for key, entry in entries if entry["role"] == "pending"}
    for key in sorted(pending - set(wanted)):
        yield name, key, Slot(spec.shape), _mean(spec, key, old, nodes).view(spec.shape), 0
    found = {key for key, _ in entries}
    for key, slot in wanted.items():
        if slot.role == "replicated":
            value = old[0].get(name, {}).get(key, {}).get("value")
            if value is not None and tuple(value.shape) == slot.shape:
                yield name, key, slot, value, 0
        elif key in found:
            whole = _mean(spec, key, old, nodes)
            rows = whole[part.start : part.start + slot.shape[0]] if part.prefix else whole.view(slot.shape)
            yield name, part.prefix + key, slot, rows, part.start


def _mean(spec: LayerSpec, key: str, old: Sequence[Mapping[str, Any]], nodes: int) -> Tensor:
    """(1/P)·Σ of a slot over the old ranks, shape that of the layer (a scalar: one row).

    Stripes in units of a node's mean count 1/N each, and those of owners, in units of the mean already, once.
    """
    total = torch.zeros(spec.shape or (1,), dtype=torch.float64)
    for prefix, weight in (("", 1 / len(old)), (NODE, 1 / nodes), (OWNER, 1.0)):
        for rank in old:
            entry = rank.get(spec.name, {}).get(prefix + key)
            if entry is not None and entry["value"].numel():
                value, start = entry["value"].cpu().reshape(-1, *total.shape[1:]), entry.get("start", 0)
                total[start : start + len(value)] += value.double() * weight
    return total.float()


def _check_model(state: Any, plan: Plan) -> None:
    check_form(state)
    here, there = _layers(plan), state["layers"]
    if here != there:
        names = [n for n in {**there, **here} if here.get(n) != there.get(n)]
        first = "; ".join(f"{n}: {there.get(n, 'absent')} there, {here.get(n, 'absent')} here" for n in names[:3])
        raise CheckpointMismatch(f"checkpoint of another model: {len(names)} parameters differ ({first})")


def _layers(plan: Plan) -> dict[str, str]:
    return {p.spec.name: p.spec.layout() for p in plan}


def _routes(plan: Plan) -> dict[str, str]:
    return {p.spec.name: str(p.route) for p in plan}
