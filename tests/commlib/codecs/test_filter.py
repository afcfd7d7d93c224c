"""Chains of filters: what goes in comes out, and what is no content goes neither in nor out."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from commlib.codecs.filter import Chain, Content, Filter, MissingKeys, chain, content_fault
from commlib.compressors.filters.fixed_float import FixedFloat
from commlib.compressors.filters.key_cache import KeyCache
from commlib.compressors.filters.lossless import Lossless
from commlib.compressors.filters.random_skip import RandomSkip
from commlib.compressors.filters.significance import Significance
from commlib.errors import ProtocolError
from commlib.testing.filters import damages

DROPPING = [Significance(0.5), Significance(2.0, decay=True), RandomSkip(), RandomSkip(0.3, ef=True)]


@st.composite
def chains(draw: st.DrawFn, dropping: list[Filter] | None = None) -> Chain:
    """Any of the built-in ones in an order that makes sense."""
    first = draw(st.permutations(DROPPING if dropping is None else dropping))
    first = [f for i, f in enumerate(first) if f.name not in {g.name for g in first[:i]}]
    second: list[Filter] = [KeyCache(draw(st.integers(1, 4))), FixedFloat(draw(st.integers(1, 4)))]
    if draw(st.booleans()):
        second.reverse()
    parts = [*first, *second, Lossless(draw(st.integers(1, 5)))]
    return Chain([f for f in parts if draw(st.booleans())])


@st.composite
def messages(draw: st.DrawFn) -> tuple[int, list[Content]]:
    """A size and a few contents for so many keys; lists of keys come again."""
    size = draw(st.sampled_from([0, 1, 5, 64, 1500]))
    made = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    lists: list[Tensor | None] = [(torch.rand(size, generator=made) < p).nonzero().view(-1) for p in (0.1, 0.5, 1, 0)]
    each = draw(st.lists(st.sampled_from([None, *lists]), min_size=1, max_size=8))
    scale = draw(st.sampled_from([0.0, 1e-3, 1.0, 1e6]))
    return size, [
        Content(keys, torch.randn(size if keys is None else len(keys), generator=made) * scale) for keys in each
    ]


def exactly(a: Content, b: Content) -> bool:
    if a.keys is None or b.keys is None:
        return a.keys is b.keys and torch.equal(a.values, b.values)
    return torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)


def dense(content: Content, size: int) -> Tensor:
    out = torch.zeros(size).double()
    out[torch.arange(size) if content.keys is None else content.keys] = content.values.double()
    return out


# -- what comes out ---------------------------------------------------------------------------------


@given(chains(dropping=[]), messages())
def test_chains_that_drop_nothing_bring_back_keys_exactly_and_values_to_a_bin(
    chained: Chain, sent: tuple[int, list[Content]]
) -> None:
    size, contents = sent
    sender, receiver = chained.sender(size, 3), chained.receiver(size)
    fixed = [f for f in chained.filters if isinstance(f, FixedFloat)]
    for content in contents:
        came = receiver.decode(sender.encode(content))
        if fixed and content.values.numel():
            bin_ = (float(content.values.max()) - float(content.values.min())) / fixed[0].top
            error = (came.values.double() - content.values.double()).abs().max()
            assert error <= bin_ + 2**-24 * float(content.values.abs().max())
            came = dataclasses.replace(came, values=content.values)
        assert exactly(came, content)
        assert came.notes == ()


@given(chains(), messages())
def test_what_follows_the_dropping_filters_changes_nothing_but_the_rounding(
    chained: Chain, sent: tuple[int, list[Content]]
) -> None:
    size, contents = sent
    exact = Chain([f for f in chained.filters if not isinstance(f, FixedFloat)])
    alone = Chain([f for f in chained.filters if type(f) in (Significance, RandomSkip)]).sender(size, 3)
    sender, receiver = exact.sender(size, 3), exact.receiver(size)
    for content in contents:
        kept = alone.encode(content)
        assert content_fault(kept, size) is None
        assert exactly(receiver.decode(sender.encode(content)), kept)


@given(st.sampled_from([d for d in DROPPING if d != RandomSkip()]), st.booleans(), messages())
def test_what_was_decoded_and_the_residual_of_a_chain_are_what_was_given(
    last: Filter, two: bool, sent: tuple[int, list[Content]]
) -> None:
    size, contents = sent
    first: list[Filter] = [Significance(0.7)] if two and last.name != "significance" else []
    chained = Chain([*first, last, KeyCache(2), Lossless()])
    sender, receiver = chained.sender(size, 1), chained.receiver(size)
    given_, came = torch.zeros(size).double(), torch.zeros(size).double()
    for content in contents:
        given_ += dense(content, size)
        came += dense(receiver.decode(sender.encode(content)), size)
    owed = sender.residual()
    assert owed is not None
    scale = 1.0 + max((float(c.values.abs().max()) for c in contents if c.values.numel()), default=0.0)
    assert torch.allclose(came + owed, given_, rtol=0, atol=1e-5 * scale)


@given(chains(), messages())
def test_the_same_seed_gives_the_same_bytes(chained: Chain, sent: tuple[int, list[Content]]) -> None:
    size, contents = sent
    runs = [[s.encode(c) for c in contents] for s in (chained.sender(size, 9), chained.sender(size, 9))]
    for one, other in zip(*runs, strict=True):
        assert exactly(one, other)
        assert one.notes == other.notes


@given(messages())
def test_messages_to_two_peers_do_not_mix(sent: tuple[int, list[Content]]) -> None:
    size, contents = sent
    chained = chain("significance:threshold=0.5 + random_skip:ef=on + key_cache + fixed_float + lossless")
    alone, mixed, other = (chained.sender(size, seed) for seed in (1, 1, 2))
    expected = [alone.encode(content) for content in contents]
    for i, content in enumerate(contents):
        other.encode(contents[-1 - i])
        assert exactly(mixed.encode(content), expected[i])


def test_filters_of_a_chain_draw_different_numbers() -> None:
    """Were they the same, the first value of a message would be kept only where it is rounded up."""
    chained = Chain([RandomSkip(0.5, ef=True), FixedFloat(1)])
    x = torch.tensor([127.5 / 254, 0.0, 1.0])  # the first is in the middle of a bin
    messages = [chained.sender(3, seed).encode(Content(None, x)) for seed in range(1000)]
    firsts = [int(m.values[0]) for m in messages if m.keys is None]  # all three were kept
    assert abs(sum(code == 128 for code in firsts) / len(firsts) - 0.5) < 6 * 0.5 / math.sqrt(len(firsts))


def test_a_chain_of_none_passes_everything() -> None:
    none = chain("none")
    assert none == Chain()
    assert str(none) == "none"
    content = Content(torch.tensor([1, 4]), torch.tensor([1.0, math.nan]))
    assert none.sender(5, 0).encode(content) is content
    assert none.receiver(5).decode(content) is content


# -- what is refused --------------------------------------------------------------------------------

BAD = [
    (Content(None, torch.zeros(4)), "4 values without keys, 5 are due"),
    (Content(None, torch.zeros(5, dtype=torch.float64)), "float64"),
    (Content(None, torch.zeros(5, 1)), r"one row of (torch\.)?float32"),
    (Content(None, torch.zeros(5, dtype=torch.uint8)), "float32"),
    (Content(torch.tensor([0, 1]), torch.zeros(3)), "2 keys for 3 values"),
    (Content(torch.tensor([0, 1], dtype=torch.int32), torch.zeros(2)), r"one row of (torch\.)?int64"),
    (Content(torch.tensor(1), torch.zeros(1)), r"one row of (torch\.)?int64"),
    (Content(torch.tensor([1, 0]), torch.zeros(2)), "keys are not ascending"),
    (Content(torch.tensor([1, 1]), torch.zeros(2)), "keys are not ascending"),
    (Content(torch.tensor([-1, 1]), torch.zeros(2)), r"key -1 is not in \[0, 5\)"),
    (Content(torch.tensor([1, 5]), torch.zeros(2)), r"key 5 is not in \[0, 5\)"),
]


@pytest.mark.parametrize(("content", "why"), BAD)
def test_content_that_is_none_is_the_callers_mistake_when_sent_and_the_peers_when_received(
    content: Content, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        Chain().sender(5, 0).encode(content)
    with pytest.raises(ProtocolError, match=why):
        Chain().receiver(5).decode(content)


def test_a_message_with_too_few_or_too_many_notes_is_refused() -> None:
    two = Chain([KeyCache(), FixedFloat()])
    coded = two.sender(2, 0).encode(Content(None, torch.ones(2)))
    for notes in ((), coded.notes[:1], (*coded.notes, None)):
        with pytest.raises(ProtocolError, match=rf"{len(notes)} notes, key_cache\+fixed_float leaves 2"):
            two.receiver(2).decode(dataclasses.replace(coded, notes=notes))
    with pytest.raises(ValueError, match="it has notes already"):
        two.sender(2, 0).encode(coded)


@pytest.mark.parametrize("spec", ["significance:threshold=0", "random_skip:ef=on", "random_skip", "fixed_float"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_refused_and_changes_nothing(spec: str, bad: float) -> None:
    chained = chain(spec + "+lossless")
    sender, untouched = chained.sender(3, 0), chained.sender(3, 0)
    with pytest.raises(ValueError, match=f"{spec.partition(':')[0]}: a value is not finite"):
        sender.encode(Content(None, torch.tensor([1.0, bad, 2.0])))
    content = Content(None, torch.tensor([0.1, 0.2, 0.3]))
    assert exactly(sender.encode(content), untouched.encode(content))


@given(chains(), st.integers(0, 10**6), st.data())
def test_damaged_messages_of_any_chain_are_refused_or_decode_to_sound_content(
    chained: Chain, seed: int, data: st.DataObject
) -> None:
    size = 40
    sender, receiver = chained.sender(size, seed), chained.receiver(size)
    made = torch.Generator().manual_seed(seed)
    sent = [sender.encode(Content(k, torch.randn(40, generator=made))) for k in (None, torch.arange(40))]
    bad = data.draw(st.sampled_from(list(damages(data.draw(st.sampled_from(sent)), sent, seed))))
    if chained.filters and bad.notes:  # any note, not only the last one
        notes = list(bad.notes)
        notes[data.draw(st.integers(0, len(notes) - 1))] = data.draw(notes_of_anybody)
        bad = dataclasses.replace(bad, notes=tuple(notes))
    try:
        came = receiver.decode(bad)
    except ProtocolError:
        return
    assert content_fault(came, size) is None


notes_of_anybody = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(), st.binary()),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)


def test_missing_keys_are_a_protocol_error_that_says_which() -> None:
    error = MissingKeys(b"\x01\x02")
    assert isinstance(error, ProtocolError)
    assert (error.signature, "0102" in str(error)) == (b"\x01\x02", True)
