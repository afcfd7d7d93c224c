"""Training of one codec once, on one rank."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import statistics
import time
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.bench.results.record import levels_of

from .checkpoint import RunFolder, comm_state
from .evaluate import check_replicas, evaluate
from .loss_curve import Curve
from .result import Result, RunTraffic
from .sampler import Shards
from .settings import TrainSettings
from .tasks import BadInput, Defaults, Task, cross_entropy


class DdpRun:
    """Run of one codec with one seed, on one rank. All methods are collective.

    Args:
        settings: the command's.
        task: with its data on ``device``.
        comm: the codec's spec.
        seed: of the weights, the data order and the codec.
        device: where to train.
    """

    def __init__(self, settings: TrainSettings, task: Task, comm: str, seed: int, device: torch.device) -> None:
        self.settings, self.task, self.device = settings, task, device
        self.spec, self.seed = comm, seed
        self.recipe = settings.recipe(task.defaults, comm)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(seed)
        self.model = task.build().to(device)
        identity = _identity(settings, task, self.recipe, self.model)
        self.folder = RunFolder(settings.checkpoint, comm, seed, identity) if settings.checkpoint else None
        self.shards = Shards(len(task.train[0]), self.recipe.batch, self.rank, self.ranks, seed)
        self.step = 0
        self.traffic = RunTraffic()
        self.seconds: list[float] = []
        self.curve = Curve(settings.curve, lambda: evaluate(self.model, self.task, self._autocast)[0])
        self.note: str | None = None
        self._draw = random.Random(f"{seed} {self.rank}")
        self.levels: str | None = None

    @property
    def parameters(self) -> int:
        """Number of trained values."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    @property
    def goal(self) -> str:
        """The length of the run in words."""
        return f"{self.settings.epochs} epochs" if self.settings.epochs else f"{self.recipe.steps} steps"

    def train(self, on_step: Callable[[int, int], None]) -> Result:
        """Train to the end, from a checkpoint if told to.

        Args:
            on_step: called after every step with (steps done, steps in all).

        Raises:
            ReplicasDiffer: the ranks ended with different weights.
            CheckpointMismatch: the checkpoint belongs to another run.
        """
        if self.folder is not None and self.settings.resume:
            stored = self.folder.load_result(self.goal)
            if stored is not None:
                return Result(**stored)
        ddp = DistributedDataParallel(
            self.model,
            device_ids=[self.device.index] if self.device.type == "cuda" else None,
            bucket_cap_mb=self.settings.bucket_cap_mb,
        )
        optimizer = make_optimizer(self.recipe, self.model)
        scaler = torch.amp.GradScaler(self.device.type) if self.settings.amp else None
        comm = self._attach(ddp, scaler)
        if self.folder is not None and self.settings.resume:
            self._resume(self.folder, optimizer, scaler, comm)
        total = self.recipe.steps
        if self.settings.epochs:
            total = self.step + self.shards.steps_until(self.settings.epochs)
        before = self.traffic - RunTraffic.of(comm.stats(), self.model, self.step)
        with self.curve.running():
            while self.step < total:
                self._one_step(ddp, optimizer, scaler, total)
                if self.settings.curve:
                    self.curve.look(self.step, comm.stats().wire_bytes)
                on_step(self.step, total)
                due = self.step == total or (self.settings.every and self.step % self.settings.every == 0)
                if self.folder is not None and due:
                    self.traffic = before + RunTraffic.of(comm.stats(), self.model, self.step)
                    self._save(self.folder, optimizer, scaler, comm)
        self.traffic = before + RunTraffic.of(comm.stats(), self.model, self.step)
        comm.close()  # not after an error: it would wait for ranks that have none
        result = self._result()
        if self.folder is not None and self.rank == 0:
            self.folder.save_result(dataclasses.asdict(result), self.goal)
        return result

    def _attach(self, ddp: DistributedDataParallel, scaler: torch.amp.GradScaler | None) -> commlib.HookState:
        given = self.settings
        try:
            comm = commlib.attach(
                ddp,
                self.spec,
                scaler=scaler,
                dense_steps=given.dense_steps,
                min_size=given.min_size,
                seed=self.seed,
                limit=given.limit,
                hierarchy=given.hierarchy,
            )
        except ValueError as e:
            raise BadInput(f"--comm {self.spec}: {e}") from e
        self.levels = levels_of(comm.plan) if given.hierarchy else None
        return comm

    def _one_step(
        self, ddp: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None, total: int
    ) -> None:
        start = time.perf_counter()
        x, y = self._begin_step(optimizer, total)
        with self._autocast():
            loss = cross_entropy(ddp(x), y)
        self._pause()  # after the forward pass: before, there may be no values to compute with
        if scaler is None:
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        else:
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.step += 1
        self.seconds.append(time.perf_counter() - start)

    def _begin_step(self, optimizer: torch.optim.Optimizer, total: int) -> tuple[Tensor, Tensor]:
        """The next examples and their targets; the optimizer is ready for them."""
        rows = self.shards.next().to(self.device)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(self.recipe.lr, self.step, total)
        optimizer.zero_grad()
        x, y = (t[rows] for t in self.task.train)
        return x, y

    def _pause(self) -> None:
        """Sleep as long as a slower device would take; now and then ten times as long."""
        if self.settings.step_time:
            time.sleep(self.settings.step_time * (10 if self._draw.random() < self.settings.pauses else 1))

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        dtype = torch.float16 if self.device.type == "cuda" else torch.bfloat16
        return torch.autocast(self.device.type, dtype=dtype, enabled=self.settings.amp)

    def _result(self) -> Result:
        weights = check_replicas(self.model, self.device, self.spec)
        self.curve.look(self.step, self.traffic.wire, last=True)
        loss, accuracy = evaluate(self.model, self.task, self._autocast)
        return Result(
            comm=self.spec,
            seed=self.seed,
            steps=self.step,
            accuracy=accuracy,
            loss=loss,
            ms_per_step=1e3 * statistics.median(self.seconds) if self.seconds else None,
            **self.traffic.per_step(),
            replicas_equal=True,
            weights=weights,
            levels=self.levels,
            seconds=self.curve.wall,
            curve=self.curve.points,
            note=self.note,
        )

    # -- checkpoints ----------------------------------------------------------------------------

    def _save(
        self, folder: RunFolder, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None, comm: Any
    ) -> None:
        run = {
            "model": self.model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict() if scaler else None,
            "step": self.step,
            "epoch": self.shards.epoch,
            "consumed": self.shards.consumed,
        }
        rng = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self.device)
        folder.save(
            self.step, run, {"comm": comm.state_dict(), "rng": rng, "traffic": dataclasses.asdict(self.traffic)}
        )

    def _resume(
        self, folder: RunFolder, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None, comm: Any
    ) -> None:
        loaded = folder.load()
        if loaded is None:
            return
        run, owned = loaded
        self.model.load_state_dict(run["model"])
        optimizer.load_state_dict(run["optimizer"])
        if scaler is not None and run["scaler"]:
            scaler.load_state_dict(run["scaler"])
        here = comm.state_dict()
        comm.load_state_dict(comm_state(owned, self.rank, self.ranks, here.get("nodes")))
        self.step = run["step"]
        self.shards = dataclasses.replace(self.shards, epoch=run["epoch"], consumed=run["consumed"])
        if self.rank < len(owned):
            rng = owned[self.rank]["rng"]
            torch.set_rng_state(rng["cpu"])
            if "cuda" in rng and self.device.type == "cuda":
                torch.cuda.set_rng_state(rng["cuda"], self.device)
        self.traffic = RunTraffic(**owned[min(self.rank, len(owned) - 1)]["traffic"])


