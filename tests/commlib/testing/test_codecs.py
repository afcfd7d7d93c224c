"""The contract suite finds each broken promise: one broken codec for each."""

from __future__ import annotations

import dataclasses
from importlib.metadata import EntryPoint
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from commlib.codecs import registry
from commlib.codecs.base import Carry, Compressor, LayerSpec, Memory, Slot, store
from commlib.testing import check_compressor

codec = dataclasses.dataclass(frozen=True)


@codec
class Sound(Compressor):
    """Half of x, as float32: biased, δ = 3/4, summable. The broken ones differ in one thing."""

    name = "sound"

    def nbytes(self, spec: LayerSpec) -> int:
        return 4 * spec.numel

    def encode(self, x: Tensor, payload: Tensor, *, memory: Memory, seed: int) -> None:
        payload.view(torch.float32).copy_(x.view(-1) / 2)

    def decode(self, payload: Tensor, out: Tensor, *, add: bool, scale: float, seed: int) -> None:
        store(payload.view(torch.float32), out, add=add, scale=scale)

    def contraction(self, spec: LayerSpec) -> float | None:
        return 0.75

    def reduce_dtype(self, spec: LayerSpec) -> torch.dtype | None:
        return torch.float32


@codec
class SoundResidual(Sound):
    """Keeps its own residual."""

    def slots(self, spec: LayerSpec) -> dict[str, Slot]:
        return {"residual": Slot(spec.shape)}

    def encode(self, x: Tensor, payload: Tensor, *, memory: Memory, seed: int) -> None:
        v = torch.add(x, memory.old["residual"], out=memory.new["residual"])
        super().encode(v, payload, memory=memory, seed=seed)
        v.mul_(0.5)


@codec
class SoundCoin(Sound):
    """0 or 2x, by lot."""

    unbiased = True
    random = True
    chance = 0.5

    def encode(self, x: Tensor, payload: Tensor, *, memory: Memory, seed: int) -> None:
        drawn = torch.rand(x.shape, dtype=torch.float32, generator=torch.Generator().manual_seed(seed))
        kept = drawn < self.chance
        super().encode(torch.where(kept, 4 * x, 0.0) + x.sum() * 0, payload, memory=memory, seed=seed)

    def contraction(self, spec: LayerSpec) -> float | None:
        return None


class NotFrozen(Sound):
    def __setattr__(self, key: str, value: object) -> None:
        object.__setattr__(self, key, value)


@codec
class NotHashable(Sound):
    levels: list[int] = dataclasses.field(default_factory=list)


@codec
class ImpureSchedule(Sound):
    calls: ClassVar[list[int]] = []

    def at(self, step: int) -> Compressor:
        self.calls.append(step)
        return Sound() if len(self.calls) % 2 else self


@codec
class ForgetfulSchedule(SoundResidual):
    def at(self, step: int) -> Compressor:
        return Sound()


@codec
class ForeignDenseForm(Sound):
    def dense_form(self) -> Compressor | None:
        return Sound()


@codec
class ShortPayload(Sound):
    def nbytes(self, spec: LayerSpec) -> int:
        return 4 * spec.numel + 4

    def encode(self, x: Tensor, payload: Tensor, *, memory: Memory, seed: int) -> None:
        super().encode(x, payload[:-4], memory=memory, seed=seed)

    def decode(self, payload: Tensor, out: Tensor, *, add: bool, scale: float, seed: int) -> None:
        super().decode(payload[:-4], out, add=add, scale=scale, seed=seed)


@codec
class AnyLength(Sound):
    def _check(self, x: Tensor, payload: Tensor, spec: LayerSpec, seed: int | None) -> None:
        pass

    def encode(self, x: Tensor, payload: Tensor, *, memory: Memory, seed: int) -> None:
        payload.zero_()
        payload[: 4 * x.numel()].copy_((x.view(-1) / 2).view(torch.uint8)[: payload.numel()])

    def decode(self, payload: Tensor, out: Tensor, *, add: bool, scale: float, seed: int) -> None:
        padded = torch.cat([payload, payload.new_zeros(4)])[: 4 * out.numel()]
        store(padded.view(torch.float32), out, add=add, scale=scale)


