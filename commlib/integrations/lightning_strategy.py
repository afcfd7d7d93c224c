"""DDP strategy for Lightning that attaches commlib, in either of the two packages Lightning comes in."""

from __future__ import annotations

import datetime
import inspect
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from commlib._attach import attach
from commlib.checkpoint.collector import Collector
from commlib.checkpoint.state_dict import StateDict
from commlib.ddp.state import HookState
from commlib.errors import CheckpointMismatch, PeerLost, unknown
from commlib.planning.plan import Plan
from commlib.planning.policy import Exact, Policy
from commlib.planning.route import Rules

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as Plain
else:
    Plain = object

KEY = "commlib"
"""Under which the state is in a checkpoint."""
_log = logging.getLogger("commlib")
_PATIENCE = 10.0  # seconds: after an exception nobody knows whether the other ranks come
_TAKEN = {
    "scaler": "the residuals follow the GradScaler of Trainer(precision=…) or of its precision plugin",
    "process_group": "Lightning makes it; see process_group_backend",
    "device_ids": "Lightning chooses it, by Trainer(devices=…)",
    "output_device": "Lightning chooses it, by Trainer(devices=…)",
    **dict.fromkeys(
        ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period"),
        "commlib is this model's communication hook, and DDP takes one",
    ),
}


class Compressing(Plain):
    """Before a DDPStrategy of Lightning's among the bases: it attaches commlib in ``fit``, and saves its state.

    Attributes:
        comm: what :func:`commlib.attach` returned in the last ``fit``; None before.
    """

    comm: HookState | None = None

    def __init__(self, compressor: Rules | Policy | Plan = Exact(), **options: Any) -> None:
        own, self._attached_with = divide(options, type(self))
        timeout = options.get("timeout")
        if isinstance(timeout, datetime.timedelta):  # else Lightning has its own
            self._attached_with["timeout"] = timeout.total_seconds()
        self._compressor, self._collector = compressor, None
        super().__init__(**own)

    _collector: Collector | None

    def set_world_ranks(self) -> None:
        """As Lightning's, which calls it when the Trainer is made.

        Raises:
            ValueError: one rank, or a device whose gradients do not go by DDP.
        """
        super().set_world_ranks()
        device = self.root_device.type
        if device not in ("cpu", "cuda"):
            raise ValueError(f"{_name(self)} is for Trainer(accelerator='cpu') and 'gpu', not for a device {device!r}")
        if self.num_nodes * self.num_processes == 1:
            raise ValueError(
                f"{_name(self)} compresses what ranks send each other, and there is one rank: "
                "give Trainer(devices=2, …) or num_nodes=2, or leave the strategy out"
            )

    def configure_ddp(self) -> None:
        """As Lightning's, which calls it in ``fit`` only; then attaches. Collective."""
        super().configure_ddp()
        if self._collector is not None:
            self._collector.close()
        ddp: Any = self.model
        assert isinstance(ddp, DistributedDataParallel)
        scaler = getattr(self.precision_plugin, "scaler", None)
        self.comm = attach(ddp, self._compressor, scaler=scaler, **self._attached_with)
        self._collector = Collector(ddp, self.comm, self._attached_with.get("timeout", 1800.0))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """As Lightning's, with all ranks' residuals in the file, unless it has weights only. Collective."""
        if self._collector is not None and "optimizer_states" in checkpoint:
            state = self._collected(self._collector)
            checkpoint.update({} if state is None else {KEY: state})
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """As Lightning's, which calls it in ``fit(ckpt_path=…)`` only; then each rank takes its residuals. Collective.

        Raises:
            CheckpointMismatch: they are of another model; every rank raises it.
        """
        super().load_optimizer_state_dict(checkpoint)
        assert self._collector is not None
        state: StateDict | None = checkpoint.get(KEY)
        if not self._collector.restore(lambda: state):
            self._warn("the checkpoint has no state of commlib: residuals begin at zero")
        elif state is not None and not state["ranks"]:
            self._warn("the checkpoint was saved without all ranks' residuals: they begin at zero")

    def teardown(self) -> None:
        """As Lightning's; ends commlib's threads. ``comm`` still has its statistics and its state."""
        if self.comm is not None:
            self.comm.close()
        super().teardown()

    def _collected(self, collector: Collector) -> StateDict | None:
        """After an exception others may not come, or be in another step; then a checkpoint without residuals counts."""
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        interrupted = trainer is not None and trainer.interrupted
        try:
            return collector.collect(_PATIENCE if interrupted else None)
        except (PeerLost, CheckpointMismatch) as e:
            if isinstance(e, PeerLost) and not interrupted:
                raise
            self._warn(f"the checkpoint is saved without residuals: {e}")
        assert self.comm is not None
        return {**self.comm.state_dict(), "ranks": {}}

    def _warn(self, message: str) -> None:
        if self.is_global_zero:
            _log.warning(message)


def divide(options: Mapping[str, Any], strategy: type) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options that are Lightning's or DDP's, and those of :func:`commlib.attach`; timeout is both.

    Raises:
        ValueError: one is neither, or is not to be given here.
    """
    plain: Any = strategy.__mro__[strategy.__mro__.index(Compressing) + 1]
    theirs = _keywords(plain.__init__) | _keywords(DistributedDataParallel.__init__) - {"module"}
    ours = _keywords(HookState.__init__) - {"module", "compressor", "timeout"}
    for name in options:
        if name in _TAKEN:
            raise ValueError(f"{name} is no option of {strategy.__module__}.{strategy.__name__}: {_TAKEN[name]}")
        if name not in theirs | ours:
            raise ValueError(unknown("option", name, (theirs | ours) - set(_TAKEN)))
    return (
        {name: value for name, value in options.items() if name not in ours},
        {name: value for name, value in options.items() if name in ours},
    )


def _keywords(function: Any) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)} - {"self"}


def _name(strategy: object) -> str:
    return f"{type(strategy).__module__}.{type(strategy).__name__}"
