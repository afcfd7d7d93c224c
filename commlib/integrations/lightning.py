"""Lightning: ``Trainer(strategy=commlib.integrations.lightning.DDPStrategy("onebit"), …)``, for ``import lightning``.

For ``import pytorch_lightning``, whose Trainer takes no strategy of the other:
:mod:`commlib.integrations.pytorch_lightning`.
"""

from __future__ import annotations

from commlib.errors import MissingDependency

try:
    from lightning.pytorch.strategies import DDPStrategy as _Plain
except ModuleNotFoundError as e:
    raise MissingDependency(
        f"commlib.integrations.lightning needs {e.name!r}: pip install 'torch-commlib[lightning]'"
    ) from e

from commlib.integrations.lightning_strategy import Compressing


class DDPStrategy(Compressing, _Plain):
    """Lightning's DDPStrategy with commlib attached in ``fit``, and every rank's residuals in the checkpoints.

    A resumed run is the uninterrupted one bit for bit, with as many ranks; with others, what was not sent is shared out
    among them. Mixed precision's GradScaler is known to commlib. Nothing is attached in validate, test or predict.

    Args:
        compressor: as :func:`commlib.attach` takes it.
        **options: those of :class:`commlib.HookState` (``dense_steps``, ``min_size``, ``seed``, ``limit``,
            ``hierarchy``, ``servers``), of Lightning's DDPStrategy (``process_group_backend``, ``start_method``, …), of
            DistributedDataParallel (``find_unused_parameters``, ``bucket_cap_mb``, …). ``timeout``, a timedelta, is of
            the process group and of all commlib's meetings.

    Attributes:
        comm: the :class:`commlib.HookState` of the last ``fit``: ``trainer.strategy.comm.plan``, ``.stats()``.

    Raises:
        ValueError: an unknown option; when the Trainer is made, one rank only, or a device without DDP; in ``fit``,
            whatever :func:`commlib.attach` raises.
    """
