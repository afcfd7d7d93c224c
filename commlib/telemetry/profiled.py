"""Ranges for ``torch.profiler``, by the names of layers; nothing while nobody profiles.

The profiler sees what happens in the thread that began it and in autograd's, which is where DDP's hook runs. Lanes
(:mod:`commlib.exchange.sequencer`) are threads that were there before: it sees them only when it is asked for all
threads (docs/watching.md). So the flag of its module is asked for here, which is the same in every thread, and not
``torch._C._autograd._profiler_enabled()``, which is this thread's, and False throughout with ``profile_all_threads``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.autograd.profiler as profiler

_NOTHING: contextlib.AbstractContextManager[object] = contextlib.nullcontext()


def ranged(what: str, about: str) -> contextlib.AbstractContextManager[object]:
    """``commlib::compress fc1.weight``, from entering to leaving, in one thread.

    Args:
        what: is done.
        about: the layer or bucket it is done to. Of which step is left out, so that steps add up.
    """
    if not profiler._is_profiler_enabled:
        return _NOTHING
    return profiler.record_function(f"commlib::{what} {about.partition(' of step ')[0]}")


def within(
    inner: contextlib.AbstractContextManager[None], what: str, about: str
) -> contextlib.AbstractContextManager[None]:
    """``inner``, and around it such a range, if somebody profiles."""
    return _around(inner, ranged(what, about)) if profiler._is_profiler_enabled else inner


@contextlib.contextmanager
def _around(
    inner: contextlib.AbstractContextManager[None], outer: contextlib.AbstractContextManager[object]
) -> Iterator[None]:
    with outer, inner:
        yield
