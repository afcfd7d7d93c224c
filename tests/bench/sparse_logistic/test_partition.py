"""Who owns what, and who talks to whom."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from commlib.bench.sparse_logistic.partition import SparsePartition

plans = st.builds(
    SparsePartition,
    features=st.integers(1, 300),
    examples=st.just(50),
    servers=st.integers(1, 7),
    workers=st.integers(1, 5),
    blocks=st.integers(1, 9),
    seed=st.integers(0, 2**32),
)


@given(plan=plans)
def test_every_feature_is_one_servers_and_in_one_block(plan: SparsePartition) -> None:
    owned = [range(*plan.owned(s)) for s in range(plan.servers)]
    assert [k for r in owned for k in r] == list(range(plan.features))
    for s, r in enumerate(owned):
        assert [k for b in range(plan.blocks) for k in range(*plan.slice(s, b))] == list(r)


@given(plan=plans, number=st.integers(0, 1000))
def test_a_pass_has_every_block_once_in_an_order_of_its_own(plan: SparsePartition, number: int) -> None:
    assert sorted(plan.order(number)) == list(range(plan.blocks))
    assert plan.order(number) == plan.order(number)


@given(plan=plans)
def test_whom_a_rank_talks_to_talks_to_it_and_every_line_draws_by_itself(plan: SparsePartition) -> None:
    lines = [(a, b) for a in range(plan.ranks) for b in plan.peers(a)]
    assert sorted(lines) == sorted((b, a) for a, b in lines)
    assert all(a != b for a, b in lines)
    for worker in plan.worker_ranks:
        assert set(plan.peers(worker)) == set(range(plan.servers))
    assert set(plan.peers(0)) == set(range(1, plan.ranks))
    assert len({plan.draws(a, b) for a, b in lines}) == len(lines)


def test_orders_differ_from_pass_to_pass_and_steps_are_shorter_with_delay_but_not_beyond_the_blocks() -> None:
    plan = SparsePartition(features=100, examples=10, blocks=16)
    assert len({tuple(plan.order(n)) for n in range(20)}) == 20
    steps = [SparsePartition(features=100, examples=10, blocks=4, delay=delay).step for delay in (0, 1, 3, 1000)]
    assert steps == [1.0, 0.5, 0.25, 0.25]
    assert SparsePartition(features=9, examples=9, delay=3, eta=0.9).step == 0.9
