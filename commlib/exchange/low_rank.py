"""``low_rank``: two all-reduces of thin matrices (PowerSGD, Vogels et al. 2019, Algorithms 1 and 2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commlib.codecs import residuals
from commlib.codecs.base import Compressor, LayerSpec
from commlib.codecs.cooperative import LowRank, thin_product
from commlib.codecs.error_feedback import ErrorFeedback
from commlib.exchange.base import Exchange
from commlib.exchange.buffers import StepBuffers
from commlib.exchange.collectives import AllReduce, Rounds
from commlib.exchange.layer_task import LayerTask, payers
from commlib.groups.world import World


class LowRankExchange(Exchange):
    """All-reduce of a low-rank codec's two factors, one after the other."""

    name = "low_rank"
    ROUNDS = 2

    def refuse(self, codec: Compressor, spec: LayerSpec) -> str | None:
        """Only codecs made of two thin matrices."""
        if _low_rank(codec) is None:
            return "its payload is no pair of thin matrices (powersgd's is)"
        return None

    def wire_bytes(self, codec: Compressor, spec: LayerSpec, world: int) -> float:
        """Bytes a rank sends a step."""
        return 2 * (world - 1) / world * codec.nbytes(spec)

    def rounds(self, items: Sequence[LayerTask], world: World, buffer: Tensor | None) -> Rounds:
        """P = M·basis, averaged; orthogonalised; Q = Mᵀ·P, averaged; the mean gradient is P·Qᵀ.

        The residual is M − P·(local Q)ᵀ, what the projection leaves of *this* rank's M. (PyTorch's hook keeps
        M − P·(mean Q)ᵀ: the sums over ranks agree, but there each residual also walks at random with the
        difference between the rank's gradients and the mean.)

        What rides along (:mod:`commlib.exchange.fusion`) goes with P as it is.
        """
        raw = [item for item in items if item.codec.lossless]
        items = [item for item in items if not item.codec.lossless]
        codecs = [_require(item.codec) for item in items]
        device = items[0].grad.device
        matrices: list[Tensor] = []
        sizes = [(*i.spec.matrix, c.rank_of(i.spec)) for i, c in zip(items, codecs, strict=True)]
        lefts = _Factors([*((m, r) for m, _, r in sizes), *((i.spec.numel, 1) for i in raw)], items[0].arena, device)
        rights = _Factors([(n, r) for _, n, r in sizes], items[0].arena, device)
        ps, along = lefts.views[: len(items)], lefts.views[len(items) :]
        for item, view in zip(raw, along, strict=True):
            view.copy_(item.grad.view(-1, 1))
        for item, p in zip(items, ps, strict=True):
            with item.meter.phase("compress"):
                m = _with_residual(item).view(item.spec.matrix)
                matrices.append(m)
                thin_product(m, item.memory.old["basis"], p)
        lefts.flat.div_(world.size)
        yield [AllReduce(lefts.flat, payers([*items, *raw], [p.nbytes for p in lefts.views]))]

        for item, view in zip(raw, along, strict=True):
            item.grad.view(-1, 1).copy_(view)
        for item, codec, m, p, q in zip(items, codecs, matrices, ps, rights.views, strict=True):
            with item.meter.phase("compress"):
                codec.orthogonalise(p)
                thin_product(m.T, p, q)
                if (kept := item.memory.new.get("residual")) is not None:
                    m.addmm_(p, q.T, alpha=-1.0)
                    if kept.dtype != torch.float32:  # otherwise m *is* the new residual
                        residuals.shorten(m, kept, item.memory.up)
        rights.flat.div_(world.size)
        yield [AllReduce(rights.flat, payers(items, [q.nbytes for q in rights.views]))]

        for item, codec, p, q in zip(items, codecs, ps, rights.views, strict=True):
            with item.meter.phase("decompress"):
                codec.next_basis(q, item.memory.new["basis"])
                out = item.work_out()
                torch.matmul(p, q.T, out=out.view(item.spec.matrix))
                item.finish(out)


class _Factors:
    """Float32 matrices side by side in one buffer, so that one collective carries them."""

    def __init__(self, shapes: Sequence[tuple[int, int]], arena: StepBuffers, device: torch.device) -> None:
        sizes = [a * b for a, b in shapes]
        self.flat = arena.empty((sum(sizes),), torch.float32, device)
        self.views = [v.view(s) for v, s in zip(torch.split(self.flat, sizes), shapes, strict=True)]


def _with_residual(item: LayerTask) -> Tensor:
    held = item.memory.old.get("residual")
    decay = item.codec.decay if isinstance(item.codec, ErrorFeedback) else 1.0
    if held is not None and held.dtype == torch.float32:
        return torch.add(item.work_grad(), held, alpha=decay, out=item.memory.new["residual"])
    grad = item.grad.view(item.spec.shape)
    if held is None:
        return grad if grad.dtype == torch.float32 else grad.float()  # it must last for two rounds
    v = grad if item.overwrite and grad.dtype == torch.float32 else grad.to(torch.float32, copy=True)
    residuals.add(held, v, decay)
    return v


def _low_rank(codec: Compressor) -> LowRank | None:
    inner = codec.inner if isinstance(codec, ErrorFeedback) else codec
    return inner if isinstance(inner, LowRank) else None


def _require(codec: Compressor) -> LowRank:
    found = _low_rank(codec)
    if found is None:
        raise ValueError(f"{codec}: {LowRankExchange().refuse(codec, LayerSpec('layer', (8, 8)))}")
    return found
