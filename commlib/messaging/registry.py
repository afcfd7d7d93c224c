"""How members of a job get endpoints: by the entry-point group ``commlib.endpoints``, for the core names no plug-in.

A plug-in is a function ``(rank, *, job, towards, timeout, window) -> Endpoint``: ``towards`` is the host where members
meet.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from typing import Protocol, cast

from commlib.messaging.endpoint import Endpoint
from commlib.runtime.plugins import fetch, installed

GROUP = "commlib.endpoints"
WINDOW = 8 << 20
"""Bytes on their way between two members of a parameter server: some chunks. What has left cannot be overtaken."""


class EndpointFactory(Protocol):
    """Opens an endpoint."""

    def __call__(self, rank: int, *, job: str, towards: str, timeout: float, window: int) -> Endpoint: ...


@functools.cache
def endpoint_kinds() -> Mapping[str, EntryPoint]:
    """Name → entry point of every installed one."""
    return installed(GROUP, "endpoints")


def endpoint_kind(name: str) -> EndpointFactory:
    """Find what opens endpoints of this name.

    Raises:
        ValueError: there is none of this name.
        MissingDependency: it needs a package that is not installed.
    """
    return cast(EndpointFactory, fetch("endpoint", name, endpoint_kinds()))
