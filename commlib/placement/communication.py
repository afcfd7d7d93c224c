"""How the activations of placed layers travel: collectives on a process group of their own.

Order. All of a model's placed layers share one group that carries nothing else, so what DDP and its hook have under
way, whenever that is, cannot come between. On it collectives are issued, and waited for, by the thread that runs the
forward or the backward pass: the order is that of the passes, which is the program's in the forward pass and, of one
graph, autograd's in the backward pass (latest call first), alike on all ranks. That ranks do come to the same call is
checked: a call begins with a header of a few words.

A collective that fails, or has not ended by the deadline of the process group, is a :class:`PeerLost` that names who
does not answer.

How activations travel: as they are, or by a codec. Pure.

A codec's error stays in the step in which it was made: there is no error feedback. What is left over of one step's rows
belongs to other examples than the next step's, so adding it there would correct nothing (docs/adr/0024-placement.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from commlib.codecs.base import Compressor
from commlib.codecs.registry import make_plain
from commlib.errors import PeerLost, PlanMismatch
from commlib.exchange.in_flight import reason
from commlib.groups.handshake import answer_roll_call, explained
from commlib.groups.world import World
from commlib.runtime.autograd import wait
from commlib.runtime.layers import LayerSpec
from commlib.runtime.plugins import split

_ALIGN = 8  # bytes at multiples of which payloads begin


class RowCoder:
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
        """Bytes of so many rows, with what fills them up to a multiple of 8."""
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
        out = torch.empty(rows, width, dtype=torch.float32, device=payload.device)
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


EXACT = RowCoder()
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""In which activations travel."""
HEADER = 40
"""Bytes of what ranks tell each other before a call: five int64."""


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """Call of a placed layer, known to all ranks.

    Attributes:
        layer: its name, for errors.
        counts: rows of each rank.
        trained: whether a backward pass may follow.
        input_grad: whether any rank's input needs a gradient: then all take part in its exchange.
    """

    layer: str
    counts: tuple[int, ...]
    trained: bool
    input_grad: bool


