"""An optimizer's state that lies in parts, as a whole: the format of ``torch.optim``, for any number of ranks.

CaffeOnSpark's snapshot was one node's, whose state is right for the part that it owns only. Here every rank says what
kinds of state it has, and each kind is gathered from its owners.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from commlib.errors import CheckpointMismatch
from commlib.zero.partition import OwnedSlices

_PARTED = "parted"


def described(state: Mapping[str, Any]) -> str:
    """Description of one parameter's state on this rank, as text: kinds and dtypes of values in a row, and numbers."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() == 1:
            found[key] = {_PARTED: str(value.dtype).removeprefix("torch.")}
        elif isinstance(value, Tensor):
            found[key] = {"value": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
        else:
            found[key] = {"value": value}
    return json.dumps(found)


def common(texts: Sequence[str]) -> tuple[dict[str, torch.dtype], dict[str, Any]]:
    """Common description from all ranks' :func:`described` of one parameter: what lies in parts, with its dtype; and
    numbers.

    Ranks that own nothing of it have nothing to say; the others say the same.
    """
    said: dict[str, Any] = next((found for text in texts if (found := json.loads(text))), {})
    parted = {key: getattr(torch, about[_PARTED]) for key, about in said.items() if _PARTED in about}
    return parted, {key: _number(about) for key, about in said.items() if _PARTED not in about}


def collected(
    buckets: Sequence[OwnedSlices],
    said: Sequence[Mapping[str, str]],
    send: Callable[[int, Sequence[Tensor], str], None],
    settle: Callable[[], None],
) -> dict[str, dict[str, Any]]:
    """Name → state, whole, as ``torch.optim`` has it.

    Ranks gather bucket after bucket, and of each the kinds in the order of their names: all know them from ``said``.

    Args:
        buckets: this rank's parts.
        said: by every rank, name → :func:`described`.
        send: given a bucket's number, layers' values in a row with this rank's part filled in, and what they are.
        settle: when it returns, what was sent is whole.
    """
    states: dict[str, dict[str, Any]] = {}
    for i, parts in enumerate(buckets):
        kinds = {n: common([rank[n] for rank in said]) for n in parts.by_name}
        states |= {n: numbers for n, (_, numbers) in kinds.items()}
        for key in sorted({key for parted, _ in kinds.values() for key in parted}):
            wholes = {n: parts.filled(n, key) for n in parts.by_name}
            send(i, list(wholes.values()), f"{key} for a checkpoint")
            settle()
            for name, (parted, _) in kinds.items():
                if key in parted:
                    states[name][key] = wholes[name].view(parts.by_name[name].whole.shape).to(parted[key])
    return states


def whole(optimizer: Optimizer, names: Mapping[int, str], states: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """State dict that ``optimizer`` would have with these states by parameter name; ``names`` by ``id``."""
    made: dict[str, Any] = optimizer.state_dict()
    order = [p for group in optimizer.param_groups for p in group["params"]]
    state = {i: states[names[id(p)]] for i, p in enumerate(order) if states.get(names.get(id(p), ""))}
    return {**made, "state": state}


def by_name(optimizer: Optimizer, names: Mapping[int, str], state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Name → state, from what ``torch.optim`` calls a state dict; the optimizer takes over its groups' options.

    Raises:
        CheckpointMismatch: it is none, or its groups are others.
    """
    if not {"state", "param_groups"} <= set(state):
        raise CheckpointMismatch("this is no state dict of an optimizer: it has no state and param_groups")
    order: list[nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
    stray = [i for i in state["state"] if not (isinstance(i, int) and i < len(order) and id(order[i]) in names)]
    if stray:
        raise CheckpointMismatch(f"the checkpoint has state of parameter {stray[0]}, which is not trained here")
    try:
        optimizer.load_state_dict({**state, "state": {}})
    except ValueError as e:
        raise CheckpointMismatch(f"the checkpoint is of another optimizer: {e}") from e
    return {names[id(order[i])]: dict(found) for i, found in state["state"].items()}


def _number(about: Mapping[str, Any]) -> Any:
    dtype = about.get("dtype")
    return about["value"] if dtype is None else torch.tensor(about["value"], dtype=getattr(torch, dtype))
