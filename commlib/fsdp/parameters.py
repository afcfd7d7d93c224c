"""Parameters from their owners to all, in fewer bytes. Nothing is lost for good: owners keep theirs as they are.

What ZeRO++ does with weights (Wang et al., 2023, arXiv 2306.10209, §3.1). The owner, too, takes what the others
decode: so all ranks compute with the same values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commlib.codecs.base import Compressor, LayerSpec, Memory
from commlib.exchange.buffers import Packing, StepBuffers, rows
from commlib.exchange.collectives import AllGather, Rounds
from commlib.groups.world import World
from commlib.runtime.scratch import scratch
from commlib.telemetry.stats import Meter

_NOTHING = Memory({}, {})


def rounds(
    specs: Sequence[LayerSpec],
    codecs: Sequence[Compressor | None],
    part: Tensor,
    out: Tensor,
    world: World,
    meters: Sequence[Meter],
    arena: StepBuffers,
) -> Rounds:
    """Fills ``out`` with all ranks' chunks.

    Args:
        specs: of every parameter, this rank's padded chunk: the same shapes on every rank.
        codecs: of each; None: as it is.
        part: this rank's chunks one by one, (n,), of the specs' dtype; may be a part of ``out``.
        out: (P·n,).
        world: this rank.
        meters: of each parameter.
        arena: for what travels.
    """
    device, sizes = part.device, [spec.numel for spec in specs]
    packing = Packing([s.nbytes if codec is None else codec.nbytes(s) for s, codec in zip(specs, codecs, strict=True)])
    got, payload = arena.gathered(packing.total, world, device)
    chunks = zip(specs, codecs, meters, torch.split(part, sizes), packing.slices(payload), strict=True)
    for spec, codec, meter, x, place in chunks:
        meter.would_send(spec.nbytes * world.size / 2, world.size)  # an all-gather is half an all-reduce
        with meter.phase("compress"):
            if codec is None:
                place.view(x.dtype).copy_(x)
            else:
                codec.compress(_float32(x, copy=True).view(spec.shape), place, memory=_NOTHING, seed=0)
    yield [AllGather(got, payload, list(zip(meters, packing.lengths, strict=True)))]

    for row, came in zip(out.view(world.size, -1), rows(got, world.size), strict=True):
        chunks = zip(specs, codecs, meters, torch.split(row, sizes), packing.slices(came), strict=True)
        for spec, codec, meter, x, place in chunks:
            with meter.phase("decompress"):
                if codec is None:
                    x.copy_(place.view(x.dtype))
                    continue
                values = _float32(x, copy=False)
                codec.decompress(place, values.view(spec.shape))
                if values is not x:
                    x.copy_(values)


def _float32(x: Tensor, *, copy: bool) -> Tensor:
    """Itself, or room of its shape in the dtype that codecs work on, with its values if that is asked for."""
    if x.dtype == torch.float32:
        return x
    room = scratch("values", x.shape, torch.float32, x.device)
    return room.copy_(x) if copy else room
