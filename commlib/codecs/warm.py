"""Compiling codecs' loops before training needs them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from commlib.codecs.base import Compressor, LayerSpec, Memory

_SHAPE = (8, 16)


def warm(codecs: Iterable[Compressor], device: torch.device) -> None:
    """Run every codec once in each way that exchanges do, so that no step waits until its loops are compiled.

    What has been compiled is kept on disk: that takes seconds once on a machine, and some tens of milliseconds later.
    """
    for codec in {str(codec): codec for codec in codecs if not codec.lossless}.values():
        spec = LayerSpec("warm", _SHAPE, device=device)
        need, memory = codec.nbytes(spec), Memory.zeros(codec, spec)
        x = torch.zeros(_SHAPE, device=device)
        rows = torch.zeros(2, -(-need // 8) * 8 + 8, dtype=torch.uint8, device=device)[:, :need]
        payload = torch.zeros(need, dtype=torch.uint8, device=device)
        codec.compress(x, payload, memory=memory, seed=0)
        for row in rows:
            row.copy_(payload)
        codec.decompress(payload, x, seed=0)
        codec.decompress_sum(rows, x, seeds=[0, 0])
