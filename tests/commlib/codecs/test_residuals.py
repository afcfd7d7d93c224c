"""Residuals of a shorter format: nothing is lost to it on average, and nothing non-finite comes of it."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from commlib.checkpoint.state_dict import from_state, to_state
from commlib.codecs import residuals
from commlib.codecs.base import Compressor, LayerSpec, Memory, Slot
from commlib.codecs.error_feedback import ErrorFeedback
from commlib.codecs.memory_store import MemoryStore
from commlib.codecs.registry import make
from commlib.compressors.onebit import OneBit
from commlib.groups.world import World
from commlib.planning.planner import make_plan
from commlib.planning.simulate import exchange_once
from tests.support.tiers import full

SHORT = torch.bfloat16
SPEC = LayerSpec("layer", (6, 40))


def kept(values: Tensor, up: int) -> Tensor:
    held = torch.empty(values.shape, dtype=SHORT)
    residuals.shorten(values.clone(), held, up)
    return held.float()


def test_every_bar_comes_once_in_65536_steps() -> None:
    assert sorted(residuals.bar(step) for step in range(1 << 16)) == list(range(1 << 16))


@given(seed=st.integers(0, 2**32), begin=st.integers(0, 10**6), steps=st.integers(1, 600))
def test_errors_of_a_value_that_stays_add_up_to_a_few_units_in_its_last_place(
    seed: int, begin: int, steps: int
) -> None:
    x = torch.randn(50, generator=torch.Generator().manual_seed(seed))
    off = torch.zeros(50, dtype=torch.float64)
    for step in range(begin, begin + steps):
        off += kept(x, residuals.bar(step)).double() - x.double()
    unit = torch.exp2(torch.frexp(x)[1].double() - 8)
    assert bool((off.abs() <= (3 + math.log2(steps)) * unit).all())


@pytest.mark.parametrize("x", [2.0**-12, -(2.0**-11), 3e-5])
def test_small_gradients_add_up_beside_a_large_residual(x: float) -> None:
    """Rounded to the nearest, the residual would stay as it was: the unit in the last place of 1 is 2⁻⁷."""
    held = torch.ones(1)
    for step in range(1000):
        held = kept(held + x, residuals.bar(step))
    assert held.item() == pytest.approx(1 + 1000 * x, abs=2.0**-5)


@pytest.mark.parametrize("up", [0, 0x8000, 0xFFFF])
def test_what_is_finite_stays_so_and_what_is_not_does_not(up: int) -> None:
    finite = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 1.0, 3.3e38, 3.4e38, -3.4028234e38])
    held = kept(finite, up)
    assert held.isfinite().all()
    assert bool(((held - finite).abs() <= finite.abs() / 128 + 1e-40).all())
    bits = torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7F800001, -1, -0x400000], dtype=torch.int32)
    strange = torch.cat([torch.tensor([math.inf, -math.inf]), bits.view(torch.float32)])
    assert not kept(strange, up).isfinite().any()


def step(codec: Compressor, x: Tensor, memory: Memory, *, overwrite: bool = False) -> Tensor:
    payload = torch.zeros(codec.nbytes(LayerSpec.of(x)), dtype=torch.uint8)
    codec.compress(x, payload, memory=memory, seed=3, overwrite=overwrite)
    return payload


@dataclasses.dataclass(frozen=True)
class TwoPasses(OneBit):
    """A codec that knows of float32 only."""

    takes_short = False


CODECS = [
    ErrorFeedback(OneBit(), residual="bfloat16"),
    ErrorFeedback(TwoPasses(), residual="bfloat16"),
    *(
        make(f"{spec},residual=bfloat16")
        for spec in ("topk:ratio=0.1", "sign:ef=on", "twobit:block=16", "onebit:ef=0.5")
    ),
]


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_whether_the_gradient_may_be_overwritten_changes_nothing(codec: Compressor) -> None:
    x = torch.randn(SPEC.shape, generator=torch.Generator().manual_seed(0))
    memories = [Memory.zeros(codec, SPEC) for _ in range(2)]
    for _ in range(3):
        given = x.clone()
        one = step(codec, given, memories[0])
        assert torch.equal(given, x)
        assert torch.equal(step(codec, x.clone(), memories[1], overwrite=True), one)
        assert torch.equal(memories[0].new["residual"], memories[1].new["residual"])


def test_in_one_pass_or_in_several_the_bits_are_the_same() -> None:
    x = torch.randn(SPEC.shape, generator=torch.Generator().manual_seed(0))
    codecs = CODECS[:2]
    memories = [Memory.zeros(codec, SPEC) for codec in codecs]
    for _ in range(5):
        payloads = [step(codec, x, memory) for codec, memory in zip(codecs, memories, strict=True)]
        assert torch.equal(*payloads)
        assert torch.equal(*(memory.new["residual"] for memory in memories))


def test_it_is_written_as_an_option_of_the_codec() -> None:
    codec = make("onebit:residual=bfloat16")
    assert codec == ErrorFeedback(OneBit(), residual="bfloat16")
    assert make(str(codec)) == codec
    assert str(make("qsgd:ef=on,residual=bfloat16")) == "qsgd:ef=on,residual=bfloat16"
    assert make("onebit:residual=float32") == make("onebit")
    assert codec.slots(SPEC)["residual"].dtype == SHORT


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("onebit:residual=half", "float32 or bfloat16, got residual=half"),
        ("none:residual=bfloat16", "is for error feedback"),
        ("qsgd:residual=bfloat16", "is for error feedback.*ef=on"),
        ("onebit:ef=off,residual=bfloat16", "is for error feedback"),
        ("dgc:residual=bfloat16", "is for error feedback"),
    ],
)
def test_a_format_that_there_is_not_or_that_nothing_has_is_refused(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(spec)


ROUTES = ["onebit@gather", "onebit@scatter_gather", "int8@scatter_gather", "topk:ratio=0.1@gather", "bf16@gather"]
ROUTES += ["powersgd:rank=1@low_rank", "topk:ratio=0.1,values=int8@gather", "twobit@gather", *full("sign@gather")]


def owed(stores: list[MemoryStore]) -> Tensor:
    """What is still owed to the mean gradient: (1/P)·Σ residuals, and the owners' stripes."""
    total = torch.zeros(SPEC.shape, dtype=torch.float64)
    for store in stores:
        for key, slot in store.export().get("layer", {}).items():
            value, start = slot["value"], slot["start"]
            assert isinstance(value, Tensor)
            assert isinstance(start, int)
            if slot["role"] == "pending":
                total[start : start + len(value)] += value.double() / (1 if key.startswith("owner.") else len(stores))
    return total


