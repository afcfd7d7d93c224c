"""Process groups of torch.distributed that installed packages bring (entry points ``commlib.process_groups``)."""

from __future__ import annotations

import functools
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import torch.distributed as dist

GROUP = "commlib.process_groups"


def register() -> None:
    """Makes each known to ``init_process_group`` by its name. What makes them is imported when the first is made."""
    if not dist.is_available():
        return
    for found in entry_points(group=GROUP):
        if found.name not in dist.Backend.backend_list:
            make = functools.partial(_make, found)
            dist.Backend.register_backend(found.name, make, extended_api=True, devices=["cpu", "cuda"])


def _make(found: EntryPoint, about: Any, options: Any) -> Any:
    return found.load()(about, options)
