"""State dicts: every rank's own, merged for a set of ranks, and fitted to another number of ranks.

Layout (strings, numbers and tensors only; keys differ from rank to rank, so a distributed checkpoint keeps them all)::

    {"format": 1, "world_size": P, "step": n, "layers": {name: "shape dtype"}, "routes": {name: route},
     "ranks": {"0": {name: {slot: {"value": float32 tensor, "role": …, "start": row}}}, …}}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from commlib.compressor import LayerSpec, Slot
from commlib.errors import CheckpointMismatch
from commlib.exchange.item import World
from commlib.memory import MemoryStore
from commlib.route import Plan, PlannedLayer

FORMAT = 1
StateDict = dict[str, Any]


def to_state(plan: Plan, store: MemoryStore, world: World, step: int) -> StateDict:
    """This rank's state."""
    return {
        "format": FORMAT,
        "world_size": world.size,
        "step": step,
        "layers": _layers(plan),
        "routes": _routes(plan),
        "ranks": {str(world.rank): store.export()},
    }


def merge_state_dicts(states: Sequence[StateDict]) -> StateDict:
    """One state dict from those of all ranks of a run, loadable by any rank of any number of ranks.

    Raises:
        ValueError: nothing to merge.
        CheckpointMismatch: the parts come from different runs or steps, or a rank is there twice.
    """
    if not states:
        raise ValueError("no state dicts to merge: pass the state_dict() of every rank")
    for state in states:
        _check_form(state)
    merged = {**states[0], "ranks": {}}
    for state in states:
        for key in ("format", "world_size", "step", "layers", "routes"):
            if state.get(key) != merged[key]:
                raise CheckpointMismatch(
                    f"state dicts of different runs: {key} is {merged[key]!r} in one and {state.get(key)!r} in another"
                )
        twice = set(state["ranks"]) & set(merged["ranks"])
        if twice:
            raise CheckpointMismatch(f"rank {', '.join(sorted(twice))} is there twice")
        merged["ranks"].update(state["ranks"])
    return merged


def from_state(state: Mapping[str, Any], plan: Plan, store: MemoryStore, world: World, *, drop_residuals: bool) -> int:
    """Fills ``store``; returns the step. Bit for bit if routes and world size are those of the checkpoint.

    Gradient that is pending for a layer whose route here keeps none goes out with the layer's next gradient
    (:meth:`MemoryStore.drain`). With another number of ranks every rank gets the mean over the old ones, so that
    (1/P)·Σ residuals, all that later steps would have added to the mean gradient, is conserved.

    Raises:
        CheckpointMismatch: another format or model, ranks missing, or damaged; nothing is changed then.
    """
    _check_model(state, plan)
    if drop_residuals:
        store.clear()
        return int(state["step"])
    ranks: Mapping[str, Any] = state["ranks"]
    if state["world_size"] == world.size and str(world.rank) in ranks:
        found = _own(ranks[str(world.rank)], plan, world, same=state["routes"] == _routes(plan))
    else:
        missing = [r for r in range(state["world_size"]) if str(r) not in ranks]
        if missing:
            raise CheckpointMismatch(
                f"this is the state of rank {', '.join(sorted(ranks))} of {state['world_size']}, loaded by rank "
                f"{world.rank} of {world.size}: collect every rank's state_dict() with commlib.merge_state_dicts and "
                f"load that (missing: rank {', '.join(map(str, missing))})"
            )
        old = [ranks[str(r)] for r in range(state["world_size"])]
        found = [entry for p in plan for entry in _carry_over(p, old)]
    store.clear()
    for name, key, slot, value, start in found:
        store.restore(name, key, slot, value.to(plan.layers[name].spec.device), start=start)
    return int(state["step"])


_Entry = tuple[str, str, Slot, Tensor, int]  # layer, key, slot, value, first row


def _own(entries: Mapping[str, Any], plan: Plan, world: World, *, same: bool) -> list[_Entry]:
    """All that this rank had and can use; checked, so that restoring cannot fail.

    Args:
        entries: layer → slot → value.
        plan: of here.
        world: this rank.
        same: whether the routes are those of the checkpoint. If not, of slots that routes here do not have only what
            is pending is taken over.
    """
    found = []
    for name, slots in entries.items():
        if name not in plan.layers:
            raise CheckpointMismatch(f"damaged state dict: it has slots of {name!r}, which is none of its layers")
        expected = _expected(plan.layers[name], world)
        for key, entry in slots.items():
            value = entry.get("value") if isinstance(entry, Mapping) else None
            if not isinstance(value, Tensor):
                raise CheckpointMismatch(f"damaged state dict: slot {key!r} of {name!r} has no value")
            slot, start = expected.get(key, (None, 0))
            if slot is None or tuple(value.shape) != slot.shape:
                if entry.get("role") == "pending":
                    slot, start = _of_another_route(plan.layers[name].spec, key, entry)
                elif not same:
                    continue
                else:
                    wanted = "unknown" if slot is None else f"not {slot.shape}"
                    raise CheckpointMismatch(
                        f"damaged state dict: slot {key!r} of {name!r} of shape {tuple(value.shape)} is {wanted}"
                    )
            found.append((name, key, slot, value, start))
    return found


