"""Codecs, each used once when this is imported, so that processes forked afterwards need not load or compile its loops.

It is the last that is imported before they are forked: what there is by then, their garbage collector leaves alone.

Numba and the loops of a codec cost a process about a second of a core. Which kernels run, and which codecs are
installed, is asked anew in each process. It is done on one thread: OpenMP's other threads would not be there after a
fork, and whoever computes with several would wait for them for ever.
"""

from __future__ import annotations

import fcntl
import gc

import torch

import commlib
from commlib.codecs import registry

_threads = torch.get_num_threads()
torch.set_num_threads(1)
with open(__file__) as file:
    fcntl.flock(file, fcntl.LOCK_EX)  # the first one compiles, which takes 40 seconds of a core, and the others load
    registry.warm([commlib.make(name) for name in registry.compressors()], torch.device("cpu"))
registry.compressors.cache_clear()
torch.set_num_threads(_threads)
gc.collect()
gc.freeze()  # to look through it, a forked process would copy all of its pages
gc.set_threshold(10_000)  # nor is what little is left looked at so often: it took a tenth of a rank's time
