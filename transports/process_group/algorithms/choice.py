"""Which way a collective goes, and in pieces of what size: by the line's α and β, so the same on all ranks. Pure.

Seconds for n bytes between P ranks, if α is a message's latency and β its time for a byte:

============  =====================  ==============================  ==============================
collective    straight               in two shots                    around
============  =====================  ==============================  ==============================
all-reduce    α + (P − 1)·n·β        2·α + 2(P − 1)/P·n·β            2(P − 1)·α + 2(P − 1)/P·n·β
broadcast     α + (P − 1)·n·β                                        (P − 1)·α + n·β
============  =====================  ==============================  ==============================

A reduction to one rank is a broadcast backwards. All-gather and reduce-scatter send the same bytes either way.
Straight, P − 1 senders share a receiver's line, unevenly: so they go around where latency is lost in the bytes' time.
"""

from __future__ import annotations

from typing import Literal

from commlib.messaging.link_model import AlphaBeta

_PIECE_S = 16e-3
_SMALLEST, _LARGEST = 1 << 20, 4 << 20
_LOST = 10.0  # times as long the bytes take as a message does


def piece(line: AlphaBeta) -> int:
    """Bytes of a message: what the line carries in a few milliseconds, so that a ring is full soon."""
    if line.beta * _LARGEST <= _PIECE_S:
        return _LARGEST
    return max(_SMALLEST, int(_PIECE_S / line.beta))


def all_reduce(line: AlphaBeta, size: int, nbytes: int) -> Literal["straight", "two_shot", "ring"]:
    """How an all-reduce of so many bytes goes."""
    if size > 2 and _is_long(line, nbytes // size):
        return "ring"
    straight = line.alpha + (size - 1) * nbytes * line.beta
    return "two_shot" if 2 * line.alpha + 2 * (size - 1) / size * nbytes * line.beta < straight else "straight"


def broadcast_around(line: AlphaBeta, size: int, nbytes: int) -> bool:
    """Whether a broadcast, or a reduction to one rank, goes along the ring."""
    straight = line.alpha + (size - 1) * nbytes * line.beta
    return size > 2 and (size - 1) * line.alpha + nbytes * line.beta < straight


def gather_around(line: AlphaBeta, size: int, nbytes: int) -> bool:
    """Whether an all-gather or a reduce-scatter goes around the ring, of so many bytes a rank."""
    return size > 2 and _is_long(line, nbytes)


def _is_long(line: AlphaBeta, nbytes: int) -> bool:
    return nbytes * line.beta > _LOST * line.alpha
