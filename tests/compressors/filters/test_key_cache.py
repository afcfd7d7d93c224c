"""Keys go once, are told apart by all they are, and come again if they were forgotten."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from commlib.codecs.filter import Chain, Content, MissingKeys, chain
from commlib.compressors.filters.key_cache import KeyCache, signature_of
from commlib.errors import ProtocolError

SIZE = 1000


def content(keys: Tensor | None) -> Content:
    n = SIZE if keys is None else len(keys)
    return Content(keys, torch.arange(n).float())


def nbytes(message: Content) -> int:
    """Of keys and note."""
    signature = message.notes[-1]
    assert signature is None or isinstance(signature, bytes)
    return (0 if message.keys is None else message.keys.numel() * message.keys.itemsize) + len(signature or b"")


def test_keys_that_were_sent_before_cost_24_bytes_and_come_back() -> None:
    sender, receiver = Chain([KeyCache()]).sender(SIZE, 0), Chain([KeyCache()]).receiver(SIZE)
    keys = torch.arange(0, SIZE, 3)
    costs = []
    for _ in range(3):
        message = sender.encode(content(keys.clone()))
        costs.append(nbytes(message))
        came = receiver.decode(message)
        assert came.keys is not None
        assert torch.equal(came.keys, keys)
        assert torch.equal(came.values, torch.arange(len(keys)).float())
    assert costs == [8 * len(keys) + 24, 24, 24]


def test_no_keys_pass_as_they_are() -> None:
    message = Chain([KeyCache()]).sender(SIZE, 0).encode(content(None))
    assert (message.keys, message.notes) == (None, (None,))
    assert Chain([KeyCache()]).receiver(SIZE).decode(message).keys is None


def test_lists_of_one_length_that_share_their_first_2048_bytes_are_told_apart() -> None:
    sender, receiver = Chain([KeyCache()]).sender(SIZE, 0), Chain([KeyCache()]).receiver(SIZE)
    first = torch.arange(300)
    second = first.clone()
    second[-1] += 1
    assert torch.equal(first[:256], second[:256])
    for keys in (first, second, first, second):
        came = receiver.decode(sender.encode(content(keys)))
        assert came.keys is not None
        assert torch.equal(came.keys, keys)


@given(st.integers(1, 4), st.lists(st.integers(0, 5), max_size=40))
def test_both_sides_forget_the_same_list_the_one_used_longest_ago(entries: int, order: list[int]) -> None:
    sender, receiver = Chain([KeyCache(entries)]).sender(SIZE, 0), Chain([KeyCache(entries)]).receiver(SIZE)
    lists = [torch.arange(i, SIZE, 7 + i) for i in range(6)]
    known: OrderedDict[int, None] = OrderedDict()
    for i in order:
        message = sender.encode(content(lists[i]))
        assert message.keys is not None
        assert (message.keys.numel() == 0) == (i in known)
        came = receiver.decode(message)  # never MissingKeys: what is sent without keys is known here too
        assert came.keys is not None
        assert torch.equal(came.keys, lists[i])
        known[i] = None
        known.move_to_end(i)
        if len(known) > entries:
            known.popitem(last=False)


def test_after_a_lost_message_both_sides_come_to_remember_the_same_again() -> None:
    sender, receiver = Chain([KeyCache(2)]).sender(SIZE, 0), Chain([KeyCache(2)]).receiver(SIZE)
    a, lost, c, d = (content(torch.arange(n)) for n in (1, 2, 3, 4))
    for sent in (a, lost, c, a, d, a):  # the receiver knows a when its keys come again: then, too, it was used last
        message = sender.encode(sent)
        if sent is not lost:
            receiver.decode(message)
    assert nbytes(message) == 24


@pytest.mark.parametrize("spec", ["key_cache", "key_cache+fixed_float+lossless", "fixed_float+key_cache"])
def test_a_receiver_that_does_not_know_the_keys_asks_for_them_and_decodes_the_same_message(spec: str) -> None:
    sender, fresh = chain(spec).sender(SIZE, 0), chain(spec).receiver(SIZE)
    keys = torch.arange(0, SIZE, 2)
    sender.encode(content(keys))  # lost, or the receiver has started anew
    message = sender.encode(content(keys))
    with pytest.raises(MissingKeys) as e:
        fresh.decode(message)
    asked = sender.keys_of(e.value.signature)
    assert asked is not None
    assert fresh.learn(e.value.signature, asked)
    came = fresh.decode(message)
    assert came.keys is not None
    assert torch.equal(came.keys, keys)
    assert torch.allclose(came.values, torch.arange(len(keys)).float(), rtol=0, atol=1e-4)


def test_keys_that_the_sender_has_forgotten_too_are_none() -> None:
    sender = Chain([KeyCache(1)]).sender(SIZE, 0)
    first, second = torch.arange(5), torch.arange(6)
    sender.encode(content(first))
    assert sender.keys_of(signature_of(first)) is not None
    sender.encode(content(second))
    assert sender.keys_of(signature_of(first)) is None
    assert sender.keys_of(b"") is None


def test_a_chain_without_a_cache_knows_and_learns_no_keys() -> None:
    keys = torch.arange(3)
    assert chain("fixed_float").sender(SIZE, 0).keys_of(signature_of(keys)) is None
    assert not chain("fixed_float").receiver(SIZE).learn(signature_of(keys), keys)


def test_a_list_written_to_after_it_was_sent_or_received_is_remembered_as_it_was() -> None:
    sender, receiver = Chain([KeyCache()]).sender(SIZE, 0), Chain([KeyCache()]).receiver(SIZE)
    keys = torch.arange(5)
    receiver.decode(sender.encode(content(keys)))  # the message shares its memory
    keys += 7
    again = sender.encode(content(torch.arange(5)))
    came = receiver.decode(again)
    assert came.keys is not None
    assert came.keys.tolist() == [0, 1, 2, 3, 4]
    asked = sender.keys_of(signature_of(torch.arange(5)))
    assert asked is not None
    assert asked.tolist() == [0, 1, 2, 3, 4]


def test_what_one_peer_was_sent_another_does_not_know() -> None:
    to_one, to_other = (Chain([KeyCache()]).sender(SIZE, 0) for _ in range(2))
    at_one, at_other = (Chain([KeyCache()]).receiver(SIZE) for _ in range(2))
    keys = torch.arange(9)
    at_one.decode(to_one.encode(content(keys)))
    hit = to_one.encode(content(keys))
    assert nbytes(to_other.encode(content(keys))) == 8 * 9 + 24
    with pytest.raises(MissingKeys):
        at_other.decode(hit)


@pytest.mark.parametrize("note", [None, 3, "x" * 24, b"", bytes(23), bytes(25), [bytes(24)]])
def test_a_signature_that_is_none_is_refused(note: object) -> None:
    for keys in (torch.arange(3), torch.empty(0, dtype=torch.uint8)):
        with pytest.raises(ProtocolError, match=r"key_cache: .*signature") as e:
            Chain([KeyCache()]).receiver(SIZE).decode(Content(keys, torch.zeros(3), (note,)))
        assert not isinstance(e.value, MissingKeys)


def test_keys_that_are_not_those_of_their_signature_are_refused_and_not_remembered() -> None:
    keys, others = torch.arange(3), torch.arange(1, 4)
    receiver = Chain([KeyCache()]).receiver(SIZE)
    message = Content(others, torch.zeros(3), (signature_of(keys),))
    with pytest.raises(ProtocolError, match="keys are not those of their signature"):
        receiver.decode(message)
    with pytest.raises(ProtocolError, match="keys are not those of their signature"):
        receiver.learn(signature_of(keys), others)
    for signature in (signature_of(keys), signature_of(others)):
        with pytest.raises(MissingKeys):
            receiver.decode(Content(torch.empty(0, dtype=torch.uint8), torch.zeros(3), (signature,)))


def test_keys_that_are_no_keys_are_not_learnt() -> None:
    receiver = Chain([KeyCache()]).receiver(SIZE)
    wrong = [torch.tensor([3, 2]), torch.tensor([-1]), torch.tensor([SIZE]), torch.zeros(1, 1).long(), torch.ones(2)]
    for keys in wrong:
        with pytest.raises(ProtocolError, match="key"):
            receiver.learn(signature_of(keys), keys)


def test_bytes_in_place_of_keys_and_more_keys_than_there_are_are_refused_without_asking() -> None:
    message = Chain([KeyCache()]).sender(SIZE, 0).encode(content(torch.arange(3)))
    receiver = Chain([KeyCache()]).receiver(SIZE)
    for signature, instead in ((message.notes[0], 1), ((SIZE + 1).to_bytes(8, "little") + bytes(16), 0)):
        bad = dataclasses.replace(message, keys=torch.zeros(instead, dtype=torch.uint8), notes=(signature,))
        with pytest.raises(ProtocolError, match="bytes instead of") as e:
            receiver.decode(bad)
        assert not isinstance(e.value, MissingKeys)
    with pytest.raises(ProtocolError, match="a signature without keys"):
        receiver.decode(dataclasses.replace(message, keys=None))


def test_less_than_one_entry_is_refused() -> None:
    with pytest.raises(ValueError, match="entries must be at least 1"):
        KeyCache(0)