@codec
class Spills(Sound):
    """Writes one byte before its payload."""

    def encode(self, x: Tensor, payload: Tensor, *, memory: Memory, seed: int) -> None:
        super().encode(x, payload, memory=memory, seed=seed)
        if payload.storage_offset():
            payload.as_strided((1,), (1,), payload.storage_offset() - 1).fill_(77)


@codec
class GlobalDice(Sound):
    def encode(self, x: Tensor, payload: Tensor, *, memory: Memory, seed: int) -> None:
        super().encode(x * torch.rand_like(x), payload, memory=memory, seed=seed)


@codec
class ModifiesInput(Sound):
    def encode(self, x: Tensor, payload: Tensor, *, memory: Memory, seed: int) -> None:
        super().encode(x.mul_(2), payload, memory=memory, seed=seed)


@codec
class ModifiesPayload(Sound):
    def decode(self, payload: Tensor, out: Tensor, *, add: bool, scale: float, seed: int) -> None:
        super().decode(payload, out, add=add, scale=scale, seed=seed)
        payload.zero_()


@codec
class WritesOld(SoundResidual):
    def encode(self, x: Tensor, payload: Tensor, *, memory: Memory, seed: int) -> None:
        super().encode(x, payload, memory=Memory(memory.old, memory.old), seed=seed)
        memory.new["residual"].copy_(memory.old["residual"])


@codec
class ReadsNew(SoundResidual):
    def encode(self, x: Tensor, payload: Tensor, *, memory: Memory, seed: int) -> None:
        memory.new["residual"].zero_()  # wrong if it is the same tensor as old
        super().encode(x, payload, memory=memory, seed=seed)


@codec
class ZeroByZero(Sound):
    def encode(self, x: Tensor, payload: Tensor, *, memory: Memory, seed: int) -> None:
        super().encode(x / x.norm() * x.norm(), payload, memory=memory, seed=seed)


@codec
class HidesNaN(Sound):
    def encode(self, x: Tensor, payload: Tensor, *, memory: Memory, seed: int) -> None:
        super().encode(torch.where(x.isnan(), 0.0, x), payload, memory=memory, seed=seed)


@codec
class HidesInfinityAtTheEnd(Sound):
    def encode(self, x: Tensor, payload: Tensor, *, memory: Memory, seed: int) -> None:
        y = x.clone()
        y.view(-1)[-1:].clamp_(-1e9, 1e9)
        super().encode(y, payload, memory=memory, seed=seed)


@codec
class IgnoresScale(Sound):
    def decode(self, payload: Tensor, out: Tensor, *, add: bool, scale: float, seed: int) -> None:
        super().decode(payload, out, add=add, scale=1.0, seed=seed)


@codec
class IgnoresAdd(Sound):
    def decode(self, payload: Tensor, out: Tensor, *, add: bool, scale: float, seed: int) -> None:
        super().decode(payload, out, add=False, scale=scale, seed=seed)


@codec
class LosslessNot(Sound):
    lossless = True


@codec
class LosesResidual(SoundResidual):
    def encode(self, x: Tensor, payload: Tensor, *, memory: Memory, seed: int) -> None:
        super().encode(x, payload, memory=memory, seed=seed)
        memory.new["residual"].mul_(0.5)


@codec
class WrongFusedFeedback(Sound):
    def encode_feedback(self, x: Tensor, carry: Carry, payload: Tensor, *, memory: Memory, seed: int) -> None:
        self.encode(x + carry.old, payload, memory=memory, seed=seed)
        carry.new.zero_()


@codec
class SoundScales(Sound):
    """All of its payload is."""

    def scale_bytes(self, spec: LayerSpec) -> int:
        return self.nbytes(spec)


@codec
class ScalesThatBoundNothing(Sound):
    def scale_bytes(self, spec: LayerSpec) -> int:
        return min(4, self.nbytes(spec))


