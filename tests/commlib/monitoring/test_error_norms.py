"""The relative error of compression is what was not sent of what there was, measured against the payload itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from commlib.codecs.base import Compressor, LayerSpec, Memory
from commlib.codecs.memory_store import MemoryStore
from commlib.codecs.registry import make
from commlib.monitoring.error_norms import ErrorNorms, LayerNorms, total

SHAPE = (24, 40)
SPEC = LayerSpec("fc.weight", SHAPE)


class Layer:
    """One layer that is compressed step by step, as an exchange has it."""

    def __init__(self, codec: Compressor) -> None:
        self.codec, self.store, self.count = codec, MemoryStore(), 0
        self.gauge = ErrorNorms(self.store)

    def step(self, x: Tensor, *, good: bool = True, look: bool = True) -> tuple[dict[str, LayerNorms], float]:
        """What the gauge says, and ‖x + r − sent‖ / ‖x + r‖ by the payload."""
        memory = self.store.memory(SPEC, self.codec.slots(SPEC))
        if look:
            self.gauge.note(SPEC.name, self.codec, x, memory, self.count)
        there = x.float() + getattr(self.codec, "decay", 1.0) * memory.old.get("residual", torch.zeros(SHAPE))
        payload, sent = torch.empty(self.codec.nbytes(SPEC), dtype=torch.uint8), torch.empty(SHAPE)
        self.codec.compress(x.float(), payload, memory=memory, seed=self.count)
        self.codec.decompress(payload, sent, seed=self.count)
        if good:
            self.store.commit()
            self.count += 1
        else:
            self.store.discard()
        return self.gauge.read(self.count), float((there - sent).norm() / there.norm())


def draw(seed: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "spec", ["onebit", "topk:ratio=0.05", "topk:ratio=0.05,ef=0.9", "int8", "sign", "blocks:keep=0.3,block=64"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_it_is_what_the_payload_lacks_of_gradient_and_residual(spec: str, dtype: torch.dtype) -> None:
    layer = Layer(make(spec))
    for step in range(4):
        said, by_payload = layer.step(draw(step).to(dtype))
        held = said[SPEC.name]
        assert held.error == pytest.approx(by_payload, rel=1e-4)
        assert total(said) == pytest.approx(by_payload, rel=1e-4)
        ((_, _, residual),) = [h for h in layer.store.held() if h[1] == "residual"]
        assert held.residual == pytest.approx(float(residual.norm()), rel=1e-5)


@pytest.mark.parametrize("spec", ["none", "fp16:ef=off", "qsgd"])
def test_codecs_that_hold_nothing_back_are_not_spoken_of(spec: str) -> None:
    said, _ = Layer(make(spec)).step(draw(0))
    assert said == {}
    assert total(said) is None


def test_of_a_codec_with_a_momentum_only_the_residual_is_known() -> None:
    layer = Layer(make("dgc:ratio=0.05"))
    layer.step(draw(0))
    said, _ = layer.step(draw(1))
    assert said[SPEC.name].error is None
    assert said[SPEC.name].residual > 0
    assert total(said) is None
    plain = Layer(make("dgc:ratio=0.05,momentum=0"))
    said, by_payload = plain.step(draw(0))
    assert said[SPEC.name].error == pytest.approx(by_payload, rel=1e-4)


def test_a_step_that_does_not_count_has_no_error_and_the_residual_of_before() -> None:
    layer = Layer(make("onebit"))
    first, _ = layer.step(draw(0))
    said, _ = layer.step(draw(1), good=False)
    assert said[SPEC.name].error is None
    assert said[SPEC.name].residual == first[SPEC.name].residual
    again, by_payload = layer.step(draw(1))
    assert again[SPEC.name].error == pytest.approx(by_payload, rel=1e-4)


def test_a_step_that_was_not_looked_at_has_no_error_either() -> None:
    layer = Layer(make("onebit"))
    layer.step(draw(0))
    said, _ = layer.step(draw(1), look=False)
    assert said[SPEC.name].error is None
    assert said[SPEC.name].residual > 0


def test_what_a_step_that_broke_off_has_left_is_forgotten() -> None:
    layer = Layer(make("onebit"))
    memory = layer.store.memory(SPEC, layer.codec.slots(SPEC))
    other = LayerSpec("other", SHAPE)
    layer.gauge.note(other.name, layer.codec, draw(5), memory, -1)
    layer.store.discard()
    said, by_payload = layer.step(draw(0))
    assert set(said) == {SPEC.name}
    assert total(said) == pytest.approx(by_payload, rel=1e-4)


def test_a_loss_scale_is_taken_out_of_norms_and_not_in_errors() -> None:
    plain, scaled = Layer(make("onebit")), Layer(make("onebit"))
    scaled.store.rescale(1024.0)
    for step in range(3):
        a, _ = plain.step(draw(step))
        b, _ = scaled.step(1024 * draw(step))
        assert b[SPEC.name].error == pytest.approx(a[SPEC.name].error)
        assert b[SPEC.name].residual == pytest.approx(a[SPEC.name].residual)


def test_what_an_owner_holds_of_the_mean_is_told_apart_and_a_gradient_of_zeros_has_no_error() -> None:
    codec, store = make("onebit"), MemoryStore()
    gauge, stripe = ErrorNorms(store), LayerSpec(SPEC.name, (12, 40))
    memory, owner = store.memory(SPEC, codec.slots(SPEC)), store.owner(SPEC, codec.slots(stripe), 0)
    gauge.note(SPEC.name, codec, torch.zeros(SHAPE), memory, 0)
    memory.new["residual"].zero_()
    owner.new["residual"].fill_(2.0)
    store.commit()
    (held,) = gauge.read(1).values()
    assert held == pytest.approx((0.0, 2 * 480**0.5, 0.0, 0.0))


def test_layers_add_up_by_their_norms() -> None:
    layers = {
        "a": LayerNorms(3.0, error=0.5, there=6.0),
        "b": LayerNorms(4.0, error=0.5, there=8.0),
        "c": LayerNorms(100.0),
    }
    assert total(layers) == pytest.approx(5 / 10)
    assert total({"a": LayerNorms(0.0, error=0.0)}) == 0.0
    assert total({"c": LayerNorms(1.0)}) is None


def test_what_is_of_another_shape_than_the_gradient_is_left_alone() -> None:
    gauge = ErrorNorms(MemoryStore())  # a node's ranks have summed first: this residual is of a stripe of their sum
    part = Memory({"residual": torch.ones(12, 40)}, {"residual": torch.ones(12, 40)})
    gauge.note(SPEC.name, make("onebit"), draw(0), part, 0)
    assert gauge.read(1) == {}
