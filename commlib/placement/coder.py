"""How activations travel: as they are, or by a codec. Pure.

A codec's error stays in the step in which it was made: there is no error feedback. What is left over of one step's rows
belongs to other examples than the next step's, so adding it there would correct nothing (docs/adr/0024-placement.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from commlib.codecs.base import Compressor
from commlib.codecs.registry import make_plain
from commlib.runtime.layer import LayerSpec
from commlib.runtime.plugins import split

_ALIGN = 8  # bytes at multiples of which payloads begin


class Coder:
    """Rows of a matrix as bytes, and back.

    Args:
        spec: of a codec (``int8``, ``fp16``, ``qsgd:levels=127``); ``none``: as they are.

    Raises:
        ValueError: there is no such codec; it remembers something from step to step, or needs all ranks' same seed.
    """

    def __init__(self, spec: str = "none") -> None:
        name, options = split("compressor", spec)
        if "ef" in options:
            raise ValueError(
                f"codec={spec!r}: rows of the next step are of other examples, and there is nothing to feed back: "
                "leave ef out"
            )
        self._codec: Compressor | None = None if name == "none" else make_plain(spec)
        if self._codec is not None:
            _check(self._codec, spec)

    def __str__(self) -> str:
        return str(self._codec or "none").replace(",ef=off", "").replace(":ef=off", "")

    @property
    def exact(self) -> bool:
        """Whether rows travel as they are."""
        return self._codec is None

    def nbytes(self, rows: int, width: int, dtype: torch.dtype) -> int:
        """Of so many rows, with what fills them up to a multiple of 8."""
        if self._codec is None or not rows * width:
            return rows * width * dtype.itemsize
        return -(-self._codec.nbytes(LayerSpec("rows", (rows, width))) // _ALIGN) * _ALIGN

    def encode(self, x: Tensor) -> Tensor:
        """uint8 (nbytes,) of a (rows, width) matrix; if it is exact, maybe the matrix itself.

        A codec that draws does so from torch's generator, as dropout does: what activation checkpointing computes once
        more is the same, and so is what a resumed run does.
        """
        x = x.contiguous()
        if self._codec is None or not x.numel():
            return x.view(-1).view(torch.uint8)
        payload = torch.zeros(self.nbytes(len(x), x.shape[1], x.dtype), dtype=torch.uint8, device=x.device)
        seed = int(torch.randint(1 << 62, ())) if self._codec.random else 0
        self._codec.compress(x.float(), self._own(payload, x), seed=seed)
        return payload

    def decode(self, payload: Tensor, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """The (rows, width) matrix; if it is exact, maybe in the payload's memory."""
        if self._codec is None or not rows * width:
            return payload.view(dtype).view(rows, width)
        out = torch.empty(rows, width, device=payload.device)
        self._codec.decompress(self._own(payload, out), out)
        return out.to(dtype)

    def _own(self, payload: Tensor, like: Tensor) -> Tensor:
        assert self._codec is not None
        return payload[: self._codec.nbytes(LayerSpec("rows", tuple(like.shape)))]


def _check(codec: Compressor, spec: str) -> None:
    slots = codec.slots(LayerSpec("rows", (8, 8)))
    if slots:
        raise ValueError(
            f"codec={spec!r} remembers {', '.join(slots)} from step to step: rows have nothing to remember"
        )
    if codec.shared_seed:
        raise ValueError(f"codec={spec!r} needs the same seed on all ranks: activations of each are its own")