@codec
class ScalesThatHideNaN(SoundScales):
    def encode(self, x: Tensor, payload: Tensor, *, memory: Memory, seed: int) -> None:
        super().encode(x, payload, memory=memory, seed=seed)
        payload.view(torch.float32).nan_to_num_(nan=1.0, posinf=torch.inf, neginf=-torch.inf)

    def decode(self, payload: Tensor, out: Tensor, *, add: bool, scale: float, seed: int) -> None:
        values = payload.view(torch.float32)
        store(torch.where(values == 1, torch.nan, values), out, add=add, scale=scale)


@codec
class BoastsDelta(Sound):
    def contraction(self, spec: LayerSpec) -> float | None:
        return 0.8


@codec
class Biased(SoundCoin):
    chance = 0.4


@codec
class FollowsDefaultDtype(Sound):
    """Scaled by a third of the default dtype."""

    def encode(self, x: Tensor, payload: Tensor, *, memory: Memory, seed: int) -> None:
        super().encode(x * torch.tensor(1 / 3), payload, memory=memory, seed=seed)

    def decode(self, payload: Tensor, out: Tensor, *, add: bool, scale: float, seed: int) -> None:
        super().decode(payload, out, add=add, scale=3 * scale, seed=seed)


@codec
class UnsummableInHalf(Sound):
    def reduce_dtype(self, spec: LayerSpec) -> torch.dtype | None:
        return torch.float16


@codec
class RefusesAll(Sound):
    def refuse(self, spec: LayerSpec) -> str | None:
        return "no"


@pytest.mark.parametrize("sound", [Sound(), SoundResidual(), SoundCoin(), SoundScales()], ids=repr)
def test_a_sound_codec_passes(sound: Compressor) -> None:
    check_compressor(sound)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (NotFrozen(), "is not frozen"),
        (NotHashable(), "is not hashable"),
        (ImpureSchedule(), "differs from one call to the next"),
        (ForgetfulSchedule(), r"at\(0\) has other slots"),
        (ForeignDenseForm(), "that is not lossless"),
        (ShortPayload(), "some bytes of the payload are never written"),
        (AnyLength(), "is accepted"),
        (Spills(), "bytes outside the payload were written"),
        (ScalesThatBoundNothing(), "where scales allow"),
        (ScalesThatHideNaN(), "leave scales finite"),
        (GlobalDice(), "the same arguments gave different bytes"),
        (ModifiesInput(), "compress modified x"),
        (ModifiesPayload(), "the same payload decoded to different values"),
        (WritesOld(), "compress wrote memory.old"),
        (ReadsNew(), "memory in place and in two buffers differ"),
        (ZeroByZero(), "values of about 0 decode to non-finite ones"),
        (HidesNaN(), "nan at place 0 decodes to finite values only"),
        (HidesInfinityAtTheEnd(), "inf at place"),
        (IgnoresScale(), r"decompress\(scale=-0.5\) is not -0.5 times|sent \+ residual"),
        (IgnoresAdd(), "does not add"),
        (LosslessNot(), "is lossless but does not decode to x"),
        (LosesResidual(), r"sent \+ residual is not the sum of the x"),
        (WrongFusedFeedback(), r"sent \+ residual is not the sum of the x"),
        (BoastsDelta(), "δ = 0.8 allows"),
        (Biased(), "is unbiased, but the mean error is"),
        (FollowsDefaultDtype(), "the same arguments gave different bytes"),
        (UnsummableInHalf(), "payloads summed as torch.float16 do not decode to the sum"),
        (RefusesAll(), "refuses every one of the shapes"),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, Compressor) else "is",
)
def test_a_broken_promise_is_found(broken: Compressor, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_compressor(broken)


@dataclasses.dataclass(frozen=True)
class LosesOption(Sound):
    level: int = 1

    def options(self) -> dict[str, object]:
        return {}


def test_a_spec_string_that_makes_another_codec_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("sound", f"{__name__}:LosesOption", registry.GROUP)
    monkeypatch.setattr(EntryPoint, "load", lambda self: LosesOption)
    monkeypatch.setattr(registry, "compressors", lambda: {"sound": entry})
    with pytest.raises(AssertionError, match="the spec string 'sound' makes"):
        check_compressor(LosesOption(2))
