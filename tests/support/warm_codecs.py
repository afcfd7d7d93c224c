"""Codecs, each used once when this is imported, so that processes forked afterwards need not load or compile its loops.

Numba and the loops of a codec cost a process about a second of a core. Which kernels run is asked at each call
(``COMMLIB_KERNELS``), so a process forked with other ones gets those. No thread of ours starts here.
"""

from __future__ import annotations

import torch

import commlib
from commlib.codecs import registry

registry.warm([commlib.make(name) for name in registry.compressors()], torch.device("cpu"))