def _of_another_route(spec: LayerSpec, key: str, entry: Mapping[str, Any]) -> tuple[Slot, int]:
    """What a route that is not here holds back of a layer: of all of it, or of some rows."""
    shape, start = tuple(entry["value"].shape), entry.get("start", 0)
    if shape != spec.shape and not (
        spec.shape and shape[1:] == spec.shape[1:] and start >= 0 and start + shape[0] <= spec.shape[0]
    ):
        raise CheckpointMismatch(f"damaged state dict: slot {key!r} of {spec.name!r} of shape {shape} does not fit it")
    return Slot(shape, "pending"), start


def _expected(layer: PlannedLayer, world: World) -> dict[str, tuple[Slot, int]]:
    expected: dict[str, tuple[Slot, int]] = {}
    for route in (layer.dense, layer.route):
        expected.update({k: (s, 0) for k, s in route.codec.slots(layer.spec).items()})
        stripe = route.carrier().owned(route.codec, layer.spec, world)
        if stripe is not None:
            owner = route.codec.slots(stripe.spec)
            expected.update({"owner." + k: (s, stripe.start) for k, s in owner.items()})
    return expected


def _carry_over(layer: PlannedLayer, old: Sequence[Mapping[str, Any]]) -> Iterator[_Entry]:
    """The slots of one layer on a rank of the new world, from those of all ranks of the old one."""
    name, spec = layer.spec.name, layer.spec
    wanted = {**layer.dense.codec.slots(spec), **layer.route.codec.slots(spec)}
    entries = [(key.removeprefix("owner."), entry) for rank in old for key, entry in rank.get(name, {}).items()]
    pending = {key for key, entry in entries if entry["role"] == "pending"}
    for key in sorted(pending - set(wanted)):
        yield name, key, Slot(spec.shape), _mean(spec, key, old), 0
    found = {key for key, _ in entries}
    for key, slot in wanted.items():
        if slot.role == "replicated":
            value = old[0].get(name, {}).get(key, {}).get("value")
            if value is not None and tuple(value.shape) == slot.shape:
                yield name, key, slot, value, 0
        elif key in found:
            yield name, key, slot, _mean(spec, key, old), 0


def _mean(spec: LayerSpec, key: str, old: Sequence[Mapping[str, Any]]) -> Tensor:
    """(1/P)·Σ of a slot over the old ranks, plus the owners' stripes, which are in units of the mean already."""
    total = torch.zeros(spec.shape, dtype=torch.float64)
    for rank in old:
        entry = rank.get(spec.name, {}).get(key)
        if entry is not None:
            total += entry["value"].cpu()
    total /= len(old)
    for rank in old:
        entry = rank.get(spec.name, {}).get("owner." + key)
        if entry is not None and entry["value"].numel():
            start = int(entry["start"])
            total[start : start + len(entry["value"])] += entry["value"].cpu()
    return total.float()


def _check_form(state: Any) -> None:
    if not isinstance(state, Mapping) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, Mapping) else type(state).__name__
        raise CheckpointMismatch(f"not a commlib state dict of format {FORMAT} (found {found!r})")
    missing = [k for k in ("world_size", "step", "layers", "routes", "ranks") if k not in state]
    if missing:
        raise CheckpointMismatch(f"damaged state dict: it has no {', '.join(missing)}")


def _check_model(state: Any, plan: Plan) -> None:
    _check_form(state)
    here, there = _layers(plan), state["layers"]
    if here != there:
        names = [n for n in {**there, **here} if here.get(n) != there.get(n)]
        first = "; ".join(f"{n}: {there.get(n, 'absent')} there, {here.get(n, 'absent')} here" for n in names[:3])
        raise CheckpointMismatch(f"checkpoint of another model: {len(names)} parameters differ ({first})")


def _layers(plan: Plan) -> dict[str, str]:
    return {p.spec.name: p.spec.layout() for p in plan}


def _routes(plan: Plan) -> dict[str, str]:
    return {p.spec.name: str(p.route) for p in plan}
