"""Agreement of all members of a job: the model, who updates it how, and the rules."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping
from typing import Any

import msgpack
import torch
from torch.optim import Optimizer

from commlib.errors import CommlibError, PlanMismatch
from commlib.runtime.layers import LayerSpec
from commlib.runtime.optimizers import OURS, Recipe
from commlib.server.job.chunks import NBYTES, Chunk, cut
from commlib.server.job.consistency import Consistency, make
from commlib.server.protocol.value_coding import ValueCoding, way, way_of_values

GO_ON, FAIL = "go on", "fail"


@dataclasses.dataclass(frozen=True)
class ServerJob:
    """Agreement of all workers and shards of one parameter server.

    Args:
        parameters: name → (shape, dtype's name), in the model's order.
        recipes: how values are updated.
        chosen: name → which of the recipes.
        consistency: a spec (:func:`~commlib.server.job.consistency.make`).
        workers: how many begin it.
        shards: with how many.
        copies: shards that keep a key.
        mean: pushes count 1/P each, else 1.
        lost: what becomes of the others if a worker is lost: they go on, or fail.
        patience: seconds of silence after which a member may be given up
            (:class:`~commlib.server.membership.failure_detector.FailureDetector`).
        nbytes: of a chunk, at most.
        priority: what the next forward pass needs first overtakes what waits to be sent.
        push: how gradients are coded (:func:`~commlib.server.protocol.value_coding.way`).
        pull: how values are.
    """

    parameters: Mapping[str, tuple[tuple[int, ...], str]]
    recipes: tuple[Recipe, ...]
    chosen: Mapping[str, int]
    consistency: str
    workers: int
    shards: int
    copies: int = 1
    mean: bool = True
    lost: str = GO_ON
    patience: float = 10.0
    nbytes: int = NBYTES
    priority: bool = False
    push: str = "none"
    pull: str = "none"

    def __post_init__(self) -> None:
        misfit = self.rule.misfit(self.workers, self.shards, self.copies)
        way(self.push)
        way_of_values(self.pull)
        for recipe in self.recipes:
            _kind(_name(recipe.kind))
        if self.lost not in (GO_ON, FAIL):
            raise ValueError(f"lost is {GO_ON!r} or {FAIL!r}, got {self.lost!r}")
        for what, least in (("workers", 1), ("shards", 1), ("copies", 1), ("patience", 0.1), ("nbytes", 1024)):
            if not getattr(self, what) >= least:
                raise ValueError(f"{what} must be {least} or more, got {getattr(self, what)}")
        if misfit is not None:
            raise ValueError(misfit)
        if self.copies > self.shards:
            raise ValueError(f"{self.copies} copies of a key need as many shards, and there are {self.shards}")

    @property
    def rule(self) -> Consistency:
        """Consistency model of the job."""
        return make(self.consistency)

    @property
    def chunks(self) -> dict[str, Chunk]:
        """Chunks by key, once for each group of shards. If an optimizer looks at more than single values, nothing is
        cut."""
        blank = {n: torch.empty(s, dtype=getattr(torch, d), device="meta") for n, (s, d) in self.parameters.items()}
        found = cut(
            blank,
            self.nbytes,
            alike=lambda name: self.chosen[name],
            whole=lambda name: not self.recipes[self.chosen[name]].by_element,
        )
        groups = self.rule.server_groups
        if groups > 1:
            found = [dataclasses.replace(chunk, group=g) for chunk in found for g in range(groups)]
        return {chunk.key: chunk for chunk in found}

    def chunks_of(self, worker: int) -> list[Chunk]:
        """Chunks that a worker pushes and pulls."""
        mine = self.rule.server_group(worker)
        return [chunk for chunk in self.chunks.values() if chunk.group in (None, mine)]

    @property
    def urgency(self) -> dict[str, int]:
        """Urgency of keys, in the order in which the model has their parameters; none without priority."""
        return {key: i for i, key in enumerate(self.chunks)} if self.priority else {}

    @property
    def coding(self) -> ValueCoding:
        """How gradients and values travel. A parameter in one piece is to codecs what it is, others are a row."""
        layers = {key: LayerSpec(key, self._shape(c)) for key, c in self.chunks.items() if c.dtype == torch.float32}
        return ValueCoding(way(self.push), way_of_values(self.pull), layers)

    def _shape(self, chunk: Chunk) -> tuple[int, ...]:
        shape = self.parameters[chunk.names[0]][0]
        return shape if len(chunk.pieces) == 1 and math.prod(shape) == chunk.numel else (chunk.numel,)

    @property
    def lag(self) -> float | None:
        """Seconds after which a push is too old; None: never."""
        return self.rule.lag

    @property
    def fingerprint(self) -> str:
        """The same for jobs that are the same."""
        return hashlib.blake2b(self.pack(), digest_size=8).hexdigest()

    @property
    def model(self) -> str:
        """The same for jobs whose snapshots fit: of the same parameters, optimizers and chunks."""
        kinds = [_name(recipe.kind) for recipe in self.recipes]
        told = msgpack.packb([dict(self.parameters), dict(self.chosen), kinds, self.nbytes])
        return hashlib.blake2b(told, digest_size=8).hexdigest()

    def pack(self) -> bytes:
        """As bytes; there is no pickle in them."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        made = [[_name(r.kind), dict(r.options)] for r in self.recipes]
        return bytes(msgpack.packb(fields | {"recipes": made}))

    @staticmethod
    def unpack(data: bytes) -> ServerJob:
        """Read a job from the bytes that :meth:`pack` gave.

        Raises:
            CommlibError: it is none; or its optimizer is not one that is known here.
        """
        try:
            found: dict[str, Any] = msgpack.unpackb(data)
            found["recipes"] = tuple(Recipe(_kind(name), _tuples(options)) for name, options in found["recipes"])
            found["parameters"] = {n: (tuple(shape), dtype) for n, (shape, dtype) in found["parameters"].items()}
            return ServerJob(**found)
        except Exception as e:  # msgpack and optimizers raise many; of bytes all mean the same
            raise CommlibError(f"what the job's members agreed on cannot be read here ({e}): another version?") from e

    def check(self, other: ServerJob, whose: str) -> None:
        """That another has the same.

        Raises:
            PlanMismatch: what differs first, in words.
        """
        if list(self.parameters) != list(other.parameters):
            pairs = zip([*self.parameters, "no more"], [*other.parameters, "no more"], strict=False)
            here, there = next((a, b) for a, b in pairs if a != b)
            raise PlanMismatch(f"this model has {here} where {whose} has {there}: all must have the same model")
        for name, (shape, dtype) in self.parameters.items():
            if (shape, dtype) != other.parameters[name]:
                that = other.parameters[name]
                raise PlanMismatch(f"{name} is {dtype} of {shape} here, and {that[1]} of {that[0]} at {whose}")
        for field in dataclasses.fields(self):
            here, there = getattr(self, field.name), getattr(other, field.name)
            if here != there:
                raise PlanMismatch(f"{field.name}: {here!r} here, and {there!r} at {whose}; all must say the same")


def _name(kind: type[Optimizer]) -> str:
    return next((name for name, ours in OURS.items() if ours is kind), f"{kind.__module__}:{kind.__qualname__}")


def _kind(name: str) -> type[Optimizer]:
    """Optimizer of this name, of those that there are: nothing is imported for a text from outside."""
    known = {_name(k): k for k in vars(torch.optim).values() if isinstance(k, type) and issubclass(k, Optimizer)}
    if name not in known and name not in OURS:
        raise ValueError(f"shards know the optimizers of torch.optim and commlib.runtime.proximal, and {name} is none")
    return OURS.get(name) or known[name]


def _tuples(options: Mapping[str, Any]) -> dict[str, Any]:
    """msgpack has lists only, and optimizers have tuples (``betas``)."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
