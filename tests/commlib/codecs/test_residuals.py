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
KINDS = ["bfloat16", "int8"]
SPEC = LayerSpec("layer", (6, 64))


def shortened(values: Tensor, up: int, kind: str) -> Tensor:
    """What holds these values, shape (rows, values)."""
    dtype = residuals.DTYPES[kind]
    held = torch.empty(residuals.room(values.shape, dtype), dtype=dtype)
    residuals.shorten(values.clone(), held, up)
    return held


def kept(values: Tensor, up: int, kind: str) -> Tensor:
    return residuals.widen(shortened(values, up, kind)).view(values.shape)


def alone(values: Tensor) -> Tensor:
    """Each value in a row of its own, the rest zeros."""
    return torch.nn.functional.pad(values[:, None], (0, 31))


def test_every_bar_comes_once_in_65536_steps() -> None:
    assert sorted(residuals.bar(step) for step in range(1 << 16)) == list(range(1 << 16))


@given(st.sampled_from(KINDS), st.integers(0, 2**32), st.integers(0, 10**6), st.integers(1, 600))
def test_errors_of_a_value_that_stays_add_up_to_a_few_units_in_its_last_place(
    kind: str, seed: int, begin: int, steps: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 64, generator=draw) * torch.randn(3, 1, generator=draw).exp()
    off = torch.zeros(x.shape, dtype=torch.float64)
    for step in range(begin, begin + steps):
        off += kept(x, residuals.bar(step), kind).double() - x.double()
    spacing = residuals.spacing(shortened(x, 0, "int8")).view(x.shape)
    unit = spacing if kind == "int8" else torch.exp2(torch.frexp(x)[1].double() - 8)
    assert bool((off.abs() <= (3 + math.log2(steps)) * unit).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("x", [2.0**-12, -(2.0**-11), 3e-5])
def test_small_gradients_add_up_beside_a_large_residual(x: float, kind: str) -> None:
    """Rounded to the nearest, the residual would stay as it was: the unit in the last place of 1 is 2⁻⁷ or 2⁻⁶."""
    held = torch.ones(1, 32)
    for step in range(1000):
        held = kept(held + x, residuals.bar(step), kind)
    off = 2.0**-5 if kind == "bfloat16" else 2.0**-4
    assert held.tolist() == [[pytest.approx(1 + 1000 * x, abs=off)] * 32]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("up", [0, 0x8000, 0xFFFF])
def test_what_is_finite_stays_so_and_what_is_not_does_not(up: int, kind: str) -> None:
    finite = alone(torch.tensor([0.0, -0.0, 1e-45, -1e-40, 1.0, 3.3e38, 3.4e38, -3.4028234e38]))
    held = kept(finite, up, kind)
    assert held.isfinite().all()
    share, least = (128, 1e-40) if kind == "bfloat16" else (63, 2.0**-126)
    assert bool(((held - finite).abs() <= finite.abs() / share + least).all())
    bits = torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7F800001, -1, -0x400000], dtype=torch.int32)
    strange = torch.cat([torch.tensor([math.inf, -math.inf]), bits.view(torch.float32)])
    assert not kept(alone(strange), up, kind)[:, 0].isfinite().any()


@given(st.integers(0, 2**32), st.integers(0, 0xFFFF), st.integers(0, 0xFFFF), st.integers(-120, 120))
def test_what_is_held_once_is_held_again_as_it_is(seed: int, up: int, again: int, size: int) -> None:
    x = torch.randn(2, 96, generator=torch.Generator().manual_seed(seed)) * 2.0**size
    for kind in KINDS:
        once = kept(x, up, kind)
        assert torch.equal(kept(once, again if kind == "int8" else 0, kind), once)


def test_int8_has_127_steps_to_the_largest_of_32_values_at_a_power_of_two() -> None:
    x = torch.zeros(1, 64)
    x[0, :4], x[0, 32:35] = torch.tensor([127.0, -127.0, 1.0, 0.75]), torch.tensor([127.5, 1.0, 3.0])
    assert kept(x, 0, "int8")[0, [0, 1, 2, 3]].tolist() == [127, -127, 1, 0]
    assert kept(x, 0x4000, "int8")[0, 3] == 1
    assert kept(x, 0, "int8")[0, 32:35].tolist() == [126, 0, 2]  # a step is 2 there
    assert shortened(x, 0, "int8").nbytes == 66


def test_rows_that_are_no_whole_blocks_are_bfloat16() -> None:
    codec = make("onebit:residual=int8")
    kinds = {
        shape: codec.slots(LayerSpec("layer", shape))["residual"].dtype
        for shape in [(), (64,), (4, 33), (2, 31), (4, 32), (3, 4, 8), (5, 2, 2, 8), (0, 32), (4, 0)]
    }
    assert [shape for shape, kind in kinds.items() if kind == SHORT] == [(), (64,), (4, 33), (2, 31)]
    assert {kind for kind in kinds.values() if kind != SHORT} == {torch.int8}


