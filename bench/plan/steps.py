"""When a step's gradients are there: a forward and backward pass on paper, in DDP's buckets."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from commlib.planning.cost.overlap import Bucket, Pass

from .assumptions import Setting
from .model import Layer, Model

BYTES = 4
"""Of a value: float32."""
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20
"""Bytes at which DDP closes its first bucket and every other one."""


def alone_s(model: Model, setting: Setting) -> float:
    """Seconds of a step of one rank: forward, and twice that backward."""
    return setting.compute_s(3 * model.flops * setting.batch)


def one_pass(model: Model, setting: Setting) -> Pass:
    """A step that is all dense.

    The backward pass goes through the layers from the last to the first. Each takes twice its forward pass: once for
    the gradient of its weight, once for that of its input. A layer's gradient is there when both are.

    What is computed for an exchange runs on the GPU that also computes the backward pass, so no cores are spare.
    """
    now = setting.compute_s(model.flops * setting.batch)
    rows, ready = {}, {}
    for layer in reversed(model.layers):
        if layer.linear:
            rows[layer.name] = now
        now += 2 * setting.compute_s(layer.flops * setting.batch)
        ready[layer.name] = now
    made = tuple(Bucket(ready[names[-1]], names) for names in buckets(model.layers))
    return Pass(made, rows, now, spare_cores=False)


def without_overlap(p: Pass) -> Pass:
    """The same, with every bucket held back until the backward pass has ended."""
    return dataclasses.replace(p, buckets=tuple(dataclasses.replace(b, ready=p.end) for b in p.buckets))


def buckets(layers: Sequence[Layer]) -> Iterator[tuple[str, ...]]:
    """Names of the layers that DDP hands over together, in its order: from the last layer on.

    A bucket is closed by the layer that fills it, so it may be larger than its limit. Weight and bias stay together.
    """
    names: list[str] = []
    size, limit = 0, FIRST_BUCKET
    for layer in reversed(layers):
        if not layer.parameters:
            continue
        names.append(layer.name)
        size += BYTES * layer.parameters
        if size >= limit:
            yield tuple(names)
            names, size, limit = [], 0, BUCKET
    if names:
        yield tuple(names)
