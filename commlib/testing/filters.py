"""The contract of filters as tests that anyone can run on theirs; part of :mod:`commlib.testing`.

``check_filter("mine:level=3")``, or with a filter itself, raises AssertionError that says which promise was broken,
unless (each has its own function):

======================  =============================================================================
``check_config``        frozen and hashable, and made again by its spec string
``check_notes``         one note, which msgpack can carry; those below it stay
``check_round_trip``    sound content comes out, of keys that went in; bit for bit if ``lossless``
``check_determinism``   the same seed and contents give the same; what is given is not written to
``check_peers``         what is sent to one peer, or comes from it, changes nothing for another
``check_again``         decoded twice it is the same
``check_conservation``  Σ decoded + residual = Σ given, of a filter that has a residual
``check_unbiased``      E[decoded] = given, if ``unbiased``, within six standard errors
``check_damage``        whatever comes gives ProtocolError or sound content
======================  =============================================================================

Needs torch and msgpack only. Everything follows from ``seed``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import msgpack
import torch
from torch import Tensor

from commlib.codecs.filter import Chain, Content, Filter, Receiving, Sending, content_fault, filters, make_filter
from commlib.errors import ProtocolError
from commlib.testing.assertions import raises, setting, standard_error

_SIZES = (0, 1, 7, 300, 3000)
_MESSAGES, _DRAWS, _SIGMAS = 6, 400, 6.0
_JUNK: tuple[object, ...] = (
    *(None, True, 0, -1, 3, 2**40, 2**63 - 1, -(2**63), 0.0, math.nan, math.inf, -1e300, "", "float32", b"", bytes(24)),
    *([], [None], [None, None], [0.0, 1.0], [1.0, 0.0], [math.nan] * 2, [-1e300, 1e300], [[]], [[], {}], [b"x", "y"]),
    *([k, ["float32", n]] for k in (None, ["int64", 2**40], ["int64", 5]) for n in (2**40, 2**62, 3, 0, -1, 1.5)),
)


def check_filter(one: Filter | str, *, seed: int = 0) -> None:
    """Check every promise, for several sizes.

    Raises:
        AssertionError: one is broken.
    """
    one = make_filter(one) if isinstance(one, str) else one
    check_config(one)
    for size in _SIZES:
        check_notes(one, size, seed=seed)
        check_round_trip(one, size, seed=seed)
        check_determinism(one, size, seed=seed)
        check_peers(one, size, seed=seed)
        check_again(one, size, seed=seed)
        check_conservation(one, size, seed=seed)
    check_unbiased(one, 64, seed=seed)
    for size in (1, 7, 300):
        check_damage(one, size, seed=seed)


def check_config(one: Filter) -> None:
    """Frozen, hashable, and equal to what its spec string makes, if it is installed."""
    _require(dataclasses.is_dataclass(one), one, "is not a dataclass")
    frozen = raises(dataclasses.FrozenInstanceError, setattr, one, "name", one.name)
    _require(frozen, one, "is not frozen: an attribute could be set")
    _require(not raises(TypeError, hash, one), one, "is not hashable")
    parts = one.reads | one.codes
    _require(parts <= {"keys", "values"}, one, f"reads and codes may have keys and values, not {sorted(parts)}")
    entry = filters().get(one.name)
    if entry is not None and entry.load() is type(one):
        again = make_filter(str(one))
        _require(again == one, one, f"the spec string {str(one)!r} makes {again!r}, not {one!r}")


def check_notes(one: Filter, size: int, *, seed: int = 0) -> None:
    """Check that a filter adds one note and takes that one off; msgpack brings the note back as it was."""
    sender, receiver = one.sender(size, seed), one.receiver(size)
    _show(sender, size, seed)
    for given in contents(size, seed):
        coded = sender.encode(dataclasses.replace(given, notes=("below",)))
        _require(len(coded.notes) == 2 and coded.notes[0] == "below", one, f"leaves the notes {coded.notes}")
        came = _packed(coded).notes
        _require(came == coded.notes, one, f"through msgpack its note {coded.notes[1]!r} becomes {came[1]!r}")
        left = receiver.decode(coded).notes
        _require(left == ("below",), one, f"decoding leaves the notes {left}")


def check_round_trip(one: Filter, size: int, *, seed: int = 0) -> None:
    """Round trip: content for ``size`` keys, none that was not given; the very same if lossless."""
    sender, receiver = _sender(one, size, seed), one.receiver(size)
    for given in contents(size, seed):
        came = receiver.decode(_packed(sender.encode(given)))
        wrong = content_fault(came, size)
        _require(wrong is None, one, f"decodes to no content for {size} keys: {wrong}")
        known = set(_keys(given, size).tolist())
        _require(known >= set(_keys(came, size).tolist()), one, "decodes keys that were not given")
        if one.lossless:
            _require(_same(came, given), one, f"is lossless, but content for {size} keys comes as another")


def check_determinism(one: Filter, size: int, *, seed: int = 0) -> None:
    """The same bytes come again from the same seed, whatever torch's global generator and default dtype are; nothing
    that is given is written to."""
    runs = []
    for noise in range(3):
        with setting(noise):
            sender, receiver = _sender(one, size, seed), one.receiver(size)
            given, untouched = contents(size, seed), contents(size, seed)
            runs.append([sender.encode(g) for g in given])
            copies = [_packed(coded) for coded in runs[-1]]
            for coded in runs[-1]:
                receiver.decode(coded)
            kept = all(map(_same, given, untouched)) and all(map(_same, runs[-1], copies))
            _require(kept, one, "writes to a content that it was given")
    alike = all(
        all(map(_same, runs[0], run)) and [c.notes for c in runs[0]] == [c.notes for c in run] for run in runs[1:]
    )
    _require(alike, one, "the same seed and contents gave different bytes")


def check_peers(one: Filter, size: int, *, seed: int = 0) -> None:
    """Messages to and from two peers, taking turns, are what they are without the other."""
    sender, receiver = _sender(one, size, seed), one.receiver(size)
    alone = [(coded := sender.encode(given), receiver.decode(coded)) for given in contents(size, seed)]
    senders, receivers = [_sender(one, size, seed + p) for p in range(2)], [one.receiver(size) for _ in range(2)]
    turns = zip(alone, contents(size, seed), contents(size, seed + 1), strict=True)
    for (message, decoded), mine, theirs in turns:
        receivers[1].decode(senders[1].encode(theirs))
        coded = senders[0].encode(mine)
        alike = _same(coded, message) and coded.notes == message.notes
        _require(alike, one, "a message to one peer changes with what another was sent")
        _require(_same(receivers[0].decode(coded), decoded), one, "a message is decoded by what came from another peer")


def check_again(one: Filter, size: int, *, seed: int = 0) -> None:
    """Decoding changes nothing that decoding the same once more would see."""
    sender, receiver = _sender(one, size, seed), one.receiver(size)
    for given in contents(size, seed):
        coded = sender.encode(given)
        _require(_same(receiver.decode(coded), receiver.decode(coded)), one, "decoded twice, content is another")


def check_conservation(one: Filter, size: int, *, seed: int = 0) -> None:
    """Nothing is lost by a filter that says what it owes; asked of no other."""
    sender, receiver = _sender(one, size, seed), one.receiver(size)
    total, scale = torch.zeros(size, dtype=torch.float64), 1.0
    for given in contents(size, seed):
        came = receiver.decode(sender.encode(given))
        total += _dense(given, size) - _dense(came, size)
        scale = max(scale, float(given.values.abs().sum()))
        owed = sender.residual()
        if owed is None:
            return
        sound = (owed.shape, owed.dtype) == ((size,), torch.float32)
        _require(sound, one, f"its residual is {tuple(owed.shape)} of {owed.dtype}")
        _require(bool(((owed - total).abs() <= 1e-5 * scale).all()), one, "decoded + residual is not what was given")


def check_unbiased(one: Filter, size: int, *, seed: int = 0) -> None:
    """The mean error over seeds of the first message, seen from a few sides, is zero within six standard errors."""
    if not one.unbiased:
        return
    x = _normal(size, seed)
    coin = torch.where(_normal(size, seed + 1) > 0, torch.ones_like(x), -1.0)
    directions = torch.stack([x, x.sign(), torch.ones_like(x), coin, x**3]).double()
    errors = torch.zeros(_DRAWS, size, dtype=torch.float64)
    for s in range(_DRAWS):
        coded = _sender(one, size, seed + s).encode(Content(None, x))
        errors[s] = _dense(one.receiver(size).decode(coded), size) - x
    for seen in (errors @ directions.T).T:
        limit = _SIGMAS * standard_error(seen) + 1e-5 * float(x.double().square().sum())
        found = float(seen.mean())
        _require(abs(found) <= limit, one, f"is unbiased, but the mean error is {found:g}, over {limit:g}")


def check_damage(one: Filter, size: int, *, seed: int = 0) -> None:
    """Notes and parts that are cut, longer, of another dtype, changed or swapped: ProtocolError, or sound content."""
    sender = _sender(one, size, seed)
    sent = [sender.encode(given) for given in contents(size, seed)]
    for i, coded in enumerate(sent):
        receiver = Chain([one]).receiver(size)
        for before in sent[:i]:  # so that it knows what it would know
            receiver.decode(before)
        for damaged in damages(coded, sent, seed):
            _check_refused(one, receiver, damaged, size)


def _check_refused(one: Filter, receiver: Receiving, damaged: Content, size: int) -> None:
    try:
        wrong = content_fault(receiver.decode(damaged), size)
    except ProtocolError:
        return
    except Exception as e:
        raise AssertionError(f"{one}: {damaged} raises {type(e).__name__}, not ProtocolError: {e}") from e
    if wrong is not None:  # not _require: to write tensors takes long
        raise AssertionError(f"{one}: {damaged} decodes to no content: {wrong}")


def contents(size: int, seed: int) -> list[Content]:
    """Messages for ``size`` keys: without keys, with some, with none at all, and with keys that came before."""
    generator = torch.Generator().manual_seed(seed)
    some = [(torch.rand(size, dtype=torch.float32, generator=generator) < 0.5).nonzero().view(-1) for _ in range(2)]
    lists = [None, some[0], torch.arange(size), some[1], some[0].clone(), some[0][:0], None, some[1].clone()]
    made = [Content(k, _normal(size if k is None else len(k), seed + i)) for i, k in enumerate(lists)]
    return [
        *made,
        Content(some[0].clone(), torch.zeros(len(some[0]), dtype=torch.float32)),
        Content(None, torch.full((size,), -2.5, dtype=torch.float32)),
    ]


def damages(coded: Content, others: list[Content], seed: int) -> Iterator[Content]:
    """The content, damaged in many ways; ``others``: messages of the same sender whose parts may take its place."""
    for junk in _JUNK:
        yield dataclasses.replace(coded, notes=(*coded.notes[:-1], junk))
    yield dataclasses.replace(coded, notes=())
    yield dataclasses.replace(coded, notes=(None, *coded.notes))
    for other in others:
        yield dataclasses.replace(coded, notes=other.notes)
        yield dataclasses.replace(coded, keys=other.keys)
        yield dataclasses.replace(coded, values=other.values)
    for values in _damaged(coded.values, seed):
        yield dataclasses.replace(coded, values=values)
    for keys in _damaged(torch.arange(3) if coded.keys is None else coded.keys, seed):
        yield dataclasses.replace(coded, keys=keys)


def _damaged(part: Tensor, seed: int) -> Iterator[Tensor]:
    raw = part.contiguous().view(torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    yield from (part[:-1], part[1:], part[:0], part[::2], part[:1].repeat(2), torch.cat([part, part]))
    yield from (part.flip(0), part + 1, -part, part.double(), part.int(), raw)
    yield from (part.view(1, -1), torch.zeros((), dtype=part.dtype))
    for place in torch.randint(max(1, len(raw)), (12,), generator=generator).tolist():
        changed = raw.clone()
        changed[place : place + 1] ^= 1 << place % 8
        yield changed.view(part.dtype)


def _sender(one: Filter, size: int, seed: int) -> Sending:
    sender = Chain([one]).sender(size, seed)
    _show(sender, size, seed)
    return sender


def _show(sender: Sending, size: int, seed: int) -> None:
    """Show it values, half of them 0, for a filter that goes by these."""
    sender.see(_normal(size, seed + 2).clamp_(min=0.0), 0)


def _packed(content: Content) -> Content:
    """A copy, its notes taken through msgpack."""
    keys = None if content.keys is None else content.keys.clone()
    return Content(keys, content.values.clone(), tuple(msgpack.unpackb(msgpack.packb(list(content.notes)))))


def _same(a: Content, b: Content) -> bool:
    """Keys and values are, bit for bit."""
    pairs = ((a.keys, b.keys), (a.values, b.values))
    return all(x is y if x is None or y is None else _bits(x) == _bits(y) for x, y in pairs)


def _bits(part: Tensor) -> tuple[torch.dtype, bytes]:
    return part.dtype, part.contiguous().numpy().tobytes()


def _keys(content: Content, size: int) -> Tensor:
    return torch.arange(size) if content.keys is None else content.keys


def _dense(content: Content, size: int) -> Tensor:
    out = torch.zeros(size, dtype=torch.float64)
    out[_keys(content, size)] = content.values.double()
    return out


def _normal(n: int, seed: int) -> Tensor:
    return torch.randn(n, dtype=torch.float32, generator=torch.Generator().manual_seed(seed))


def _require(held: bool, one: Filter, broken: str) -> None:
    if not held:
        raise AssertionError(f"{one}: {broken}")
