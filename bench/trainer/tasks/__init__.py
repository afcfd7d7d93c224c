"""Training tasks: each has a model, data, and the settings it learns well with."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from commlib.errors import MissingDependency, unknown

TASKS = ("digits", "text", "cifar")


class BadInput(ValueError):
    """A flag or a data file asks for something that cannot be; the command exits with code 2."""


@dataclasses.dataclass(frozen=True)
class Defaults:
    """Settings used where no flag says otherwise.

    Args:
        optimizer: ``"sgd"`` (momentum as below) or ``"adam"``.
        lr: learning rate after a short linear warm-up.
        steps: training steps.
        batch: examples per rank and step.
        momentum: of sgd; a codec that brings its own gets 0.
    """

    optimizer: str
    lr: float
    steps: int
    batch: int
    momentum: float = 0.9


@dataclasses.dataclass(frozen=True)
class Task:
    """A classification task whose every example is one row of two tensors.

    Args:
        name: as given to ``--task``.
        build: makes the model; its weights follow from torch's random state.
            Inputs of shape (batch, …) give logits of shape (batch, …, classes).
        train: (inputs, targets), n rows each; targets are int64 class numbers of shape (n, …).
        test: the same, never trained on.
        defaults: settings it learns well with, shared by every codec.
    """

    name: str
    build: Callable[[], nn.Module]
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    defaults: Defaults

    def to(self, device: torch.device) -> Task:
        """The same task with its data on a device."""
        x, y = self.train
        u, v = self.test
        return dataclasses.replace(self, train=(x.to(device), y.to(device)), test=(u.to(device), v.to(device)))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy (nats): logits (…, classes), targets (…)."""
    return nn.functional.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def load_task(name: str, data: Path | None, hidden: int | None) -> Task:
    """A task by name.

    Args:
        name: one of ``TASKS``.
        data: a file for tasks that read one.
        hidden: width of the hidden layers; None is the task's own.

    Raises:
        BadInput: unknown name, or a data file that is missing or not as expected.
        MissingDependency: the task needs a package that is not installed.
    """
    if name not in TASKS:
        raise BadInput(unknown("task", name, TASKS))
    if data is not None and not data.is_file():
        raise BadInput(f"--data {data}: no such file")
    module = importlib.import_module(f"{__package__}.{name}")
    task: Task = module.load(data, hidden)
    return task


def needs(task: str, package: str) -> MissingDependency:
    """The error for a task whose package is not installed."""
    return MissingDependency(f'task {task!r} needs {package}: pip install "torch-commlib[examples]"')
