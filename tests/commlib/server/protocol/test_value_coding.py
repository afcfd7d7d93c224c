"""Gradients and values on their way: nothing is lost, what is not finite is not coded, what comes is checked."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from commlib.codecs.filter import Content, MissingKeys
from commlib.errors import ProtocolError
from commlib.runtime.layers import LayerSpec
from commlib.server.protocol.delta_coding import DeltaCoding, DeltaCopy
from commlib.server.protocol.value_coding import ValueCoding, Way, way, way_of_values

LAYER = LayerSpec("w[0:600]", (30, 20))
PUSHES = ["onebit", "topk:ratio=0.05", "fp16", "powersgd", "int8:ef=on", "significance:threshold=2"]
LOSSY = ["onebit", "topk:ratio=0.05", "fp16", "int8", "natural", "powersgd", "significance:threshold=0.1"]
FILTERS = "significance:threshold=0.1+key_cache:entries=2+fixed_float+lossless"


def coding(push: str = "none", pull: str = "none") -> ValueCoding:
    return ValueCoding(way(push), way_of_values(pull), {"w": LAYER})


def draw(seed: int) -> Tensor:
    return torch.randn(LAYER.numel, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("spec", PUSHES)
def test_what_a_gradient_lacks_comes_with_later_ones(spec: str) -> None:
    sender, receiver = coding(spec).sender("w", 3), coding(spec).receiver("w", 3)
    given_, came = torch.zeros(LAYER.numel, dtype=torch.float64), torch.zeros(LAYER.numel, dtype=torch.float64)
    gaps = []
    for step in range(200):
        gradient = draw(step)
        given_ += gradient
        came += receiver.decode(sender.encode(gradient, step), step)
        gaps.append(float((given_ - came).norm()))
    assert max(gaps[100:]) <= 1.5 * max(gaps[:100])  # a residual, which does not grow
    assert gaps[-1] < 0.9 * float(given_.norm()) * (1 if spec != "onebit" else 4)


@pytest.mark.parametrize("spec", ["qsgd", "random_skip:keep=0.3"])
def test_what_is_drawn_is_another_for_each_worker_and_step_and_the_same_again(spec: str) -> None:
    def sent(worker: int, step: int) -> list[float]:
        sender, receiver = coding(spec).sender("w", worker), coding(spec).receiver("w", worker)
        for n in range(step):
            sender.encode(draw(n), n)
        return receiver.decode(sender.encode(draw(0), step), step).tolist()

    found = [sent(0, 0), sent(1, 0), sent(0, 1)]
    assert sent(0, 0) == found[0]
    assert all(found[a] != found[b] for a, b in ((0, 1), (0, 2), (1, 2)))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("spec", [*PUSHES, "dgc"])
def test_a_gradient_that_is_not_finite_goes_as_it_is_and_leaves_no_trace(spec: str, bad: float) -> None:
    senders = [coding(spec).sender("w", 0) for _ in range(2)]
    receivers = [coding(spec).receiver("w", 0) for _ in range(2)]
    broken = draw(99)
    broken[17] = bad
    for step in range(4):
        if step == 2:
            row = senders[0].encode(broken, step)
            assert row is broken
            assert receivers[0].decode(row, step) is broken
        rows = [s.encode(draw(step), step) for s in senders]
        one, other = (r.decode(row, step) for r, row in zip(receivers, rows, strict=True))
        assert torch.equal(one, other)


def test_what_a_codec_has_no_room_for_goes_as_it_is() -> None:
    sender = coding("fp16").sender("w", 0)
    large = torch.full((LAYER.numel,), 1e6)
    assert sender.encode(large, 0) is large
    assert isinstance(sender.encode(draw(0), 1), Content)


@pytest.mark.parametrize("layer", [LayerSpec("w", (600,), torch.float64), LayerSpec("w", (1,))])
def test_other_dtypes_and_what_would_not_be_smaller_go_as_they_are(layer: LayerSpec) -> None:
    given_ = torch.ones(layer.shape, dtype=layer.dtype)
    assert ValueCoding(way("topk:ratio=0.5"), None, {"w": layer}).sender("w", 0).encode(given_, 0) is given_


def test_a_momentum_that_a_codec_has_is_kept_where_it_sends_all() -> None:
    small = ValueCoding(way("dgc:momentum=0.5,clip=0"), None, {"w": LayerSpec("w", (1,))})
    sender, receiver = small.sender("w", 0), small.receiver("w", 0)
    assert [receiver.decode(sender.encode(torch.ones(1), n), n).tolist() for n in range(2)] == [[1.0], [1.5]]


# -- values --------------------------------------------------------------------------------------


def sides(spec: str, workers: int) -> tuple[DeltaCoding, list[DeltaCopy]]:
    told = coding(pull=spec).of_values("w")
    return DeltaCoding(*told), [DeltaCopy(*told) for _ in range(workers)]


@pytest.mark.parametrize("spec", [*LOSSY, FILTERS])
def test_copies_of_values_are_equal_and_follow_them(spec: str) -> None:
    shard, (one, other) = sides(spec, 2)
    values = draw(0)
    for number in range(60):
        values = values + 0.1 * draw(number) if number < 30 else values
        row, serial = shard.answer(1, one.have, values, number)
        found = one.take(row, serial)
        assert isinstance(row, Tensor) == (number == 0)
        if number % 2 == 0:  # of another who asks now and then
            other.take(*shard.answer(2, other.have, values, number))
    assert float((found - values).square().mean().sqrt()) <= (0.1 if "significance" in spec else 0.03)


@pytest.mark.parametrize("spec", ["onebit", "qsgd", FILTERS])
def test_workers_who_are_told_the_same_things_have_the_same_bits(spec: str) -> None:
    shard, copies = sides(spec, 3)
    values = draw(0)
    for number in range(10):
        values = values + 0.1 * draw(number)
        found = [copy.take(*shard.answer(w, copy.have, values, number)) for w, copy in enumerate(copies)]
        assert all(torch.equal(each, found[0]) for each in found)


@given(st.lists(st.sampled_from(["answer", "lost", "exact", "other owner"]), max_size=30), st.integers(0, 1 << 32))
def test_whatever_answers_are_lost_a_worker_has_what_its_shard_thinks(acts: list[str], seed: int) -> None:
    for spec in ("onebit", FILTERS):
        shard, (copy,) = sides(spec, 1)
        values = draw(seed % 1000)
        for number, act in enumerate(acts):
            values = values + 0.1 * draw(number)
            if act == "other owner":
                shard, _ = sides(spec, 0)
            row, serial = shard.answer(0, None if act == "exact" else copy.have, values, number)
            if act == "exact":
                assert row is values
            if act != "lost":
                found = copy.take(row, serial)
                assert torch.equal(found, shard._of[0].values)
                assert float((found - values).norm()) < 3 * 0.1 * LAYER.numel**0.5


def test_a_difference_that_a_codec_has_no_room_for_comes_as_the_values_are() -> None:
    shard, (copy,) = sides("fp16", 1)
    for number, factor in enumerate((1.0, 1e6, 1e6 + 1)):
        values = factor * draw(0)
        row, serial = shard.answer(0, copy.have, values, number)
        assert (row is values) == (number < 2)
        assert bool(copy.take(row, serial).isfinite().all())


def test_values_that_are_not_finite_come_as_they_are_and_leave_no_trace() -> None:
    shard, (copy,) = sides("onebit", 1)
    broken = draw(1)
    broken[3] = torch.nan
    for number, values in enumerate((draw(0), broken, draw(2))):
        row, serial = shard.answer(0, copy.have, values, number)
        assert row is values or number == 2
        found = copy.take(row, serial)
        assert bool(found.isfinite().all()) == (number != 1)


# -- what is wrong -------------------------------------------------------------------------------


def payload(numel: int, dtype: torch.dtype = torch.uint8) -> Content:
    return Content(None, torch.zeros(numel, dtype=dtype))


@pytest.mark.parametrize(
    ("spec", "row"),
    [
        ("none", payload(5)),
        ("onebit", payload(5)),
        ("onebit", payload(600, torch.float32)),
        ("onebit", Content(torch.arange(3), torch.zeros(3))),
        ("onebit", Content(None, torch.zeros(8, dtype=torch.uint8), (1,))),
        ("blocks", Content(None, torch.full((4104,), 255, dtype=torch.uint8))),
        ("lossless", payload(600, torch.float32)),
        ("lossless", Content(None, torch.zeros(8, dtype=torch.uint8), (1,))),
        ("significance:threshold=1", Content(torch.tensor([600]), torch.zeros(1), (None,))),
    ],
)
def test_a_row_that_nothing_codes_is_refused(spec: str, row: Content) -> None:
    with pytest.raises(ProtocolError):
        coding(spec).receiver("w", 0).decode(row, 0)


def test_keys_are_asked_for_by_their_signature_and_others_refused() -> None:
    sender, receiver = coding("significance:threshold=2+key_cache").sender("w", 0), None
    sender.encode(torch.eye(1, LAYER.numel)[0] * 5, 0)
    second = sender.encode(torch.eye(1, LAYER.numel)[0] * 5, 1)
    receiver = coding("significance:threshold=2+key_cache").receiver("w", 0)
    with pytest.raises(MissingKeys) as e:
        receiver.decode(second, 1)
    with pytest.raises(ProtocolError, match="not those of their signature"):
        receiver.learn(e.value.signature, torch.tensor([1]))
    keys = sender.keys_of(e.value.signature)
    assert keys is not None
    receiver.learn(e.value.signature, keys)
    assert receiver.decode(second, 1).tolist() == [5.0] + [0.0] * (LAYER.numel - 1)
    with pytest.raises(ProtocolError, match="nobody has asked"):
        coding("onebit").receiver("w", 0).learn(b"", torch.tensor([1]))


@pytest.mark.parametrize("row", [payload(5), Content(None, torch.zeros(600))])
def test_a_difference_to_values_that_are_not_here_is_refused(row: Content) -> None:
    for spec in ("none", "onebit"):
        with pytest.raises(ProtocolError, match="values that are not here"):
            sides(spec, 1)[1][0].take(row, 1)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("onbit", "did you mean"),
        ("onebit:axes=tensor", "option"),
        ("significance", "needs threshold"),
        ("onebit+lossless", "onebit"),
        ("lossless+onebit", "onebit"),
        ("", "codec or filter"),
    ],
)
def test_what_is_no_codec_and_no_filter_is_named(spec: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        way(spec)


@pytest.mark.parametrize("spec", ["dgc"])
def test_a_codec_that_keeps_what_it_has_of_gradients_is_not_for_values(spec: str) -> None:
    with pytest.raises(ValueError, match=r"cannot code values: its \w+ is of gradients"):
        way_of_values(spec)


def test_a_filter_that_goes_by_the_values_is_not_for_values() -> None:
    with pytest.raises(
        ValueError, match="kkt cannot code values: it filters gradients, by the values that they are of"
    ):
        way_of_values("kkt:l1=1+lossless")


def test_a_filter_is_shown_the_values_that_came_last_and_the_gradients_number() -> None:
    sender, gradient = coding("kkt:l1=1,refresh=3").sender("w", 0), torch.full((LAYER.numel,), 0.5)

    def sent(number: int) -> int:
        row = sender.encode(gradient, number)
        assert isinstance(row, Content)
        return row.values.numel()

    assert sent(0) == LAYER.numel  # it knows of no values yet
    values = torch.zeros(LAYER.numel)
    values[4:7] = 1.0
    sender.see(values)
    assert [sent(1), sent(2), sent(3)] == [3, LAYER.numel, 3]
    sender.see(torch.zeros(LAYER.numel))
    assert sent(4) == 0
    broken = gradient.clone()
    broken[0] = torch.nan
    assert sender.encode(broken, 6) is broken  # the shard is to see it


def test_none_is_no_way() -> None:
    found: list[Way] = [way("none"), way_of_values(" none ")]
    assert found == [None, None]


@pytest.mark.parametrize("spec", ["none", *PUSHES, FILTERS])
def test_what_has_been_warmed_up_codes_as_what_has_not(spec: str) -> None:
    warm, cold = coding(spec, "none"), coding(spec, "none")
    warm.warm()
    both = [c.sender("w", 1).encode(draw(1), 0) for c in (warm, cold)]
    rows = [b.values if isinstance(b, Content) else b for b in both]
    assert rows[0].numpy().tobytes() == rows[1].numpy().tobytes()


def test_codecs_of_which_a_kernel_is_loaded_are_loaded_before_the_first_gradient() -> None:
    code = (
        "import sys; from commlib.server.protocol.value_coding import *; "
        "c = ValueCoding(way('onebit'), way_of_values('onebit')); "
        "before = 'numba' in sys.modules; c.warm(); print(before, 'numba' in sys.modules)"
    )
    pytest.importorskip("numba")
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["False", "True"]
