"""The contract of a codec as tests that anyone can run on theirs.

``check_compressor("mycodec:level=3")`` raises AssertionError, saying which promise was broken for
which shape, unless (each has a function of its own):

=====================  ============================================================================
``check_config``       frozen and hashable; ``at(step)`` is pure and keeps the slots
``check_spec_string``  ``make(str(codec))`` is the codec again, for installed ones
``check_payload``      exactly ``nbytes(spec)`` bytes, all written; other lengths are refused
``check_determinism``  same arguments, same bytes; ``x``, payload and ``memory.old`` are not modified
``check_finite``       zeros and tiny values decode to finite values
``check_non_finite``   a NaN or an infinity anywhere makes some decoded value non-finite
``check_scales``       decoded values are bounded by scales, which show what is not finite
``check_decode``       ``scale`` and ``add`` mean ``out = s·d`` and ``out += s·d``; losslessness
``check_memory``       slots updated in place and in two buffers become the same, bit for bit
``check_feedback``     over 20 steps Σ sent + residual = Σ x
``check_contraction``  E‖C(x) − x‖² ≤ (1 − δ)‖x‖²
``check_unbiased``     E[C(x)] = x over seeds, within six standard errors
``check_reducible``    decode(Σ payloads) = Σ decoded payloads
=====================  ============================================================================

Of a transport: ``check_endpoint(make)``; see :mod:`commlib.testing.endpoints`. Of a filter of the parameter server's
messages: ``check_filter("mine:level=3")``; see :mod:`commlib.testing.filters`.

Needs torch only, so a third party's tests can import it. Everything follows from ``seed``.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from commlib.codecs import registry
from commlib.codecs.base import Compressor, LayerSpec, Memory, scales_of
from commlib.codecs.error_feedback import ErrorFeedback
from commlib.codecs.residuals import DTYPES, bar, spacing, widen
from commlib.testing.assertions import (
    close,
    decode,
    encode,
    normal,
    raises,
    require,
    roundtrip,
    same,
    seeds,
    setting,
    standard_error,
)
from commlib.testing.endpoints import check_endpoint as check_endpoint
from commlib.testing.filters import check_filter as check_filter

SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (7,), (300,), (33, 17), (4, 3, 5, 5), (0, 3), (64, 48))
_SIGMAS = 6.0


def check_compressor(codec: Compressor | str, *, seed: int = 0) -> None:
    """Check every promise, with and without error feedback, for a range of shapes that the codec does not refuse.

    Raises:
        AssertionError: a promise is broken.
    """
    if isinstance(codec, str):
        codec = registry.make(codec)
    plain = codec.inner if isinstance(codec, ErrorFeedback) else codec
    check_config(plain)
    check_spec_string(plain)
    specs = [s for s in (LayerSpec("test", shape) for shape in SHAPES) if plain.refuse(s) is None]
    require(bool(specs), plain, None, f"refuses every one of the shapes {SHAPES}")
    for spec in specs:
        for each in (plain, *_carried(plain)):
            check_determinism(each, spec, seed=seed)
            check_payload(each, spec, seed=seed)
            check_finite(each, spec, seed=seed)
            check_non_finite(each, spec, seed=seed)
            check_scales(each, spec, seed=seed)
            check_memory(each, spec, seed=seed)
            check_elementwise(each, spec, seed=seed)
        check_decode(plain, spec, seed=seed)
        check_feedback(plain, spec, seed=seed)
        check_contraction(plain, spec, seed=seed)
        check_unbiased(plain, spec, seed=seed)
        check_reducible(plain, spec, seed=seed)


def _carried(plain: Compressor) -> list[ErrorFeedback]:
    """The codec with error feedback, in every format of the residual; none if it takes none."""
    return [ErrorFeedback(plain, residual=kind) for kind in DTYPES] if plain.takes_feedback else []


def check_config(codec: Compressor) -> None:
    """Frozen, hashable, equal to its copy; its schedule is a pure function that keeps the slots."""
    require(dataclasses.is_dataclass(codec), codec, None, "is not a dataclass")
    frozen = raises(dataclasses.FrozenInstanceError, setattr, codec, "name", codec.name)
    require(frozen, codec, None, "is not frozen: an attribute could be set")
    require(not raises(TypeError, hash, codec), codec, None, "is not hashable")
    spec = LayerSpec("test", (64, 48))
    for step in (0, 1, 10, 10**6):
        now = codec.at(step)
        require(now == codec.at(step), codec, None, f"at({step}) differs from one call to the next")
        require(now.slots(spec) == codec.slots(spec), codec, None, f"at({step}) has other slots")
    dense = codec.dense_form()
    if dense is not None:
        require(dense.lossless, codec, None, f"has a dense_form, {dense}, that is not lossless")
        own = codec.slots(spec).items()
        require(dense.slots(spec).items() <= own, codec, None, f"lacks slots of its dense_form, {dense}")


def check_spec_string(codec: Compressor) -> None:
    """Written as a spec string and made again it is the same; skipped for a class that is not installed."""
    entry = registry.compressors().get(codec.name)
    if entry is not None and entry.load() is type(codec):
        for each in (codec, registry.make(codec)):
            again = registry.make(str(each))
            require(again == each, codec, None, f"the spec string {str(each)!r} makes {again!r}, not {each!r}")


def check_payload(codec: Compressor, spec: LayerSpec, *, seed: int = 0) -> None:
    """Every byte of ``nbytes(spec)`` is written, none around it, and any other length is refused."""
    x = normal(spec, seed)
    need = codec.nbytes(spec)
    written = []
    for filler in (0, 255):
        room = torch.full((8 + need + 8,), filler, dtype=torch.uint8)
        codec.compress(x, room[8 : 8 + need], memory=Memory.zeros(codec, spec), seed=seed)
        margins = torch.cat([room[:8], room[8 + need :]])
        require(bool((margins == filler).all()), codec, spec, "bytes outside the payload were written")
        written.append(room[8 : 8 + need])
    require(torch.equal(*written), codec, spec, "some bytes of the payload are never written")
    for wrong in {need + 1, max(0, need - 1)} - {need}:
        payload = torch.zeros(wrong, dtype=torch.uint8)
        refused = raises(ValueError, codec.compress, x, payload, memory=Memory.zeros(codec, spec), seed=seed)
        refused &= raises(ValueError, codec.decompress, payload, x.clone(), seed=seed)
        require(refused, codec, spec, f"a payload of {wrong} bytes instead of {need} is accepted")


def check_determinism(codec: Compressor, spec: LayerSpec, *, seed: int = 0) -> None:
    """The same arguments give the same bytes and values, whatever torch's global generator and default dtype are; the
    arguments that are read are not written."""
    x, old, untouched = normal(spec, seed), Memory.zeros(codec, spec).old, Memory.zeros(codec, spec).old
    payloads = []
    for noise in range(3):
        payload = torch.zeros(codec.nbytes(spec), dtype=torch.uint8)
        new = {k: _of_noise(v, noise) for k, v in old.items()}
        with setting(noise):
            codec.compress(x, payload, memory=Memory(old, new), seed=seed)
        require(torch.equal(x, normal(spec, seed)), codec, spec, "compress modified x")
        kept = all(torch.equal(old[k], untouched[k]) for k in old)
        require(kept, codec, spec, "compress wrote memory.old")
        payloads.append(payload)
    alike = all(torch.equal(payloads[0], p) for p in payloads)
    require(alike, codec, spec, "the same arguments gave different bytes")
    values = []
    for noise in range(3):
        with setting(noise):
            values.append(decode(codec, payloads[0], spec, seed))
    require(all(same(values[0], v) for v in values), codec, spec, "the same payload decoded to different values")
    require(torch.equal(*payloads[:2]), codec, spec, "decompress modified the payload")


def check_finite(codec: Compressor, spec: LayerSpec, *, seed: int = 0) -> None:
    """All zeros, and values down to the smallest float32, decode to finite values."""
    for factor in (0.0, 1e-30, 1e-38, 1e-45):
        decoded = roundtrip(codec, normal(spec, seed) * factor, seed)
        require(bool(decoded.isfinite().all()), codec, spec, f"values of about {factor:g} decode to non-finite ones")


def check_non_finite(codec: Compressor, spec: LayerSpec, *, seed: int = 0) -> None:
    """Check that a NaN, +inf or -inf at the first, middle or last place is seen by whoever decodes."""
    for place in {0, spec.numel // 2, spec.numel - 1} if spec.numel else ():
        for bad in (math.nan, math.inf, -math.inf):
            for s in (seed, seed + 1):
                x = normal(spec, seed)
                x.view(-1)[place] = bad
                seen = not bool(roundtrip(codec, x, s).isfinite().all())
                require(seen, codec, spec, f"{bad} at place {place} decodes to finite values only")


def check_scales(codec: Compressor, spec: LayerSpec, *, seed: int = 0) -> None:
    """If it has scales, no decoded value is more than twice the largest, and what is not finite shows in them."""
    if not codec.scale_bytes(spec):
        return
    for factor in (0.0, 1e-45, 1e-38, 1.0, 1e18, math.nan, math.inf):
        payload = encode(codec, normal(spec, seed) * factor, seed)
        scales = scales_of(codec, payload, spec)
        if math.isfinite(factor):
            bound = 2 * float(scales.abs().amax())
            largest = float(decode(codec, payload, spec, seed).abs().amax())
            require(largest <= bound, codec, spec, f"decodes {largest:g} where scales allow {bound:g}")
        else:
            require(not bool(scales.isfinite().all()), codec, spec, f"values times {factor} leave scales finite")


def check_decode(codec: Compressor, spec: LayerSpec, *, seed: int = 0) -> None:
    """``out`` is overwritten whatever it held, or added to; the decoded values are scaled; lossless means it."""
    x = normal(spec, seed)
    payload = encode(codec, x, seed)
    d = decode(codec, payload, spec, seed)
    if codec.lossless and not codec.slots(spec):  # one with a momentum sends that without loss
        require(torch.equal(d, x), codec, spec, "is lossless but does not decode to x")
    for scale in (1.0, -0.5, 3.0):
        out = torch.full(spec.shape, math.nan, dtype=torch.float32)
        codec.decompress(payload, out, scale=scale, seed=seed)
        require(close(out, scale * d), codec, spec, f"decompress(scale={scale:g}) is not {scale:g} times decompress()")
        base = normal(spec, seed + 1)
        out = base.clone()
        codec.decompress(payload, out, add=True, scale=scale, seed=seed)
        require(close(out, base + scale * d), codec, spec, f"decompress(add=True, scale={scale:g}) does not add")


def check_memory(codec: Compressor, spec: LayerSpec, *, seed: int = 0) -> None:
    """Five steps with ``old is new`` and five with two buffers swapped: equal bytes and equal slots."""
    one = Memory.zeros(codec, spec)
    two = Memory(Memory.zeros(codec, spec).old, {k: _of_noise(v, math.nan) for k, v in one.old.items()})
    for step in range(5):
        x = normal(spec, seed + step)
        payloads = [torch.zeros(codec.nbytes(spec), dtype=torch.uint8) for _ in range(2)]
        for memory, payload in zip((one, two), payloads, strict=True):
            codec.compress(x, payload, memory=memory, seed=seed + step)
        alike = all(same(one.new[k], two.new[k]) for k in one.new)
        require(alike and torch.equal(*payloads), codec, spec, "memory in place and in two buffers differ")
        two = Memory(two.new, two.old)


def _of_noise(like: torch.Tensor, noise: float) -> torch.Tensor:
    """A slot of any content, as memory that nobody has written yet."""
    return torch.full_like(like, noise if like.is_floating_point() else 77)


def check_feedback(codec: Compressor, spec: LayerSpec, *, seed: int = 0) -> None:
    """Nothing is lost: Σ sent + residual = Σ x. Not asked of a codec that also keeps local state (a momentum)."""
    slots = codec.slots(spec).values()
    if any(s.role == "pending" for s in slots) and not any(s.role == "local" for s in slots):
        _check_sum(codec, spec, seed)
    for each in _carried(codec):
        _check_sum(each, spec, seed)


def _check_sum(codec: Compressor, spec: LayerSpec, seed: int) -> None:
    memory, pending = Memory.zeros(codec, spec), [k for k, s in codec.slots(spec).items() if s.role == "pending"]
    total, sent = torch.zeros(2, *spec.shape, dtype=torch.float64)
    size, rounded = 1.0, torch.zeros(spec.shape, dtype=torch.float64)
    for step in range(20):
        x = normal(spec, seed + step)
        memory = dataclasses.replace(memory, up=bar(step))
        payload = encode(codec, x, seed + step, memory)
        total += x
        sent += decode(codec, payload, spec, seed + step)
        # of whatever was added up: a variance above 1 makes feedback grow, yet nothing may be lost
        size = max([size, *(float(widen(v).abs().amax()) for v in memory.new.values() if v.numel())])
        for held in (memory.new[k] for k in pending):  # a unit in its last place each time, if it is a short one
            rounded += spacing(held).view(spec.shape)
    owed = sum((widen(memory.new[k]).double().view(spec.shape) for k in pending), sent)
    bound = 1e-4 * size + rounded
    require(bool(((owed - total).abs() <= bound).all()), codec, spec, "sent + residual is not the sum of the x")


def check_elementwise(codec: Compressor, spec: LayerSpec, *, seed: int = 0) -> None:
    """Where it says so: a tensor and another side by side are coded as each of them, and so are slots."""
    if not codec.elementwise:
        return
    require(not codec.random, codec, spec, "is elementwise and draws at random: layers side by side get other numbers")
    sides = [normal(spec, seed), 3.0 * normal(spec, seed + 1)]
    memories = [Memory.zeros(codec, spec) for _ in sides]
    whole = LayerSpec("test", (2 * spec.numel,))
    together = Memory.zeros(codec, whole)
    require(all(s.init == "zeros" for s in codec.slots(spec).values()), codec, spec, "has slots that are not zeros")
    for _ in range(2):
        payloads = [encode(codec, x, seed, m) for x, m in zip(sides, memories, strict=True)]
        payload = encode(codec, torch.cat([x.view(-1) for x in sides]), seed, together)
        require(torch.equal(payload, torch.cat(payloads)), codec, spec, "is not elementwise: payloads differ")
        decoded = [decode(codec, p, spec, seed).view(-1) for p in payloads]
        require(
            torch.equal(decode(codec, payload, whole, seed), torch.cat(decoded)), codec, spec, "decodes otherwise so"
        )
        for key, value in together.new.items():
            kept = torch.cat([m.new[key].view(-1) for m in memories])
            require(torch.equal(value, kept), codec, spec, f"slot {key!r} differs: it is not elementwise")


def check_contraction(codec: Compressor, spec: LayerSpec, *, seed: int = 0) -> None:
    """The δ it names holds for normal, heavy-tailed, constant and one-hot x; on average if it draws at random."""
    delta = codec.contraction(spec)
    if delta is None or not spec.numel:
        return
    require(0 <= delta <= 1, codec, spec, f"δ = {delta} is not within [0, 1]")
    plain = normal(spec, seed)
    one_hot = -(torch.arange(spec.numel) == spec.numel // 2).float().view(spec.shape)
    inputs = {
        "normal": plain,
        "cubed normal": plain**3,
        "ones": torch.ones(spec.shape, dtype=torch.float32),
        "one-hot": one_hot,
    }
    for what, x in inputs.items():
        energy = float(x.double().square().sum())
        errors = torch.stack([(roundtrip(codec, x, s).double() - x).square().sum() for s in seeds(codec, seed)])
        bound = (1 - delta) * energy + 1e-5 * energy + _SIGMAS * standard_error(errors)
        found = float(errors.mean())
        require(found <= bound, codec, spec, f"error {found:g} of {what} values, δ = {delta:g} allows {bound:g}")


def check_unbiased(codec: Compressor, spec: LayerSpec, *, seed: int = 0) -> None:
    """The mean error over seeds, seen from a few directions, is zero within six standard errors."""
    if not codec.unbiased or codec.lossless or not spec.numel:
        return
    x = normal(spec, seed).view(-1)
    coin = torch.where(normal(spec, seed + 1).view(-1) > 0, torch.ones_like(x), -1.0)
    # not value by value: one that changes in one draw of a million shows no spread in the few drawn here
    directions = torch.stack([x, x.sign(), torch.ones_like(x), coin, x**3]).double()
    errors = torch.stack([roundtrip(codec, x.view(spec.shape), s).view(-1).double() - x for s in seeds(codec, seed)])
    for seen in (errors @ directions.T).T:
        limit = _SIGMAS * standard_error(seen) + 1e-5 * float(x.double().square().sum())
        found = float(seen.mean())
        require(abs(found) <= limit, codec, spec, f"is unbiased, but the mean error is {found:g}, over {limit:g}")


def check_reducible(codec: Compressor, spec: LayerSpec, *, seed: int = 0) -> None:
    """Payloads added up in ``reduce_dtype`` decode to the sum of what each decodes to."""
    dtype = codec.reduce_dtype(spec)
    if dtype is None:
        return
    require(codec.nbytes(spec) % dtype.itemsize == 0, codec, spec, f"the payload is no whole number of {dtype}")
    payloads = [encode(codec, normal(spec, seed + rank), seed) for rank in range(3)]
    total = torch.stack([p.view(dtype) for p in payloads]).sum(0).view(torch.uint8)
    wanted = torch.stack([decode(codec, p, spec, seed) for p in payloads]).sum(0)
    alike = close(decode(codec, total, spec, seed), wanted, 4 * torch.finfo(dtype).eps)
    require(alike, codec, spec, f"payloads summed as {dtype} do not decode to the sum")