def learning_rate(peak: float, step: int, total: int) -> float:
    """Linear warm-up over the first tenth (at most 50 steps), then a straight line down to a twentieth of the peak."""
    warm = max(1, min(50, total // 10))
    if step < warm:
        return peak * (step + 1) / warm
    return peak * (1.0 - 0.95 * (step - warm) / max(1, total - warm))


def make_optimizer(recipe: Defaults, model: nn.Module) -> torch.optim.Optimizer:
    """The recipe's, over all parameters."""
    if recipe.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=recipe.lr)
    return torch.optim.SGD(model.parameters(), lr=recipe.lr, momentum=recipe.momentum)


def _identity(settings: TrainSettings, task: Task, recipe: Defaults, model: nn.Module) -> dict[str, object]:
    """Settings that a checkpoint must agree on to be continued; JSON values."""
    layout = repr([(n, tuple(p.shape)) for n, p in model.named_parameters()])
    values = sum(p.numel() for p in model.parameters())
    targets = task.train[1].cpu().contiguous()
    return {
        "task": task.name,
        "model": f"{values} parameters, layout {zlib.crc32(layout.encode()):08x}",
        "data": f"{len(targets)} examples, checksum {zlib.crc32(targets.numpy().tobytes()):08x}",
        "optimizer": recipe.optimizer,
        "lr": recipe.lr,
        "momentum": recipe.momentum,
        "batch": recipe.batch,
        "dense-steps": settings.dense_steps,
        "min-size": 1024 if settings.min_size is None else settings.min_size,  # as in checkpoints from before
        "amp": settings.amp,
        # None, if not given, as in checkpoints from before there were these
        "limit": settings.limit,
        "hierarchy": settings.hierarchy or None,
    }
