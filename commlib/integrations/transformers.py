"""Hugging Face transformers: ``commlib.integrations.transformers.attach(trainer, "onebit")`` before
``trainer.train()``."""

from __future__ import annotations

import logging
import weakref
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from commlib._attach import attach as attach_to
from commlib.checkpoint.collector import Collector
from commlib.ddp.state import HookState
from commlib.errors import MissingDependency
from commlib.integrations.accelerate import ddp_of
from commlib.planning.plan import Plan
from commlib.planning.policy import Exact, Policy
from commlib.planning.route import Rules

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint
except ModuleNotFoundError as e:
    raise MissingDependency(
        f"commlib.integrations.transformers needs {e.name!r}: pip install 'transformers[torch]'"
    ) from e

_log = logging.getLogger("commlib")
_FILE = "commlib.pt"


class Compression(TrainerCallback):
    """Attaches when training begins, saves beside the Trainer's checkpoints. :func:`attach` makes it.

    Attributes:
        comm: what :func:`commlib.attach` returned; None before ``trainer.train()``.
    """

    comm: HookState | None = None

    def __init__(self, trainer: Trainer, compressor: Any, options: dict[str, Any]) -> None:
        self._trainer = weakref.ref(trainer)
        self._compressor, self._options = compressor, options
        self._ddp: weakref.ref[DistributedDataParallel] | None = None
        self._collector: Collector | None = None
        self.resumed: Path | None = None  # the checkpoint that training is about to go on from

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The model is in DDP, and the checkpoint's other parts are loaded. Collective."""
        trainer = self._trainer()
        assert trainer is not None
        ddp = ddp_of(trainer.model_wrapped, args.world_size, "the Trainer has wrapped it")
        if self._ddp is None or self._ddp() is not ddp:  # a second train() goes on with the same one
            self.comm = attach_to(ddp, self._compressor, scaler=trainer.accelerator.scaler, **self._options)
            self._collector = Collector(ddp, self.comm, self._options.get("timeout", 300.0))
            self._ddp = weakref.ref(ddp)
        assert self._collector is not None
        if self.resumed is not None and not self._collector.load(self.resumed / _FILE) and state.is_world_process_zero:
            _log.warning(f"{self.resumed / _FILE} is not there: residuals begin at zero")
        self.resumed = None

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The Trainer has saved the rest. Collective."""
        if self._collector is not None and not args.save_only_model:
            self._collector.save(Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}" / _FILE)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends commlib's threads; ``comm`` still has its statistics and its state."""
        if self.comm is not None:
            self.comm.close()


def attach(trainer: Trainer, compressor: Rules | Policy | Plan = Exact(), **options: Any) -> Compression:
    """Has a Trainer compress gradients, and keep all ranks' residuals in its checkpoints.

    Every ``checkpoint-N`` gets a ``commlib.pt``, unless ``save_only_model``;
    ``trainer.train(resume_from_checkpoint=…)`` takes it, also with another number of processes.

    Args:
        trainer: before ``train()``; any subclass of ``transformers.Trainer``.
        compressor: as :func:`commlib.attach` takes it.
        **options: of :class:`commlib.HookState`; ``timeout`` is for saving and loading, too.

    Returns:
        The callback: its ``comm`` is what :func:`commlib.attach` returns, once training has begun.

    Raises:
        TypeError: no Trainer.
        ValueError: one process, FSDP or DeepSpeed; attached already; a scaler is given. What :func:`commlib.attach`
            raises comes when training begins.
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(f"trainer must be a transformers.Trainer, got {type(trainer).__name__}")
    if "scaler" in options:
        raise ValueError("scaler is no option here: it is that of TrainingArguments(fp16=True)")
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ValueError("commlib goes with the Trainer's DDP, not with FSDP or DeepSpeed")
    if trainer.args.world_size == 1:
        ddp_of(trainer.model_wrapped, 1, "")
    if any(isinstance(c, Compression) for c in trainer.callback_handler.callbacks):
        raise ValueError("this Trainer has commlib attached already")
    callback = Compression(trainer, compressor, options)
    trainer.add_callback(callback)
    train = trainer.train

    def remembering(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        folder = resume_from_checkpoint or None
        if folder is True:
            last: Any = get_last_checkpoint
            folder = last(trainer.args.output_dir)
        callback.resumed = None if folder is None else Path(folder)
        return train(resume_from_checkpoint, *args, **kwargs)

    vars(trainer)["train"] = remembering  # callbacks are not told what training goes on from
    return callback
