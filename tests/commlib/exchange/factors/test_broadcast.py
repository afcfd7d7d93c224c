"""``factors`` and ``owners``, all ranks in this process: exact, the same bits everywhere, and the bytes they say."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from commlib.codecs.base import Seeds
from commlib.codecs.memory_store import MemoryStore
from commlib.codecs.registry import make
from commlib.exchange.collectives import Rounds
from commlib.exchange.factors.payload import RowCapacity
from commlib.exchange.factors.rounds import Again, FactorRounds, First, RowHistory
from commlib.exchange.factors.tap import Rows
from commlib.exchange.layer_task import LayerTask
from commlib.exchange.registry import BY_ROWS, EXCHANGES
from commlib.groups.world import World
from commlib.planning.simulate import run
from commlib.runtime.layers import LayerSpec
from commlib.telemetry.stats import Meter
from tests.support.tiny_ddp import Meeting

NONE, CPU = make("none"), torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Step:
    """A layer and what each rank has in a step.

    Args:
        counts: rows of every rank's calls.
        room: that the first round has.
        dirty: ranks whose gradient is not of rows alone, and know it; or find out later.
        apart: whether the bias is in a bucket of its own.
    """

    n: int
    m: int
    counts: list[list[int]]
    room: int
    dirty: int | None
    late: int | None
    apart: bool

    @property
    def size(self) -> int:
        return len(self.counts)


def some_rank(size: int) -> st.SearchStrategy[int | None]:
    return st.one_of(st.none(), st.none(), st.none(), st.integers(0, size - 1))


STEPS = st.integers(1, 5).flatmap(
    lambda size: st.builds(
        Step,
        n=st.integers(1, 40),
        m=st.integers(1, 40),
        counts=st.lists(st.lists(st.integers(0, 5), max_size=2), min_size=size, max_size=size),
        room=st.integers(0, 10),
        dirty=some_rank(size),
        late=some_rank(size),
        apart=st.booleans(),
    )
)


@dataclasses.dataclass
class Outcome:
    grads: list[tuple[Tensor, Tensor]]
    rounds: list[int]
    sent: list[float]


def in_memory(rounds: Rounds, meeting: Meeting, world: World, sent: list[float], count: list[int]) -> Rounds:
    """What is left for :mod:`commlib.planning.simulate`: rows leave, and leave again, by the meeting."""
    for batch in rounds:
        count[world.rank] += 1
        for call in batch:
            if isinstance(call, Again):
                call.issue(meeting)
            sent[world.rank] += call.wire_bytes(world.size)
        yield [call for call in batch if not isinstance(call, First | Again)]


def exchange(name: str, step: Step, dtype: torch.dtype = torch.float32) -> tuple[Outcome, list[list[Rows]]]:
    gen, meeting, size = torch.Generator().manual_seed(step.n), Meeting(step.size), step.size
    specs = (
        LayerSpec("weight", (step.n, step.m), dtype, kind="linear.weight", layer="fc"),
        LayerSpec("bias", (step.n,), dtype, kind="bias", layer="fc"),
    )
    had = [
        [(torch.randn(k, step.m, generator=gen).to(dtype), torch.randn(k, step.n, generator=gen).to(dtype)) for k in ks]
        for ks in step.counts
    ]
    trips, items = [], []
    for rank, rows in enumerate(had):
        habit, world = RowHistory(), World(rank, size)
        habit.saw(step.room, dtype)
        trip = FactorRounds(BY_ROWS[name].sending(NONE, step.n, step.m, world), habit, CPU)
        trip.load(rows, rank == step.dirty)
        trip.start(meeting)
        trip.late = rank == step.late
        trips.append(trip)
        memory = MemoryStore().memory(specs[0], {})
        grads = [torch.zeros(spec.numel, dtype=dtype) for spec in specs]
        items.append(
            [
                LayerTask(spec, NONE, grad, memory, Seeds(0, 0, spec.name), Meter(CPU), memory, trip)
                for spec, grad in zip(specs, grads, strict=True)
            ]
        )
    sent, counts = [0.0] * size, [0] * size
    for which in ([0], [1]) if step.apart else ([0, 1],):
        ranks = []
        for rank, its in enumerate(items):
            rounds = EXCHANGES[name].rounds([its[i] for i in which], World(rank, size), None)
            ranks.append(in_memory(rounds, meeting, World(rank, size), sent, counts))
        run(ranks)
    return Outcome([(w.grad.view(step.n, step.m), b.grad) for w, b in items], counts, sent), had


@pytest.mark.parametrize("name", BY_ROWS)
@given(STEPS)
def test_every_rank_gets_the_mean_gradient_in_the_same_bits_and_in_as_many_rounds(name: str, step: Step) -> None:
    found, had = exchange(name, step)
    calls = [rows for its in had for rows in its]
    u = torch.cat([torch.zeros(0, step.m), *(u for u, _ in calls)]).double()
    v = torch.cat([torch.zeros(0, step.n), *(v for _, v in calls)]).double()
    bound = (len(u) + step.size + 1) * 2**-23 / step.size
    for weight, bias in found.grads:
        assert bool(((weight - v.t() @ u / step.size).abs() <= bound * (v.abs().t() @ u.abs())).all())
        assert bool(((bias - v.sum(0) / step.size).abs() <= bound * v.abs().sum(0)).all())
        assert torch.equal(weight, found.grads[0][0])
        assert torch.equal(bias, found.grads[0][1])
    assert len(set(found.rounds)) == 1
    assert found.rounds[0] <= EXCHANGES[name].ROUNDS * (1 + step.apart)


@pytest.mark.parametrize("name", BY_ROWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("n", "m"), [(9, 5), (5, 9)])
def test_gradients_of_other_dtypes(name: str, dtype: torch.dtype, n: int, m: int) -> None:
    step = Step(n, m, [[1], [2], [0, 1]], 2, None, None, apart=False)
    found, had = exchange(name, step, dtype)
    wanted = sum((v.double().t() @ u.double() for its in had for u, v in its), torch.zeros(n, m)) / 3
    for weight, bias in found.grads:
        assert weight.dtype == bias.dtype == dtype
        torch.testing.assert_close(weight, wanted.to(dtype))
        assert torch.equal(weight, found.grads[0][0])
        assert torch.equal(bias, found.grads[0][1])


@pytest.mark.parametrize("name", BY_ROWS)
@given(
    n=st.integers(1, 300), m=st.integers(1, 300), size=st.integers(1, 5), rows=st.integers(0, 4), whole=st.booleans()
)
def test_the_plan_s_bytes_are_those_that_the_busiest_rank_sends(
    name: str, n: int, m: int, size: int, rows: int, whole: bool
) -> None:
    step = Step(n * size if whole else n, m * size if whole else m, [[rows]] * size, rows, None, None, apart=False)
    spec = LayerSpec("weight", (step.n, step.m), kind="linear.weight", layer="fc", rows=rows)
    bias = LayerSpec("bias", (step.n,), kind="bias", layer="fc")
    carry = EXCHANGES[name].wire_bytes
    predicted = carry(NONE, spec, size) + carry(NONE, bias, size)
    sending = BY_ROWS[name].sending(NONE, step.n, step.m, World(size - 1, size))
    ring = 2 * (size - 1) / size * step.n * step.m * 4
    if sending.busiest(RowCapacity(rows)) + 16 * (size - 1) >= ring:
        return  # the matrices are summed
    found, _ = exchange(name, step)
    words = 16 * (size - 1)
    padding = 2 * 8 * (size - 1)  # weight and bias each begin at a multiple of 8
    assert -1e-6 <= max(found.sent) - words - predicted <= padding + 1e-6


def test_owners_count_as_the_formula_says_where_ranks_divide_the_layer() -> None:
    carry, p, k = EXCHANGES["owners"].wire_bytes, 4, 8
    for n, m in ((400, 60), (60, 400)):
        large, small = max(n, m), min(n, m)
        spec = LayerSpec("weight", (n, m), kind="linear.weight", layer="fc", rows=k)
        assert carry(NONE, spec, p) == 4 * (p - 1) * (k * (small + large // p) + n * m // p)
    assert math.isnan(carry(NONE, dataclasses.replace(spec, rows=None), p))


def test_owners_carry_nothing_compressed_and_no_layer_without_rows() -> None:
    refuse = EXCHANGES["owners"].refuse
    spec = LayerSpec("weight", (4, 4), kind="linear.weight", layer="fc")
    assert refuse(NONE, spec) is None
    assert "rows by a codec go over factors" in str(refuse(make("natural"), spec))
    assert "no factors" in str(refuse(NONE, LayerSpec("weight", (4, 4))))
