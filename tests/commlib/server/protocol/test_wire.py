"""Messages on the wire: what is sent is what comes, tensors are not copied, and nothing bad is taken for good."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from commlib.errors import ProtocolError
from commlib.messaging.frame import DTYPES
from commlib.server.job.consistency import BSP
from commlib.server.protocol.messages import (
    Adopt,
    Message,
    Pull,
    Push,
)
from commlib.server.protocol.wire import pack, unpack
from commlib.server.shard.chunk_state import ChunkState
from tests.support.message_samples import MESSAGES


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape and _bits(a) == _bits(b)
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(same, a, b))
    if hasattr(a, "__dataclass_fields__"):
        return type(a) is type(b) and same(vars(a), vars(b))
    return bool(a == b)


def _bits(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_message_comes_as_it_was_sent(message: Message) -> None:
    assert same(unpack(pack(message)), [message])
    assert same(unpack([bytearray(part) for part in pack(message)]), [message])


def test_messages_of_one_frame_come_in_their_order() -> None:
    assert same(unpack(pack(*MESSAGES)), MESSAGES)
    assert same(unpack([bytearray(part) for part in pack(*reversed(MESSAGES))]), MESSAGES[::-1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_every_dtype_come_as_they_were(dtype: str) -> None:
    sent = torch.randint(0, 2, (5,)).to(getattr(torch, dtype))
    (came,) = unpack(pack(Push(0, "w", 0, 0, sent)))
    assert isinstance(came, Push)
    assert same(came.gradient, sent)


def test_a_gradient_is_not_copied_on_either_side() -> None:
    sent = torch.zeros(1000)
    parts = pack(Push(0, "w", 0, 0, sent), Pull(0, "w", 0, 1))
    came, _ = unpack(parts)
    assert isinstance(came, Push)
    sent.fill_(3)
    assert isinstance(came.gradient, Tensor)
    assert came.gradient.tolist() == [3.0] * 1000


def test_a_state_that_has_travelled_goes_on_as_the_one_that_stayed() -> None:
    cells = [
        ChunkState(torch.arange(3.0), lambda p: torch.optim.Adam(p, lr=0.1), range(1), BSP().threshold())
        for _ in range(2)
    ]
    cells[0].push(0, 0, torch.ones(3))
    (came,) = unpack(pack(Adopt(0, "w", cells[0].state_dict())))
    assert isinstance(came, Adopt)
    cells[1].load_state_dict(came.state)
    for cell in cells:
        cell.push(0, 1, torch.tensor([1.0, -2.0, 0.5]))
    assert torch.equal(cells[0].values, cells[1].values)


def head(*values: object) -> bytes:
    packed: bytes = msgpack.packb([list(values)])
    return packed


ROW = msgpack.ExtType(1, msgpack.packb(["float32", [2]]))


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([], "in 0 parts"),
        ([b"", b"", b""], "in 3 parts"),
        ([b""], "cannot be read"),
        ([head(0, 1)[:-1]], "cannot be read"),
        ([head()], "of no kind"),
        ([head(14)], "of no kind"),
        ([head(True)], "of no kind"),
        ([msgpack.packb({})], "without messages"),
        ([msgpack.packb([])], "without messages"),
        ([msgpack.packb([1, 2])], "of no kind"),
        ([head(2, 0, "w", 1)], "a Pull of 3 fields, it has 6"),
        ([head(2, 0, "w", -1, 0, None, None)], "a Pull whose worker is not a whole number"),
        ([head(2, 0, "w" * 1025, 1, 0, None, None)], "a Pull whose key is not a text up to 1024"),
        ([head(1, 0, "w", 1, 0, 1)], "a Ack whose refused is not true or false"),
        ([head(0, 0, "w", 1, 0, 1.0, {}, [])], "a Push whose gradient is not a row of values"),
        ([head(0, 0, "w", 1, 0, [1.0], {}, [])], "a Content of 1 fields, it has 3"),
        ([head(0, 0, "w", 1, 0, [None, ROW, 1], {}, []), bytes(8)], "a Content whose notes is not notes"),
        ([head(10, 0, "w", 1, "a")], "a Unknown whose signature is not up to 1024 bytes"),
        ([head(0, 0, "w", 1, 0, ROW, {}, []), bytes(7)], "a tensor of 8 bytes, of which 7 came"),
        ([head(0, 0, "w", 1, 0, ROW, {}, [])], "a tensor of 8 bytes, of which 0 came"),
        ([head(0, 0, "w", 1, 0, ROW, {}, []), bytes(9)], "1 bytes that no tensor needs"),
        ([head(0, 0, "w", 1, 0, msgpack.ExtType(2, b"\x90"))], "cannot be read"),
        ([head(0, 0, "w", 1, 0, msgpack.ExtType(1, msgpack.packb(["float31", [1]]))), b"1"], "dtype or shape is none"),
        ([head(0, 0, "w", 1, 0, msgpack.ExtType(1, msgpack.packb(["int8", [-1]]))), b"1"], "dtype or shape is none"),
        (
            [head(0, 0, "w", 1, 0, msgpack.ExtType(1, msgpack.packb(["int8", [1, 1]])), {}, []), b"1"],
            "not a row of values",
        ),
        (
            [head(3, 0, "w", 1, 4, ROW, {"a": 1}, None, None, 0), bytes(8)],
            "a Values whose included is not a whole number",
        ),
        ([head(4, 0, "w", [1, {}, ROW]), bytes(8)], "a Applied of 3 fields, it has 6"),
        ([head(4, 0, "w", 5)], "a Replicate whose applied is not an update"),
        ([head(5, 0, "w", {1: 1})], "a Adopt whose state is not a map"),
    ],
)
def test_what_is_no_message_is_refused_in_words_that_say_why(parts: list[bytes], said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        unpack(parts)


@given(st.sampled_from(MESSAGES), st.integers(0, 1 << 32))
def test_a_mutated_message_is_a_message_or_a_protocol_error(message: Message, seed: int) -> None:
    rng = random.Random(seed)
    parts = [bytearray(part) for part in pack(message)]
    for _ in range(rng.randint(1, 3)):
        part = rng.choice(parts)
        if part and rng.random() < 0.8:
            part[rng.randrange(len(part))] = rng.randrange(256)
        else:
            del part[rng.randrange(len(part) + 1) :]
    with contextlib.suppress(ProtocolError):
        assert all(isinstance(message, Message) for message in unpack(parts))
