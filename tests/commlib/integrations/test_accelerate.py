"""commlib in Accelerate's own loop, on real ranks: what is attached, saved by save_state, and given back."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from torch import nn

import commlib.integrations.accelerate
from commlib import CheckpointMismatch
from commlib.groups.world import World
from tests.support.rank_pool import Fleet
from tests.support.tiny_ddp import Logged, batch, model, owed, same, same_everywhere, torchrun


@contextmanager
def processes(world: World) -> Iterator[None]:
    """Accelerate keeps what it has seen for the life of a process, and here many jobs follow each other in one."""
    with torchrun(world, world.size):
        _forget()
        try:
            yield
        finally:
            _forget()
            gc.collect()  # before the process group, on which DDP models must not be left


def _forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()


class Loop:
    """Accelerate's loop as its pages have it."""

    def __init__(self, world: World, spec: str | None, *, scaled: bool = False, accumulate: int = 1, **options: Any):
        self.world = world
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        if scaled:  # Accelerate gives the CPU none of itself
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        self.model, self.optimizer = self.accelerator.prepare(module, optimizer)
        self.comm: Any = None
        if spec is not None:
            self.comm = commlib.integrations.accelerate.attach(
                self.accelerator, self.model, spec, min_size=0, **options
            )
        self.batches = 0

    def train(self, batches: int) -> None:
        for _ in range(batches):
            with self.accelerator.accumulate(self.model):
                x, y = batch(self.world, self.batches)
                self.accelerator.backward(nn.functional.cross_entropy(self.model(x), y))
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.batches += 1

    def everything(self) -> dict[str, Any]:
        """What must be equal to the last bit."""
        weights = {k: v.clone() for k, v in self.accelerator.unwrap_model(self.model).state_dict().items()}
        momentum = [s["momentum_buffer"].clone() for s in self.optimizer.state_dict()["state"].values()]
        scaler = {} if self.accelerator.scaler is None else self.accelerator.scaler.state_dict()
        comm = None if self.comm is None else self.comm.state_dict()
        return {"weights": weights, "momentum": momentum, "scaler": scaler, "comm": comm}

    def flat(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])

    def close(self) -> None:
        if self.comm is not None:
            self.comm.close()


# -- resuming -----------------------------------------------------------------------------------


def resumed(world: World, folder: str, spec: str, scaled: bool) -> dict[str, bool]:
    with processes(world):
        options: dict[str, Any] = {"scaled": scaled, "accumulate": 2, "dense_steps": 1}
        whole = Loop(world, spec, **options)
        whole.train(6)
        whole.accelerator.save_state(folder)
        whole.train(8)
        again = Loop(world, spec, **options)
        again.accelerator.load_state(folder)
        again.batches = 6
        again.train(8)
        expected, got = whole.everything(), again.everything()
        found = {
            "equal": same(expected, got),
            "steps": got["comm"]["step"] == 7,
            "owes something": any(float(v.abs().sum()) for v in owed([got["comm"]]).values()),
            "replicas": same_everywhere(world, whole.flat()),
            "fewer bytes": again.comm.stats().ratio > 2,
            "scale moved": not scaled or got["scaler"]["scale"] > 2.0**10,
            "unwrapped": type(whole.accelerator.unwrap_model(whole.model)) is nn.Sequential,
        }
        whole.close()
        again.close()
        del whole, again
        return found


