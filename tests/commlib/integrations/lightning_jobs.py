"""Trainings in Lightning's own Trainer, which test_lightning.py has ranks do: Lightning takes seconds to import."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import tempfile
from typing import Any, TypeVar

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy as PlainStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import commlib
import commlib.integrations.lightning
import commlib.integrations.lightning_strategy
from commlib import CheckpointMismatch
from commlib.groups.world import World
from commlib.integrations.lightning import DDPStrategy
from commlib.integrations.lightning_strategy import KEY
from tests.support.tiny_ddp import Logged, batch, model, owed, same, same_everywhere

BATCHES = 6  # an epoch


T = TypeVar("T")


class Toy(pl.LightningModule):
    """The data of a step follow from its number, so those of a resumed run are the same."""

    def __init__(self, world: World, *, raises_at: int = -1, width: int = 48) -> None:
        super().__init__()
        self.net = model() if width == 48 else nn.Linear(64, 5)
        self.world, self.raises_at, self.seen = world, raises_at, 0
        self.taken: dict[str, Any] = {}

    def on_train_start(self) -> None:
        comm = getattr(self.trainer.strategy, "comm", None)
        self.taken = {} if comm is None else comm.state_dict()

    def training_step(self, which: torch.Tensor, index: int) -> Any:
        if self.trainer.global_step == self.raises_at:
            raise ArithmeticError("as asked")
        step = self.trainer.global_step * self.trainer.accumulate_grad_batches + index % 2
        x, y = batch(self.world, step)
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, which: torch.Tensor, index: int) -> None:
        self.seen += 1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class ByHand(Toy):
    """Manual optimization."""

    automatic_optimization = False

    def training_step(self, which: torch.Tensor, index: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(which, 0))
        optimizer.step()


def trainer(world: World, strategy: Any, folder: Any = None, **options: Any) -> pl.Trainer:
    """Of this rank, which is there already, as under torchrun."""
    os.environ.update(RANK=str(world.rank), LOCAL_RANK=str(world.rank), WORLD_SIZE=str(world.size))
    for name in ("lightning", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    saver = pl.callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=4, save_top_k=-1)
    epochs = pl.callbacks.ModelCheckpoint(folder, "end-{step}", every_n_epochs=1, save_top_k=-1)
    callbacks = options.pop("callbacks", []) + ([saver, epochs] if folder else [])
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    options = {"max_epochs": 2, "enable_checkpointing": bool(callbacks), **quiet, **options}
    plugins = [TorchElasticEnvironment(), *options.pop("plugins", [])]
    return pl.Trainer(
        accelerator="cpu", devices=world.size, strategy=strategy, plugins=plugins, callbacks=callbacks, **options
    )


def fit(world: World, strategy: Any, module: Toy | None = None, *, resume: Any = None, **options: Any) -> pl.Trainer:
    made = trainer(world, strategy, **options)
    module = Toy(world) if module is None else module
    made.fit(module, loader_of(world), ckpt_path=resume)
    return made


def loader_of(world: World) -> Any:
    return DataLoader(TensorDataset(torch.arange(BATCHES * world.size)), batch_size=1)


def everything(made: pl.Trainer) -> dict[str, Any]:
    """What must be equal to the last bit."""
    strategy: Any = made.strategy
    plugin = made.precision_plugin.state_dict()
    optimizer = [s["momentum_buffer"] for s in made.optimizers[0].state_dict()["state"].values()]
    weights = {k: v.clone() for k, v in made.lightning_module.state_dict().items()}
    return {"weights": weights, "momentum": optimizer, "comm": strategy.comm.state_dict(), "scaler": plugin}


def plugins(mixed: bool) -> list[Any]:
    """Lightning gives the CPU no GradScaler of itself. The scale grows every third step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    return [MixedPrecision("16-mixed", "cpu", scaler=scaler)] if mixed else []


# -- resuming -----------------------------------------------------------------------------------


def resumed_everywhere(world: World, folder: str, spec: str, mixed: bool) -> dict[str, bool]:
    options: dict[str, Any] = {"min_size": 0, "dense_steps": 2}
    whole = fit(world, DDPStrategy(spec, **options), folder=folder, plugins=plugins(mixed))
    expected = everything(whole)
    found = {"replicas": same_everywhere(world, flat(whole)), "steps": expected["comm"]["step"] == 2 * BATCHES}
    found["owes something"] = any(float(v.abs().sum()) for v in owed([expected["comm"]]).values())
    for name in ("step=4", "step=8", "end-step=6"):  # in the middle of an epoch, and at its end
        again = fit(
            world, DDPStrategy(spec, **options), resume=f"{folder}/{name}.ckpt", max_epochs=2, plugins=plugins(mixed)
        )
        found[name] = same(everything(again), expected)
    found["scale moved"] = not mixed or expected["scaler"]["scale"] > 2.0**10
    whole.save_checkpoint(f"{folder}/after.ckpt")  # after fit has ended
    longer = fit(
        world, DDPStrategy(spec, **options), resume=f"{folder}/after.ckpt", max_epochs=3, plugins=plugins(mixed)
    )
    straight = fit(world, DDPStrategy(spec, **options), max_epochs=3, plugins=plugins(mixed))
    found["after fit"] = same(everything(longer), everything(straight))
    return ended(found)


def flat(made: pl.Trainer) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in made.lightning_module.parameters()])


def ended(found: T) -> T:
    """Before the process group, on which DDP models must not be left."""
    gc.collect()
    return found