def step(codec: Compressor, x: Tensor, memory: Memory, *, overwrite: bool = False) -> Tensor:
    payload = torch.zeros(codec.nbytes(LayerSpec.of(x)), dtype=torch.uint8)
    codec.compress(x, payload, memory=memory, seed=3, overwrite=overwrite)
    return payload


@dataclasses.dataclass(frozen=True)
class TwoPasses(OneBit):
    """A codec that knows of float32 only."""

    def carries(self, held: Tensor) -> bool:
        return held.dtype == torch.float32


SOME = ("topk:ratio=0.1", "sign:ef=on", "twobit:block=16", "onebit:ef=0.5")
CODECS = [
    *(ErrorFeedback(inner, residual=kind) for kind in KINDS for inner in (OneBit(), TwoPasses())),
    *(make(f"{spec},residual={kind}") for kind in KINDS for spec in SOME),
]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: f"{codec.inner.__class__.__name__} {codec}")
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
    for codecs in (CODECS[:2], CODECS[2:4]):
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
    assert make("bf16").elementwise
    assert not make("bf16:residual=int8").elementwise  # of layers side by side, blocks would be others


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("onebit:residual=half", "float32, bfloat16 or int8, got residual=half"),
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("route", ROUTES)
def test_over_many_steps_no_more_is_lost_than_one_rounding(route: str, kind: str) -> None:
    codec, _, exchange = route.partition("@")
    rule = f"{codec}{',' if ':' in codec else ':'}residual={kind}@{exchange}"
    stores = [MemoryStore() for _ in range(3)]
    produced = sent = torch.zeros(SPEC.shape, dtype=torch.float64)
    largest = one = 0.0  # of what all ranks owe, and of what one does: that decides on the scales of int8
    for number in range(60):
        draw = torch.Generator().manual_seed(number)
        grads = [torch.randn(SPEC.shape, generator=draw) for _ in stores]
        produced = produced + sum(g.double() for g in grads) / len(grads)
        results = exchange_once(rule, grads, stores=stores, step=number)
        assert all(torch.equal(results[0], r) for r in results)
        sent = sent + results[0].double()
        largest = max(largest, float(owed(stores).abs().max()))
        one = max(one, *(float(values.abs().max()) for s in stores for *_, values in s.held() if len(values)))
    off = (sent + owed(stores) - produced).abs().max().item()
    assert off <= (8 * 2.0**-8 * max(1.0, largest) if kind == "bfloat16" else 8 * 2.0**-7 * max(1.0, one))
    tensors = {
        tensor.dtype
        for store in stores
        for key, pair in store._pairs["layer"].items()
        for tensor in pair.tensors
        if "residual" in key
    }
    assert tensors == {residuals.DTYPES[kind]}


LONG, BRIEF, BRIEFEST = ({"residual": Slot((4, 32), dtype=dtype)} for dtype in residuals.DTYPES.values())
ROWS = LayerSpec("layer", (4, 32))


@pytest.mark.parametrize("brief", [BRIEF, BRIEFEST])
@pytest.mark.parametrize("unit", [1.0, 1024.0, 3.0])
def test_another_format_takes_over_what_is_held_back(brief: dict[str, Slot], unit: float) -> None:
    store, slot = MemoryStore(), brief["residual"]
    values = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    store.memory(ROWS, LONG).new["residual"].copy_(values)
    store.commit()
    old = store.memory(ROWS, brief).old["residual"]
    assert (old.dtype, old.shape, old.nbytes) == (slot.dtype, slot.room, slot.nbytes)
    held = residuals.widen(old).view(4, 32)
    if slot.dtype == SHORT:
        assert torch.equal(old, values.to(SHORT))
    assert float((held - values).abs().max()) <= residuals.relative(slot.dtype) * float(values.abs().max())
    store.discard()
    store.memory(ROWS, brief)
    store.rescale(unit)
    store.discard()
    again = store.memory(ROWS, LONG).old["residual"]
    if unit == 1:
        assert torch.equal(again, held)
    assert bool(((again / unit - values).abs() <= 2 * residuals.relative(slot.dtype) * values.abs().max()).all())


def test_what_int8_holds_back_goes_with_the_gradient_of_another_route() -> None:
    store, values = MemoryStore(), torch.arange(128.0).view(4, 32)
    residuals.convert(values, store.memory(ROWS, BRIEFEST).new["residual"])
    store.commit()
    grad = torch.ones(4, 32)
    assert store.holds("layer")
    assert store.drain(ROWS, grad, 2, 1)
    assert torch.equal(grad, values + 1)
    assert store.nbytes == (2 * 4 * 33, 0)


