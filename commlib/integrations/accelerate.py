"""Hugging Face Accelerate: ``comm = commlib.integrations.accelerate.attach(accelerator, model, "onebit")`` after
``prepare``."""

from __future__ import annotations

import logging
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commlib._attach import attach as attach_to
from commlib.checkpoint.collector import Collector
from commlib.ddp.state import HookState
from commlib.planning.plan import Plan
from commlib.planning.policy import Exact, Policy
from commlib.planning.route import Rules

if TYPE_CHECKING:
    from accelerate import Accelerator

_log = logging.getLogger("commlib")
_attached: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # Accelerator → how many models


def attach(
    accelerator: Accelerator, model: nn.Module, compressor: Rules | Policy | Plan = Exact(), **options: Any
) -> HookState:
    """Compresses the gradients of a prepared model, with all ranks' residuals in what ``save_state`` saves. Collective.

    The accelerator's GradScaler is known to commlib; ``accumulate``, ``clip_grad_norm_`` and ``unwrap_model`` are as
    before. ``accelerator.save_state(folder)``, which all processes must call then, writes ``commlib.pt``
    (``commlib_1.pt`` for a second model) on the main process; ``load_state(folder)`` takes it, also with another
    number of processes.

    Args:
        accelerator: whose checkpoints are meant.
        model: what ``accelerator.prepare`` returned for it.
        compressor: as :func:`commlib.attach` takes it.
        **options: of :class:`commlib.HookState`; ``timeout`` is for saving and loading, too.

    Returns:
        As :func:`commlib.attach`.

    Raises:
        TypeError: no Accelerator.
        ValueError: the model is not in DDP: one process, another strategy, or not prepared; a scaler is given; and
            whatever :func:`commlib.attach` raises.
    """
    if not callable(getattr(accelerator, "register_save_state_pre_hook", None)):
        raise TypeError(f"accelerator must be an accelerate.Accelerator, got {type(accelerator).__name__}")
    if "scaler" in options:
        raise ValueError("scaler is no option here: it is that of Accelerator(mixed_precision=…)")
    ddp = ddp_of(model, accelerator.num_processes, "model = accelerator.prepare(model)")
    comm = attach_to(ddp, compressor, scaler=accelerator.scaler, **options)
    collector = Collector(ddp, comm, options.get("timeout", 300.0))
    count = _attached.get(accelerator, 0)
    _attached[accelerator] = count + 1
    name = f"commlib_{count}.pt" if count else "commlib.pt"

    def save(models: Any, weights: Any, folder: str) -> None:
        collector.save(Path(folder) / name)

    def load(models: Any, folder: str) -> None:
        path = Path(folder) / name
        if not collector.load(path) and accelerator.is_main_process:
            _log.warning(f"{path} is not there: residuals begin at zero")

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return comm


def ddp_of(model: nn.Module, processes: int, prepare: str) -> DistributedDataParallel:
    """The DDP model in what a framework has prepared; torch.compile may be around it.

    Args:
        model: that.
        processes: how many the framework has.
        prepare: what prepares a model there.

    Raises:
        ValueError: there is none.
    """
    found = getattr(model, "_orig_mod", model)
    if isinstance(found, DistributedDataParallel):
        return found
    if processes == 1:
        raise ValueError(
            "commlib compresses what processes send each other, and there is one process: "
            "start 2 or more (torchrun --nproc-per-node 2, accelerate launch --num_processes 2), or leave attach out"
        )
    raise ValueError(
        f"the model is no DistributedDataParallel but {type(found).__name__}: attach after {prepare}; "
        "commlib does not go with FSDP, DeepSpeed or Megatron here"
    )