@pytest.mark.parametrize("route", ROUTES)
def test_over_many_steps_no_more_is_lost_than_one_rounding(route: str) -> None:
    codec, _, exchange = route.partition("@")
    rule = f"{codec}{',' if ':' in codec else ':'}residual=bfloat16@{exchange}"
    stores = [MemoryStore() for _ in range(3)]
    produced = sent = torch.zeros(SPEC.shape, dtype=torch.float64)
    largest = 0.0
    for number in range(60):
        draw = torch.Generator().manual_seed(number)
        grads = [torch.randn(SPEC.shape, generator=draw) for _ in stores]
        produced = produced + sum(g.double() for g in grads) / len(grads)
        results = exchange_once(rule, grads, stores=stores, step=number)
        assert all(torch.equal(results[0], r) for r in results)
        sent = sent + results[0].double()
        largest = max(largest, float(owed(stores).abs().max()))
    off = (sent + owed(stores) - produced).abs().max().item()
    assert off <= 8 * 2.0**-8 * max(1.0, largest)
    assert all(v.dtype == SHORT for s in stores for _, key, v in s.held() if "residual" in key)


LONG, BRIEF = {"residual": Slot((4, 3))}, {"residual": Slot((4, 3), dtype=SHORT)}
ROWS = LayerSpec("layer", (4, 3))


def test_another_format_takes_over_what_is_held_back() -> None:
    store = MemoryStore()
    values = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    store.memory(ROWS, LONG).new["residual"].copy_(values)
    store.commit()
    old = store.memory(ROWS, BRIEF).old["residual"]
    assert old.dtype == SHORT
    assert torch.equal(old, values.to(SHORT))
    store.discard()
    assert torch.equal(store.memory(ROWS, LONG).old["residual"], values.to(SHORT).float())


