"""As :mod:`commlib.integrations.lightning`, for those who ``import pytorch_lightning``."""

from __future__ import annotations

from typing import Any

from commlib.errors import MissingDependency

try:
    import pytorch_lightning.strategies
except ModuleNotFoundError as e:
    raise MissingDependency(
        f"commlib.integrations.pytorch_lightning needs {e.name!r}: pip install pytorch-lightning"
    ) from e

from commlib.integrations.lightning_strategy import Compressing

_Plain: Any = pytorch_lightning.strategies.DDPStrategy  # to type checkers Compressing is of the other package


class DDPStrategy(Compressing, _Plain):  # type: ignore[misc]
    """``commlib.integrations.lightning.DDPStrategy`` for ``pytorch_lightning``'s Trainer: the same arguments, state and
    errors."""
