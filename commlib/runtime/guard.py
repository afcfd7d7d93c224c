"""An optimizer that is not to be stepped by its user, while others do what it would."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from commlib.errors import CommlibError

_SHARDS = "the parameter server's shards update the parameters: call server.step()"


class Guard:
    """Over one optimizer, until :meth:`remove`: its ``step()`` raises CommlibError.

    Args:
        optimizer: this one.
        instead: who does, and what is to be called.
    """

    def __init__(self, optimizer: Optimizer, instead: str = _SHARDS) -> None:
        self._optimizer, self._instead = optimizer, instead
        self._handle = optimizer.register_step_pre_hook(self._not_here)

    def step(self) -> None:
        """Steps it all the same."""
        self._handle.remove()
        try:
            self._optimizer.step()
        finally:
            self._handle = self._optimizer.register_step_pre_hook(self._not_here)

    def remove(self) -> None:
        """It is the user's again."""
        self._handle.remove()

    def _not_here(self, *_: Any) -> None:
        raise CommlibError(f"{self._instead}, not optimizer.step()")
