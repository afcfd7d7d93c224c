"""``trace(path)``: what a rank does, recorded until it stops, and saved as one file.

Parts have a trace in their hands only while one is recorded, and :data:`~commlib.telemetry.trace.NONE` otherwise; the
model has hooks for it only then. Nothing here keeps alive what is traced: a recording that nobody stops is saved when
that goes, or the process ends.

When a model's passes begin and end, for a trace: by hooks that are there only while one is recorded.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from commlib.runtime.autograd import at_end_of_backward
from commlib.telemetry.stats import within
from commlib.telemetry.trace import NONE, Trace, TraceFailed

TRACK = "training"
"""What the thread that trains does."""


class PassRecorder:
    """Recorder of one model's passes, until :meth:`remove`.

    A backward pass begins when it comes to the model's outputs (whatever these are made of, as long as ``torch`` finds
    the tensors in them), and ends when all gradients are there; what is exchanged may take longer.

    Args:
        module: the model.
        trace: where they are recorded.
    """

    def __init__(self, module: nn.Module, trace: Trace) -> None:
        self._trace = trace
        self._forward: float | None = None
        self._backward: float | None = None
        self._handles = [
            module.register_forward_pre_hook(_Hook(self._begin), prepend=True),  # what other hooks do is of the pass
            module.register_forward_hook(_Hook(self._end)),
        ]

    def remove(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _begin(self, *_: Any) -> None:
        self._forward, self._backward = self._trace.now(), None  # a pass that broke off is none

    def _end(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._forward is not None:
            self._trace.span(TRACK, "forward", self._forward, self._trace.now())
        self._forward = None
        for output in tree_leaves(outputs) if torch.is_grad_enabled() else ():
            if isinstance(output, Tensor) and output.grad_fn is not None:
                output.grad_fn.register_prehook(self._begin_backward)

    def _begin_backward(self, _: Any) -> None:
        if self._backward is None and at_end_of_backward(self._end_backward):
            self._backward = self._trace.now()

    def _end_backward(self) -> None:
        if self._backward is not None:
            self._trace.span(TRACK, "backward", self._backward, self._trace.now())
        self._backward = None


class _Hook:
    """A hook of a module; copying the model copies it without what it tells."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell = tell

    def __call__(self, *seen: Any) -> None:
        self._tell(*seen)

    def __reduce__(self) -> Any:
        return _Hook, (_ignore,)


def _ignore(*_: Any) -> None:
    pass


_log = logging.getLogger("commlib")


class TraceSource(Protocol):
    """Source that records something itself."""

    trace: Trace


class Tracer:
    """Recordings of what one rank does: the trace in force, and the sources that write into it.

    Args:
        module: the model whose passes are recorded; None: whoever has this records them.
        rank: of this process, for the name of its file.
        *sources: what records something itself, by its attribute ``trace``.

    Attributes:
        trace: :data:`~commlib.telemetry.trace.NONE` while nothing is recorded.
    """

    def __init__(self, module: nn.Module | None, rank: int, *sources: TraceSource) -> None:
        self.trace = NONE
        self._module = weakref.ref(module) if module is not None else _nothing
        self._rank, self.sources = rank, sources
        self._recording: Recording | None = None

    def start(self, path: str | os.PathLike[str]) -> Recording:
        """Begin to record; for the user's ``trace(path)``.

        Raises:
            TraceFailed: the file cannot be written. Nothing is recorded then.
            ValueError: another recording runs.
        """
        if self._recording is not None and self._recording.running:
            raise ValueError(f"{self._recording.path} is being recorded: stop() that before another one begins")
        trace = Trace(self._rank)
        self._recording = Recording(self, own_path(path, self._rank), trace, self._module())
        self.record(trace)
        return self._recording

    def follow(self, *sources: TraceSource | None) -> None:
        """Record these from now on, and no others; None stands for what there is not."""
        self.sources = tuple(source for source in sources if source is not None)
        self.record(self.trace)

    def record(self, trace: Trace) -> None:
        """Hand this trace to all sources."""
        self.trace = trace
        for source in self.sources:
            source.trace = trace

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Record that the thread that trains waits for what is exchanged."""
        return within(self.trace.measure(TRACK, "wait"), "wait", "for what is exchanged")

    def end(self) -> None:
        """End a recording; a file that cannot be written is only logged, for there is more to end than this."""
        if self._recording is not None:
            self._recording.end(quiet=True)


class Recording:
    """A trace that is being recorded: until its block ends, or :meth:`stop`.

    Attributes:
        path: of this rank's file.
    """

    def __init__(self, tracer: Tracer, path: Path, trace: Trace, module: nn.Module | None) -> None:
        trace.save(path)
        trace.instant(TRACK, "recording")  # the first row, and zero
        self.path = path
        self._tracer, self._trace, self._process = weakref.ref(tracer), trace, os.getpid()
        self._passes = PassRecorder(module, trace) if module is not None else None
        self._ended = weakref.finalize(tracer, self._end)

    @property
    def running(self) -> bool:
        """Whether it has not stopped."""
        return self._ended.alive

    def stop(self) -> None:
        """Ends it, and saves; again: nothing.

        Raises:
            TraceFailed: the file cannot be written any more; why. The empty one is there still.
        """
        self._ended()

    def end(self, *, quiet: bool) -> None:
        """:meth:`stop`; ``quiet``: what goes wrong is only logged, for there is something else to say."""
        try:
            self.stop()
        except TraceFailed as e:
            if not quiet:
                raise
            _log.error("%s", e)

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.end(quiet=error is not None)

    def _end(self) -> None:
        tracer = self._tracer()
        if tracer is not None:
            tracer.record(NONE)
        if self._passes is not None:
            self._passes.remove()
        if os.getpid() == self._process:  # not one that was forked meanwhile
            self._trace.save(self.path)


def _nothing() -> None:
    return None


def own_path(path: str | os.PathLike[str], rank: int) -> Path:
    """A rank's file; wherever the process goes meanwhile."""
    named = Path(os.fspath(path).replace("{rank}", str(rank))).absolute()
    shared = rank and "{rank}" not in os.fspath(path)
    return named.with_name(f"{named.stem}.rank{rank}{named.suffix}") if shared else named
