"""What torch.distributed asks of a process group besides its calls: names, the store, the time-out."""

from __future__ import annotations

import datetime
import types
from typing import Any

import torch
import torch.distributed as dist

from commlib.transports.process_group.algorithms.steps import Place

_ProcessGroup: Any = dist.ProcessGroup  # its calls have two forms each; ours has those that torch.distributed uses


class Identity(_ProcessGroup):  # type: ignore[misc]
    """A process group without calls. It is its own backend: PyTorch's would look for one of each device.

    Args:
        store: it was made by.
        place: this rank among the others.
        timeout: of its calls, where they have none of their own.
    """

    def __init__(self, store: Any, place: Place, timeout: datetime.timedelta) -> None:
        super().__init__(place.rank, place.size)  # its form with a store makes none that Python may add to
        self._store, self._name, self._desc = store, "", ""
        self.options = types.SimpleNamespace(_timeout=timeout)

    def getBackendName(self) -> str:  # PyTorch's
        """Of the backend."""
        return "zmq"

    name = getBackendName

    def setGroupName(self, name: str) -> None:  # PyTorch's
        """As torch.distributed calls it."""
        self._name = name

    def getGroupName(self) -> str:  # PyTorch's
        """As torch.distributed calls it."""
        return self._name

    _set_group_name, group_name = setGroupName, property(getGroupName)

    def setGroupDesc(self, text: str) -> None:  # PyTorch's
        """What it is for."""
        self._desc = text

    def getGroupDesc(self) -> str:  # PyTorch's
        """What it is for."""
        return self._desc

    _set_group_desc, group_desc = setGroupDesc, property(getGroupDesc)

    def get_group_store(self) -> Any:
        """The one it was made by."""
        return self._store

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Of calls from now on that have none of their own."""
        self.options._timeout = timeout

    _set_default_timeout = set_timeout

    def _get_backend(self, device: torch.device) -> Identity:
        return self

    def _set_sequence_number_for_group(self) -> None: ...