class PlacementChannel:
    """Channel over which one model's placed layers send their rows.

    Args:
        group: process group of all ranks, of its own.
        world: this rank.
        key: of the roll call after a failure, in the group's store.
        coder: how rows travel.
    """

    def __init__(self, group: Any, world: World, key: str, coder: RowCoder | None = None) -> None:
        self.world = world
        self._group, self._key, self._coder = group, key, coder or EXACT

    def meet(self, number: int, layer: str, x: Tensor, *, trained: bool) -> LayerCall:
        """All ranks come to the same call.

        Args:
            number: of the layer.
            layer: its name.
            x: (rows, M), this rank's.
            trained: whether a backward pass may follow here.

        Raises:
            PlanMismatch: they are at different layers, or have other dtypes, or only some will go backward.
            PeerLost: a rank did not come.
        """
        own = torch.tensor(
            [number, len(x), DTYPES.index(x.dtype), trained, trained and x.requires_grad], dtype=torch.int64
        )
        said = torch.empty(self.world.size * len(own), dtype=own.dtype)
        own, said = own.to(x.device), said.to(x.device)
        self._through(f"meet at layer {layer!r}", self._group._allgather_base(said, own))
        heads = [tuple(row) for row in said.view(self.world.size, -1).tolist()]
        mine = heads[self.world.rank]
        for rank, head in enumerate(heads):
            if (head[0], *head[2:4]) != (mine[0], *mine[2:4]):
                raise PlanMismatch(
                    f"rank {self.world.rank} called layer {layer!r} ({_words(mine)}) while rank {rank} called "
                    f"{_words(head)}: every rank must make the same calls of placed layers, in the same order"
                )
        return LayerCall(layer, tuple(h[1] for h in heads), trained, any(h[4] for h in heads))

    def gather(
        self, call: LayerCall, mine: Tensor, counts: Sequence[int] | None = None, *, exact: bool = False
    ) -> Tensor:
        """All ranks' rows, (Σ counts, width), in rank order; this rank's, too, as the others get them.

        Args:
            call: which.
            mine: this rank's.
            counts: of each rank, if not those of the call.
            exact: as they are, whatever the codec.
        """
        counts, width, coder = counts or call.counts, mine.shape[1], EXACT if exact else self._coder
        sizes = [coder.nbytes(n, width, mine.dtype) for n in counts]
        longest = max(sizes)
        if longest == 0:
            return mine.new_empty(0, width)
        own = coder.encode(mine)
        alike = min(sizes) == longest
        sent = own if alike else own.new_zeros(longest)
        if not alike:  # collectives have one length: shorter ones are filled up
            sent[: len(own)] = own
        out = own.new_empty(self.world.size * longest)
        self._through(f"gather rows of {call.layer!r}", self._group._allgather_base(out, sent))
        if alike and coder.exact:
            return out.view(mine.dtype).view(-1, width)
        parts = zip(torch.split(out, longest), sizes, counts, strict=True)
        return torch.cat([coder.decode(part[:size], n, width, mine.dtype) for part, size, n in parts])

    def to_rows(self, call: LayerCall, columns: Tensor, cuts: Sequence[slice]) -> Tensor:
        """(Σ counts, own outputs) of all ranks' rows → (own rows, N): all outputs of this rank's."""
        rows = call.counts[self.world.rank]
        shapes = [(rows, c.stop - c.start) for c in cuts]
        blocks = self._swap(f"outputs of {call.layer!r}", torch.split(columns, list(call.counts)), shapes)()
        return torch.cat(blocks, dim=1)

    def to_columns(self, call: LayerCall, grad: Tensor, cuts: Sequence[slice]) -> Tensor:
        """The mirror image: (own rows, N) → (Σ counts, own outputs)."""
        own = cuts[self.world.rank]
        shapes = [(n, own.stop - own.start) for n in call.counts]
        return torch.cat(self._swap(f"output gradients of {call.layer!r}", [grad[:, c] for c in cuts], shapes)())

    def sum_rows(self, call: LayerCall, partial: Tensor) -> Callable[[], Tensor]:
        """(Σ counts, M), this rank's part of all → waits for, and returns, (own rows, M), summed in rank order.

        So all of it is the same bits whatever the backend, and bfloat16 is rounded once, after the sum.
        """
        shapes = [(call.counts[self.world.rank], partial.shape[1])] * self.world.size
        arrive = self._swap(f"input gradients of {call.layer!r}", torch.split(partial, list(call.counts)), shapes)

        def summed() -> Tensor:
            first, *others = arrive()
            total = first.to(torch.promote_types(first.dtype, torch.float32), copy=True)
            for part in others:
                total += part
            return total.to(partial.dtype)

        return summed

    def scatter(self, what: str, whole: Tensor, mine: Tensor, cuts: Sequence[slice]) -> None:
        """Rank 0's rows of an (N, M) matrix to whom they belong: ``mine`` ← its ``cuts``."""
        pieces = [whole[c] if self.world.rank == 0 else whole[:0] for c in cuts]
        shapes = [(len(mine) if rank == 0 else 0, mine.shape[1]) for rank in range(self.world.size)]
        mine.copy_(self._swap(what, pieces, shapes, EXACT)()[0])

    def any(self, what: str, mine: bool, device: torch.device) -> bool:
        """Whether it is so on any rank."""
        return any(self.numbers(what, float(mine), device))

    def numbers(self, what: str, mine: float, device: torch.device) -> list[float]:
        """Gather a number of each rank, in rank order."""
        out = torch.empty(self.world.size, dtype=torch.float64, device=device)
        one = torch.tensor([mine], dtype=torch.float64, device=device)
        self._through(what, self._group._allgather_base(out, one))
        found: list[float] = out.tolist()
        return found

    def _swap(
        self, what: str, pieces: Sequence[Tensor], shapes: Sequence[tuple[int, int]], coder: RowCoder | None = None
    ) -> Callable[[], list[Tensor]]:
        """An all-to-all of a matrix to each rank, and one of these shapes from each; returns what waits for them."""
        coder, dtype = coder or self._coder, pieces[0].dtype
        coded = [coder.encode(piece) for piece in pieces]
        sizes = [coder.nbytes(*shape, dtype) for shape in shapes]
        sent = torch.cat(coded)
        out = sent.new_empty(sum(sizes))  # both are kept until it is through
        work = self._group.alltoall_base(out, sent, sizes, [len(c) for c in coded])

        def arrive() -> list[Tensor]:
            self._through(f"exchange {what}", work, sent)
            came = zip(torch.split(out, sizes), shapes, strict=True)
            return [coder.decode(part, *shape, dtype) for part, shape in came]

        return arrive

    def _through(self, what: str, work: Any, *held: Tensor) -> None:
        try:
            wait(work.get_future(), self._meanwhile)
        except PeerLost:
            raise
        except RuntimeError as error:
            why = explained(self._group, self._key, self.world, e := reason(work, error))
            raise PeerLost(f"rank {self.world.rank} of {self.world.size} could not {what}: {why}") from e

    def _meanwhile(self) -> None:
        found = answer_roll_call(self._group, self._key, self.world)
        if found:
            me = f"rank {self.world.rank} of {self.world.size}"
            raise PeerLost(f"{me} waits at a placed layer in vain: another rank has given up; {found}")

    def __deepcopy__(self, memo: object) -> PlacementChannel:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a placed layer holds a part of its weight and a process group, and cannot be pickled: save "
            "commlib.placement.state_dict.full_state_dict(model)"
        )


def _words(head: tuple[int, ...]) -> str:
    return f"layer {head[0]}, {DTYPES[head[2]]}, {'with' if head[3] else 'without'} gradients"