def test_a_run_of_layers_takes_another_format_over_too() -> None:
    store, specs = MemoryStore(), [LayerSpec(name, (2, 3)) for name in "ab"]
    store.run(("a", "b"), specs, {"residual": Slot(())}).new["residual"].copy_(torch.arange(12.0))
    store.commit()
    again = store.run(("a", "b"), specs, {"residual": Slot((), dtype=SHORT)})
    assert again.old["residual"].dtype == SHORT
    assert again.old["residual"].tolist() == list(range(12))


@pytest.mark.parametrize("kind", residuals.DTYPES)
def test_a_checkpoint_has_float32_whatever_the_default_dtype_is(kind: str) -> None:
    store, codec = MemoryStore(), make(f"onebit:residual={kind}")
    x = torch.randn(SPEC.shape, generator=torch.Generator().manual_seed(0))
    step(codec, x, store.memory(SPEC, codec.slots(SPEC)))
    store.commit()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        value = store.export()["layer"]["residual"]["value"]
    finally:
        torch.set_default_dtype(before)
    assert isinstance(value, Tensor)
    assert value.dtype == torch.float32


@pytest.mark.parametrize("brief", [BRIEF, BRIEFEST])
def test_a_checkpoint_has_float32_of_it_and_gives_the_same_bits_back(brief: dict[str, Slot]) -> None:
    store, other = MemoryStore(), MemoryStore()
    made = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    residuals.shorten(made, store.memory(ROWS, brief).new["residual"], residuals.bar(5))
    store.commit()
    value = store.export()["layer"]["residual"]["value"]
    assert isinstance(value, Tensor)
    assert (value.dtype, value.shape) == (torch.float32, (4, 32))
    other.restore("layer", "residual", brief["residual"], value)
    assert torch.equal(other.memory(ROWS, brief).old["residual"], store.memory(ROWS, brief).old["residual"])


def test_a_checkpoint_of_another_format_is_converted_and_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    def loaded(before: str, after: str) -> str:
        store, other, caplog_from = MemoryStore(), MemoryStore(), len(caplog.records)
        plans = [make_plan([ROWS], rule, world=2, min_size=0) for rule in (before, after)]
        for _ in range(2):
            slots = plans[0].layers["layer"].route.codec.slots(ROWS)
            residuals.convert(torch.randn(4, 32), store.memory(ROWS, slots).new["residual"])
            store.commit()
        state = to_state(plans[0], store, World(0, 2), 2)
        assert from_state(state, plans[1], other, World(0, 2), drop_residuals=False) == 2
        kept = other.memory(ROWS, plans[1].layers["layer"].route.codec.slots(ROWS)).old["residual"]
        given = state["ranks"]["0"]["layer"]["residual"]["value"]
        if kept.is_floating_point():
            assert torch.equal(kept.float(), given.to(kept.dtype).float())
        else:
            largest = given.abs().amax(-1, keepdim=True)
            assert bool(((residuals.widen(kept).view(4, 32) - given).abs() <= largest / 127).all())
        return "; ".join(record.getMessage() for record in caplog.records[caplog_from:])

    with caplog.at_level("INFO", "commlib"):
        assert loaded("sign", "sign:residual=bfloat16") == (
            "1 residuals of the checkpoint are rounded to bfloat16, in which they are kept here"
        )
        assert loaded("sign", "sign:residual=int8") == (
            "1 residuals of the checkpoint are rounded to int8, in which they are kept here"
        )
        assert loaded("sign:residual=bfloat16", "sign") == ""
        assert loaded("sign:residual=int8", "sign") == ""
        assert loaded("sign:residual=int8", "sign:residual=int8") == ""
        assert loaded("sign:residual=bfloat16", "sign:residual=bfloat16") == ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_forgotten_leaves_no_trace(kind: str) -> None:
    codec, store = make(f"onebit:residual={kind}"), MemoryStore()
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


@pytest.mark.parametrize("kind", residuals.DTYPES)
def test_a_residual_of_thin_matrices_fades_as_any(kind: str) -> None:
    """The exchange adds the residual itself: with a decay of 0.5 what is left of one step halves with every other."""
    stores = [MemoryStore() for _ in range(2)]
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    left = []
    for number in range(3):
        exchange_once(f"powersgd:rank=1,ef=0.5,residual={kind}@low_rank", [x, x], stores=stores, step=number)
        x = torch.zeros(8, 32)
        ((*_, held),) = stores[0].held()
        left.append(held.float().norm().item())
    assert left[1] <= 0.51 * left[0]
    assert left[2] <= 0.51 * left[1]
