"""Codecs, each used once when this is imported, so that processes forked afterwards need not load or compile its loops.

It is the last that is imported before they are forked: what there is by then, their garbage collector leaves alone.

Numba and the loops of a codec cost a process about a second of a core. Which kernels run, and which codecs are
installed, is asked anew in each process. It is done on one thread: OpenMP's other threads would not be there after a
fork, and whoever computes with several would wait for them for ever.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
from typing import TextIO

import torch

import commlib
from commlib.codecs import registry


def _warm() -> None:
    """Of either half of the codecs the first process compiles the loops, in 25 seconds of a core; the others load them.

    So two workers of pytest are at it, one half each, and then have both.
    """
    names = sorted(registry.compressors())
    todo = {__file__: names[: len(names) // 2], registry.__file__: names[len(names) // 2 :]}  # whose lock is a half's
    while todo:
        with contextlib.ExitStack() as closed:
            files = {name: closed.enter_context(open(name)) for name in todo}
            mine = next((name for name, file in files.items() if _locked(file, wait=False)), None)
            if mine is None:
                mine = next(iter(files))
                _locked(files[mine], wait=True)
            registry.warm([commlib.make(name) for name in todo.pop(mine)], torch.device("cpu"))


def _locked(file: TextIO, *, wait: bool) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


_threads = torch.get_num_threads()
torch.set_num_threads(1)
_warm()
registry.compressors.cache_clear()
torch.set_num_threads(_threads)
gc.collect()
gc.freeze()  # to look through it, a forked process would copy all of its pages
gc.set_threshold(10_000)  # nor is what little is left looked at so often: it took a tenth of a rank's time
