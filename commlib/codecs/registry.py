"""Spec strings of codecs, and the entry points where codecs are found.

Codecs are found through the entry-point group ``commlib.compressors``: ours and a third party's
alike. A spec string names one with its options::

    name[:option=value[,option=value…]]          topk:ratio=0.01,values=int8

``ef=on`` and ``ef=off`` are understood for every codec and switch error feedback; by default biased
codecs have it and unbiased ones do not. ``ef=0.95`` has a residual that decays by so much a step.

Compiling codecs' loops before training needs them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping
from importlib.metadata import EntryPoint

import torch

from commlib.codecs.base import Compressor, LayerSpec, Memory
from commlib.codecs.error_feedback import ErrorFeedback, with_default_feedback
from commlib.runtime.plugins import build, fetch, installed, split, switch

GROUP = "commlib.compressors"


@functools.cache
def compressors() -> Mapping[str, EntryPoint]:
    """Name → entry point of every installed codec, read-only.

    Raises:
        ValueError: if two distributions offer different codecs under one name.
    """
    return installed(GROUP, "codecs")


def load(name: str) -> type[Compressor]:
    """The codec class of that name.

    Raises:
        ValueError: unknown name; the message lists what is known and the nearest.
        MissingDependency: the codec's module needs a package that is not installed.
        TypeError: the entry point is no Compressor.
    """
    known = compressors()
    cls = fetch("compressor", name, known)
    if not (isinstance(cls, type) and issubclass(cls, Compressor)):
        raise TypeError(f"entry point {known[name].value} of compressor {name!r} is not a commlib.Compressor")
    return cls


def make(spec: str | Compressor) -> Compressor:
    """A codec from its spec string, error feedback included; a Compressor gets its default feedback.

    Raises:
        ValueError: unknown codec or option, or a value out of range.
    """
    if isinstance(spec, Compressor):
        return with_default_feedback(spec)
    if not isinstance(spec, str):
        raise TypeError(f"a compressor is a spec string or a Compressor, not {type(spec).__name__}")
    name, options = split("compressor", spec)
    feedback = _feedback(spec, options.pop("ef")) if "ef" in options else None
    residual = options.pop("residual", None)
    codec = _build(name, options)
    found = with_default_feedback(codec)
    if feedback is not None:
        found = ErrorFeedback(codec, feedback) if feedback else codec
    if residual is None:
        return found
    if not isinstance(found, ErrorFeedback):
        raise ValueError(
            f"{spec!r}: residual={residual} is for error feedback, which it has not: leave it out, or ef=on"
        )
    return dataclasses.replace(found, residual=residual)


def make_plain(spec: str) -> Compressor:
    """A codec without error feedback, as a part of another one (``values=int8``)."""
    return _build(*split("compressor", spec))


def _feedback(spec: str, text: str) -> float:
    """Decay of residuals: 1 for ``on``, 0 for ``off``."""
    try:
        return float(text)
    except ValueError:
        return float(switch(spec, "ef", text))


def _build(name: str, options: Mapping[str, str]) -> Compressor:
    return build(load(name), name, options, also=("ef", "residual"))


_SHAPE = (8, 16)


def warm(codecs: Iterable[Compressor], device: torch.device, *, reduced: Collection[str] = ()) -> None:
    """Run every codec once in each way that exchanges do, so that no step waits until its loops are compiled.

    What has been compiled is kept on disk: that takes seconds once on a machine, and some tens of milliseconds later.

    Args:
        codecs: to run.
        device: of the gradients.
        reduced: spec strings of those whose payloads an all-reduce adds up, so that none are decoded together.
    """
    for codec in {str(codec): codec for codec in codecs if not codec.lossless}.values():
        spec = LayerSpec("warm", _SHAPE, device=device)
        need, memory = codec.nbytes(spec), Memory.zeros(codec, spec)
        x = torch.zeros(_SHAPE, dtype=torch.float32, device=device)
        rows = torch.zeros(2, -(-need // 8) * 8 + 8, dtype=torch.uint8, device=device)[:, :need]
        payload = torch.zeros(need, dtype=torch.uint8, device=device)
        codec.compress(x, payload, memory=memory, seed=0)
        for row in rows:
            row.copy_(payload)
        codec.decompress(payload, x, seed=0)
        if str(codec) not in reduced:
            codec.decompress_sum(rows, x, seeds=[0, 0])
            codec.decompress_sum(payload[None], x, scale=0.5, seeds=[0])  # without gaps: another variant of a loop