@pytest.mark.parametrize(
    ("spec", "scaled"),
    [("onebit", False), ("topk:ratio=0.1", False), ("onebit", True)],
    ids=["onebit", "topk", "scaler"],
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(fleet: Fleet, tmp_path: Path, spec: str, scaled: bool):
    for found in fleet.run(2, resumed, str(tmp_path), spec, scaled):
        assert all(found.values()), found
    assert sorted(torch.load(tmp_path / "commlib.pt")["ranks"]) == ["0", "1"]


def saves(world: World, folder: str) -> dict[str, Any]:
    with processes(world):
        loop = Loop(world, "onebit")
        loop.train(3)
        loop.accelerator.save_state(folder)
        loop.close()
        state: dict[str, Any] = loop.comm.state_dict()
        del loop
        return state


def loads(world: World, folder: str) -> dict[str, Any]:
    with processes(world):
        loop = Loop(world, "onebit")
        loop.accelerator.load_state(folder)
        state: dict[str, Any] = loop.comm.state_dict()
        loop.train(1)
        loop.close()
        del loop
        return state


def test_another_number_of_processes_shares_out_what_was_not_sent(fleet: Fleet, tmp_path: Path):
    before, after = owed(fleet.run(2, saves, str(tmp_path))), owed(fleet.run(3, loads, str(tmp_path)))
    for name, values in before.items():
        assert float(values.abs().sum()) > 0
        torch.testing.assert_close(after[name], values, rtol=1e-5, atol=1e-9)


def begins_to_compress(world: World, folder: str) -> tuple[list[str], str]:
    with processes(world), Logged() as said:
        plain = Loop(world, None)
        plain.train(2)
        plain.accelerator.save_state(folder)
        dist.barrier()
        loop = Loop(world, "onebit")
        loop.accelerator.load_state(folder)
        loop.train(1)
        loop.accelerator.save_state(f"{folder}/of-{world.rank}")  # the state is on rank 0: rank 1's folder has none
        dist.barrier()
        try:
            loop.accelerator.load_state(f"{folder}/of-{world.rank}")
            uneven = ""
        except CheckpointMismatch as e:
            uneven = str(e)
        loop.close()
        del loop, plain
        return said, uneven


def test_a_run_without_commlib_goes_on_with_it_and_says_so_once(fleet: Fleet, tmp_path: Path):
    (first, one), (second, other) = fleet.run(2, begins_to_compress, str(tmp_path))
    assert first == [f"{tmp_path}/commlib.pt is not there: residuals begin at zero"]
    assert second == []
    assert one == other
    assert one.startswith("rank 1 of 2 found no state of commlib")


def two_models(world: World, folder: str) -> list[str]:
    with processes(world):
        accelerator = Accelerator(cpu=True)
        models = [accelerator.prepare(nn.Linear(8, 8)) for _ in range(2)]
        comms = [commlib.integrations.accelerate.attach(accelerator, m, "onebit", min_size=0) for m in models]
        for m in models:
            accelerator.backward(m(torch.full((2, 8), float(world.rank))).square().sum())
        accelerator.save_state(folder)
        dist.barrier()
        accelerator.load_state(folder)
        for comm in comms:
            comm.close()
        files = sorted(p.name for p in Path(folder).glob("commlib*"))
        del accelerator, models, comms, m, comm
        return files


def test_two_models_have_a_file_each(fleet: Fleet, tmp_path: Path):
    assert fleet.run(2, two_models, str(tmp_path)) == [["commlib.pt", "commlib_1.pt"]] * 2


# -- training -----------------------------------------------------------------------------------


def as_plain(world: World) -> bool:
    with processes(world):
        loops = [Loop(world, spec, accumulate=2) for spec in (None, "none")]
        for loop in loops:
            loop.train(6)
        equal = same(loops[0].everything()["weights"], loops[1].everything()["weights"])
        loops[1].close()
        del loops, loop
        return equal


def test_none_is_plain_accelerate_bit_for_bit(fleet: Fleet):
    assert fleet.run(2, as_plain) == [True, True]


# -- bad input ----------------------------------------------------------------------------------


def refused(world: World) -> list[str]:
    with processes(world):
        hooked = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
        accelerator = Accelerator(cpu=True, kwargs_handlers=[hooked])
        ddp, bare = accelerator.prepare(nn.Linear(4, 4)), nn.Linear(4, 4)
        found = []
        for m, options in ((bare, {}), (ddp, {"scaler": None}), (ddp, {})):
            try:
                commlib.integrations.accelerate.attach(accelerator, m, "onebit", **options)
            except ValueError as e:
                found.append(str(e))
        del accelerator, ddp, m
        return found


def test_what_is_not_in_ddp_or_has_a_hook_is_refused(fleet: Fleet):
    for bare, scaler, hooked in fleet.run(2, refused):
        assert "is no DistributedDataParallel but Linear: attach after model = accelerator.prepare(model)" in bare
        assert "it is that of Accelerator(mixed_precision=…)" in scaler
        assert "already has a communication hook (fp16_compress_hook)" in hooked


def test_one_process_and_no_accelerator_are_refused():
    try:
        accelerator = Accelerator(cpu=True)
        with pytest.raises(ValueError, match="there is one process: start 2 or more"):
            commlib.integrations.accelerate.attach(accelerator, accelerator.prepare(nn.Linear(4, 4)), "onebit")
    finally:
        _forget()
    with pytest.raises(TypeError, match=r"must be an accelerate\.Accelerator, got Linear"):
        commlib.integrations.accelerate.attach(nn.Linear(4, 4), nn.Linear(4, 4))