def saves(world: World, folder: str) -> dict[str, Any]:
    made = fit(world, DDPStrategy("onebit", min_size=0), max_epochs=1, folder=folder)
    return ended(everything(made)["comm"])


def takes(world: World, folder: str) -> dict[str, Any]:
    module = Toy(world)
    fit(world, DDPStrategy("onebit", min_size=0), module, resume=f"{folder}/step=4.ckpt", max_steps=5, max_epochs=-1)
    return ended(module.taken)


def begins_to_compress(world: World, folder: str) -> tuple[list[str], bool, int]:
    fit(world, PlainStrategy(), max_epochs=1, folder=folder)
    strategy = DDPStrategy("onebit", min_size=0)
    module = Toy(world)
    with Logged() as said:
        fit(world, strategy, module, resume=f"{folder}/step=4.ckpt", max_steps=6)
    assert strategy.comm is not None
    return ended((said, module.taken["ranks"] == {str(world.rank): {}}, strategy.comm.stats().steps))


def goes_back(world: World, folder: str) -> int:
    fit(world, DDPStrategy("onebit", min_size=0), max_epochs=1, folder=folder)
    return ended(fit(world, PlainStrategy(), resume=f"{folder}/step=4.ckpt", max_epochs=1).global_step)


def uneven(world: World, folder: str) -> str:
    fit(world, DDPStrategy("onebit", min_size=0), max_epochs=1, folder=folder)
    own = torch.load(f"{folder}/step=4.ckpt", weights_only=False)
    if world.rank == 1:
        del own[KEY]
    torch.save(own, f"{folder}/of-{world.rank}.ckpt")
    try:
        fit(world, DDPStrategy("onebit", min_size=0), resume=f"{folder}/of-{world.rank}.ckpt", max_epochs=1)
    except CheckpointMismatch as e:
        return ended(str(e))
    return ended("")


# -- exceptions ---------------------------------------------------------------------------------


def interrupted(world: World, folder: str) -> dict[str, Any]:
    commlib.integrations.lightning_strategy._PATIENCE = 120.0
    saver = pl.callbacks.OnExceptionCheckpoint(folder, "together")
    options: dict[str, Any] = {"max_epochs": 1, "callbacks": [saver]}
    made = trainer(world, DDPStrategy("onebit", min_size=0), **options)
    with pytest.raises(ArithmeticError):
        made.fit(Toy(world, raises_at=3), loader_of(world))
    alone = f"{folder}/alone.ckpt"
    commlib.integrations.lightning_strategy._PATIENCE = 0.5
    with Logged() as said:
        if world.rank == 0:  # this rank alone has failed
            made.strategy.save_checkpoint(made._checkpoint_connector.dump_checkpoint(False), alone)
    dist.barrier()
    after = Toy(world)
    with Logged() as resumed:
        fit(world, DDPStrategy("onebit", min_size=0), after, resume=alone, max_steps=5)
    commlib.integrations.lightning_strategy._PATIENCE = 10.0
    return ended({"said": said, "resumed": resumed, "step": after.taken["step"]})


# -- training -----------------------------------------------------------------------------------


def as_plain(world: World) -> dict[str, bool]:
    found = {}
    for name, module in (("automatic", Toy), ("by hand", ByHand)):
        options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5} if module is Toy else {}
        plain = flat(fit(world, PlainStrategy(), module(world), max_epochs=1, **options))
        ours = fit(world, DDPStrategy("none", bucket_cap_mb=1), module(world), max_epochs=1, **options)
        found[name] = torch.equal(plain, flat(ours))
        found[f"{name}, steps"] = everything(ours)["comm"]["step"] == (3 if module is Toy else 6)
        lossy = fit(world, DDPStrategy("onebit", min_size=0), module(world), max_epochs=1, **options)
        strategy: Any = lossy.strategy
        found[f"{name}, compressed"] = strategy.comm.stats().ratio > 4 and same_everywhere(world, flat(lossy))
    return ended(found)


def without_fit(world: World) -> tuple[bool, int, bool]:
    strategy = DDPStrategy("onebit")
    module = Toy(world)
    made = trainer(world, strategy, enable_checkpointing=False)
    made.validate(module, loader_of(world), verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        made.save_checkpoint(f"{folder}/valid.ckpt", weights_only=True)
        made.fit(module, loader_of(world))
        made.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
        extra = world.rank == 0 and KEY in torch.load(f"{folder}/weights.ckpt", weights_only=True)
    return ended((strategy.comm is None, module.seen, extra))


def in_the_other_package(world: World, folder: str) -> list[str]:
    import pytorch_lightning as other

    import commlib.integrations.pytorch_lightning

    class Small(other.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self, which: Any) -> Any:
            x, y = batch(world, self.global_step)
            return nn.functional.cross_entropy(self.net(x), y)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    os.environ.update(RANK=str(world.rank), LOCAL_RANK=str(world.rank), WORLD_SIZE=str(world.size))
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    strategy = commlib.integrations.pytorch_lightning.DDPStrategy("onebit", min_size=0)
    environment: Any = importlib.import_module("lightning_fabric.plugins.environments").TorchElasticEnvironment()
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    made = other.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        plugins=[environment],
        max_steps=3,
        **quiet,
        default_root_dir=folder,
    )
    made.fit(Small(), loader_of(world))
    made.save_checkpoint(f"{folder}/other.ckpt")
    return ended(sorted(torch.load(f"{folder}/other.ckpt", weights_only=False)[KEY]["ranks"]))
