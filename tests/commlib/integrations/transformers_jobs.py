"""Trainings in transformers' own Trainer, which test_transformers.py has ranks do: it takes seconds to import."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import Dataset

from commlib.groups.world import World
from commlib.integrations.transformers import attach
from tests.support.tiny_ddp import Logged, owed, same, same_everywhere, torchrun


@contextmanager
def processes(world: World) -> Iterator[None]:
    """Accelerate keeps what it has seen for the life of a process, and here many jobs follow each other in one."""
    with torchrun(world, world.size):
        AcceleratorState._reset_state(reset_partial_state=True)
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
            gc.collect()  # before the process group, on which DDP models must not be left


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """96 of 12 tokens."""

    def __init__(self) -> None:
        self.tokens = torch.randint(50, (96, 12), generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


def trainer(folder: str, spec: Any, **options: Any) -> tuple[Any, Any]:
    """12 updates of 2 accumulated batches, in 2 epochs; with dropout, so random numbers count, too."""
    transformers.set_seed(3)
    config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    arguments: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4, "num_train_epochs": 2, **options}
    args = transformers.TrainingArguments(
        folder,
        use_cpu=True,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        **arguments,
    )
    made = transformers.Trainer(transformers.GPT2LMHeadModel(config), args, train_dataset=Sentences())
    made.remove_callback(transformers.PrinterCallback)
    return made, None if spec is None else attach(made, spec, min_size=0)


def everything(made: Any, attached: Any) -> dict[str, Any]:
    """What must be equal to the last bit."""
    weights = {k: v.clone() for k, v in made.model.state_dict().items()}
    optimizer = [s["exp_avg_sq"].clone() for s in made.optimizer.state_dict()["state"].values()]
    return {
        "weights": weights,
        "optimizer": optimizer,
        "comm": None if attached is None else attached.comm.state_dict(),
    }


def resumed(world: World, folder: str, spec: str) -> dict[str, bool]:
    with processes(world):
        made, attached = trainer(folder, spec)
        made.train()
        expected = everything(made, attached)
        weights = torch.cat([p.detach().reshape(-1) for p in made.model.parameters()])
        found = {"replicas": same_everywhere(world, weights), "fewer bytes": attached.comm.stats().ratio > 2}
        found["owes something"] = any(float(v.abs().sum()) for v in owed([expected["comm"]]).values())
        for resume in (f"{folder}/checkpoint-4", f"{folder}/checkpoint-8", True):
            again, other = trainer(folder, spec, save_strategy="no")
            again.train(resume_from_checkpoint=resume)
            found[str(resume)[-1:]] = same(everything(again, other), expected)
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-8")  # a second time, in the same DDP model
        found["again"] = same(everything(again, other), expected)
        del made, attached, again, other
        return found


def begins_to_compress(world: World, folder: str) -> dict[str, Any]:
    with processes(world), Logged() as said:
        plain, _ = trainer(folder, None, max_steps=6)
        plain.train()
        dist.barrier()
        models, attached = trainer(f"{folder}/light", "onebit", max_steps=6, save_only_model=True)
        models.train(resume_from_checkpoint=f"{folder}/checkpoint-4")
        steps = attached.comm.stats().steps
        dense, _ = trainer(f"{folder}/dense", "none", max_steps=6)
        dense.train()
        equal = same(everything(plain, None)["weights"], everything(dense, None)["weights"])
        del plain, models, attached, dense
        return {"said": said, "steps": steps, "none is plain": equal}


def refused(world: World, folder: str) -> list[str]:
    with processes(world):
        made, _ = trainer(folder, "onebit")
        found = []
        for options in ({}, {"scaler": None}):
            try:
                attach(made, "onebit", **options)
            except ValueError as e:
                found.append(str(e))
        del made
        return found


def alone(world: World, folder: str) -> str:
    with processes(world):
        try:
            trainer(folder, "onebit")
        except ValueError as e:
            return str(e)
    return ""