def test_a_run_of_layers_takes_another_format_over_too() -> None:
    store, specs = MemoryStore(), [LayerSpec(name, (2, 3)) for name in "ab"]
    store.run(("a", "b"), specs, {"residual": Slot(())}).new["residual"].copy_(torch.arange(12.0))
    store.commit()
    again = store.run(("a", "b"), specs, {"residual": Slot((), dtype=SHORT)})
    assert again.old["residual"].dtype == SHORT
    assert again.old["residual"].tolist() == list(range(12))


def test_a_checkpoint_has_float32_of_it_and_gives_the_same_bits_back() -> None:
    store, other = MemoryStore(), MemoryStore()
    store.memory(ROWS, BRIEF).new["residual"].copy_(torch.randn(4, 3, generator=torch.Generator().manual_seed(1)))
    store.commit()
    value = store.export()["layer"]["residual"]["value"]
    assert isinstance(value, Tensor)
    assert value.dtype == torch.float32
    other.restore("layer", "residual", BRIEF["residual"], value)
    assert torch.equal(other.memory(ROWS, BRIEF).old["residual"], store.memory(ROWS, BRIEF).old["residual"])


def test_a_checkpoint_of_another_format_is_converted_and_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    def loaded(before: str, after: str) -> str:
        store, other, caplog_from = MemoryStore(), MemoryStore(), len(caplog.records)
        plans = [make_plan([ROWS], rule, world=2, min_size=0) for rule in (before, after)]
        for _ in range(2):
            slots = plans[0].layers["layer"].route.codec.slots(ROWS)
            store.memory(ROWS, slots).new["residual"].copy_(torch.randn(4, 3))
            store.commit()
        state = to_state(plans[0], store, World(0, 2), 2)
        assert from_state(state, plans[1], other, World(0, 2), drop_residuals=False) == 2
        kept = other.memory(ROWS, plans[1].layers["layer"].route.codec.slots(ROWS)).old["residual"]
        given = state["ranks"]["0"]["layer"]["residual"]["value"]
        assert torch.equal(kept.float(), given.to(kept.dtype).float())
        return "; ".join(record.getMessage() for record in caplog.records[caplog_from:])

    with caplog.at_level("INFO", "commlib"):
        assert loaded("sign", "sign:residual=bfloat16") == (
            "1 residuals of the checkpoint are rounded to bfloat16, in which they are kept here"
        )
        assert loaded("sign:residual=bfloat16", "sign") == ""
        assert loaded("sign:residual=bfloat16", "sign:residual=bfloat16") == ""


def test_a_step_that_is_forgotten_leaves_no_trace() -> None:
    codec, store = make("onebit:residual=bfloat16"), MemoryStore()
    x = torch.randn(SPEC.shape, generator=torch.Generator().manual_seed(0))
    for number in range(4):
        before = [value.clone() for *_, value in store.held()]
        payloads = []
        for _ in range(2):
            store.step = number
            payloads.append(step(codec, x, store.memory(SPEC, codec.slots(SPEC))))
            store.discard()
            assert all(torch.equal(a, b) for a, (*_, b) in zip(before, store.held(), strict=True))
        assert torch.equal(*payloads)
        step(codec, x, store.memory(SPEC, codec.slots(SPEC)))
        store.commit()


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_a_residual_of_thin_matrices_fades_as_any(kind: str) -> None:
    """The exchange adds the residual itself: with a decay of 0.5 what is left of one step halves with every other."""
    stores = [MemoryStore() for _ in range(2)]
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    left = []
    for number in range(3):
        exchange_once(f"powersgd:rank=1,ef=0.5,residual={kind}@low_rank", [x, x], stores=stores, step=number)
        x = torch.zeros(8, 8)
        ((*_, held),) = stores[0].held()
        left.append(held.float().norm().item())
    assert left[1] <= 0.51 * left[0]
    assert left[2] <= 0.51 * left[1]
