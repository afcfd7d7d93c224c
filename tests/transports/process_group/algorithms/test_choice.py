"""Small messages save hops, large ones bytes, and the larger one is the less it goes straight."""

from __future__ import annotations

import pytest

from commlib.messaging.link_model import AlphaBeta
from commlib.transports.process_group.algorithms import choice

SLOW, FAST = AlphaBeta(2e-4, 8e-9), AlphaBeta(2e-4, 4e-10)  # 1 and 20 Gbit/s


@pytest.mark.parametrize("line", [SLOW, FAST])
@pytest.mark.parametrize("size", [3, 4, 16])
def test_an_all_reduce_goes_straight_then_in_two_shots_then_around(line: AlphaBeta, size: int) -> None:
    ways = [choice.all_reduce(line, size, 1 << k) for k in range(31)]
    assert list(dict.fromkeys(ways)) == ["straight", "two_shot", "ring"]


def test_two_ranks_never_need_a_ring() -> None:
    assert {choice.all_reduce(SLOW, 2, 1 << k) for k in range(31)} == {"straight"}
    assert not any(choice.broadcast_around(SLOW, 2, 1 << k) or choice.gather_around(SLOW, 2, 1 << k) for k in range(31))


def test_the_slower_the_line_the_sooner_bytes_are_saved() -> None:
    def last_straight(line: AlphaBeta) -> int:
        return max(k for k in range(31) if choice.all_reduce(line, 4, 1 << k) == "straight")

    assert last_straight(SLOW) < last_straight(FAST)


def test_a_broadcast_goes_along_the_ring_once_that_saves_bytes() -> None:
    ways = [choice.broadcast_around(SLOW, 4, 1 << k) for k in range(31)]
    assert ways == sorted(ways)
    assert ways[-1]
    assert not ways[0]


def test_pieces_are_what_the_line_carries_in_a_while_within_limits() -> None:
    assert choice.piece(AlphaBeta(1e-3, 1e-6)) == 1 << 20
    assert choice.piece(AlphaBeta(1e-3, 1e-12)) == choice.piece(AlphaBeta(0.0, 0.0)) == 4 << 20
    assert 1 << 20 < choice.piece(AlphaBeta(1e-3, 1.2e-8)) < 4 << 20
