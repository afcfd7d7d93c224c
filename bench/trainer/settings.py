"""The settings of a training command, checked before any rank starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from commlib.errors import unknown
from commlib.exchange.rate_limit import RateLimit
from commlib.planning.policy import policy_of
from commlib.planning.route import resolve

from .checkpoint import run_path
from .run_specs import LOCAL_PREFIX, SERVER_PREFIX, LocalSpec, ServerSpec
from .tasks import TASKS, BadInput, Defaults

OPTIMIZERS = ("adam", "sgd")
DEVICES = ("auto", "cpu", "cuda")
_OTHER_LR = {"adam": 0.002, "sgd": 0.05}  # where the optimizer is not the one the task was tuned with


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Everything a rank must know; None means the task's own default.

    Args:
        task: one of ``TASKS``.
        comms: codec specs, trained one after the other.
        servers: what :class:`ServerSpec` reads, each trained with a parameter server, after them.
        local: what :class:`LocalSpec` reads, each trained by local steps, after these.
        curve: steps between two evaluations on the way.
        seeds: each codec is trained once per seed.
        steps, epochs: length of a run, at most one of them.
        batch: examples per rank and step.
        lr, optimizer, hidden: as the flags.
        data: the task's file.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        dense_steps, min_size, bucket_cap_mb: handed to ``commlib.attach`` and DDP.
        limit: of what a rank sends, as ``50mbit``.
        hierarchy: whether nodes sum their gradients first; nodes by the environment.
        amp: mixed precision with a GradScaler.
        checkpoint: folder; None writes no checkpoints.
        every: steps between checkpoints; None is only at the end.
        resume: go on from the checkpoints in the folder.
        step_time: seconds that a step takes besides what it computes.
        pauses: share of the steps, drawn by each rank, that take ten times as long.

    Raises:
        BadInput: a value that cannot be; the message names the flag.
    """

    task: str = "digits"
    comms: tuple[str, ...] = ("none",)
    servers: tuple[str, ...] = ()
    local: tuple[str, ...] = ()
    curve: int | None = None
    seeds: tuple[int, ...] = (0,)
    steps: int | None = None
    epochs: int | None = None
    batch: int | None = None
    lr: float | None = None
    optimizer: str | None = None
    hidden: int | None = None
    data: Path | None = None
    device: str = "auto"
    dense_steps: int = 0
    min_size: int | None = None
    bucket_cap_mb: float | None = None
    limit: str | None = None
    hierarchy: bool = False
    amp: bool = False
    checkpoint: Path | None = None
    every: int | None = None
    resume: bool = False
    step_time: float = 0.0
    pauses: float = 0.0

    def __post_init__(self) -> None:
        _one_of("--task", self.task, TASKS)
        _one_of("--device", self.device, DEVICES)
        if self.optimizer is not None:
            _one_of("--optimizer", self.optimizer, OPTIMIZERS)
        if self.steps is not None and self.epochs is not None:
            raise BadInput("give --steps or --epochs, not both")
        for flag, value in (("steps", self.steps), ("epochs", self.epochs), ("batch", self.batch),
                            ("hidden", self.hidden), ("checkpoint-every", self.every), ("seeds", len(self.seeds)),
                            ("lr", self.lr), ("bucket-cap-mb", self.bucket_cap_mb), ("curve", self.curve)):  # fmt: skip
            if value is not None and not value > 0:
                raise BadInput(f"--{flag} must be above 0, got {value}")
        for flag, value in (("dense-steps", self.dense_steps), ("min-size", self.min_size)):
            if value is not None and value < 0:
                raise BadInput(f"--{flag} must not be negative, got {value}")
        for flag, on in (("--resume", self.resume), ("--checkpoint-every", self.every is not None)):
            if on and self.checkpoint is None:
                raise BadInput(f"{flag} needs --checkpoint FOLDER")
        if self.data is not None and not self.data.is_file():
            raise BadInput(f"--data {self.data}: no such file")
        if self.resume and self.checkpoint is not None and not self.checkpoint.is_dir():
            raise BadInput(f"--resume: there is no folder {self.checkpoint}")
        try:
            RateLimit.of(self.limit)
        except ValueError as e:
            raise BadInput(f"--{e}") from e
        if not 0 <= self.step_time < float("inf"):
            raise BadInput(f"--step-time is in seconds, 0 or more, got {self.step_time}")
        if not 0 <= self.pauses <= 1 or (self.pauses and not self.step_time):
            raise BadInput(f"--pauses is a share of the steps, with --step-time above 0; got {self.pauses}")
        _check_comms(self.comms)
        self._check_others()
        if self.checkpoint is not None and not self.resume:
            used = [p for c in self.comms for s in self.seeds if (p := run_path(self.checkpoint, c, s)).exists()]
            if used:
                raise BadInput(f"{used[0]} already holds this run: add --resume, or name another --checkpoint folder")

    @property
    def runs(self) -> tuple[str, ...]:
        """Specs that are trained, one after the other."""
        return (
            *self.comms,
            *(SERVER_PREFIX + rule for rule in self.servers),
            *(LOCAL_PREFIX + rule for rule in self.local),
        )

    def _check_others(self) -> None:
        kinds = (("--server", self.servers, ServerSpec.of), ("--local", self.local, LocalSpec.of))
        for name, rules, read in kinds:
            for i, rule in enumerate(rules):
                try:
                    read(rule)
                except ValueError as e:
                    raise BadInput(f"{name} {rule}: {e}") from e
                if rule in rules[:i]:
                    raise BadInput(f"{name} {rule} is given twice")
            for flag, on in (("--amp", self.amp), ("--limit", self.limit is not None), ("--hierarchy", self.hierarchy),
                             ("--checkpoint", self.checkpoint is not None)):  # fmt: skip
                if on and rules:
                    raise BadInput(f"{flag} goes with codecs, and not with {name}")

    def recipe(self, task: Defaults, comm: str) -> Defaults:
        """How one codec is trained: the flags over the task's defaults; the same for every codec.

        One exception: DGC applies momentum before it compresses, so the optimizer must not do it again.
        """
        optimizer = self.optimizer or task.optimizer
        lr = task.lr if optimizer == task.optimizer else _OTHER_LR[optimizer]
        return dataclasses.replace(
            task,
            optimizer=optimizer,
            lr=self.lr or lr,
            batch=self.batch or task.batch,
            steps=self.steps or task.steps,
            momentum=0.0 if _has_momentum(comm) else task.momentum,
        )


def _has_momentum(comm: str) -> bool:
    codec = ServerSpec.of(comm.removeprefix(SERVER_PREFIX)).push if comm.startswith(SERVER_PREFIX) else comm
    return codec.partition(":")[0].strip() == "dgc"


def check_ranks(ranks: int) -> None:
    """Raises BadInput unless so many local ranks make sense."""
    if ranks < 1:
        raise BadInput(f"--ranks must be at least 1, got {ranks}")


def _one_of(flag: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise BadInput(f"{flag}: {unknown(flag.strip('-'), value, known)}")


def _check_comms(comms: Sequence[str]) -> None:
    for i, spec in enumerate(comms):
        try:
            policy = policy_of(spec)
            policy.routes(world=2) if policy is not None else resolve(spec, world=2)
        except ValueError as e:
            raise BadInput(f"--comm {spec}: {e}") from e
        if spec in comms[:i]:
            raise BadInput(f"--comm {spec} is given twice")
