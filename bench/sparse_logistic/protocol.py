"""Keys and values between two ranks, through filters, as frames of an endpoint.

::

    part 0    msgpack [number …, [[note …], form of the keys, form of the values] …]
    part 1 …  of each content its keys, if it has any of its own, and its values: raw bytes

A form is 0: absent, 1: numbers (int64 keys, float32 values), 2: bytes of a filter, 3 (of keys): those of the content
before, which are sent once. Contents of a message are numbered, and those of one number go through one chain, which has
its memory for each peer and direction; an empty content is not sent.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack
import torch
from torch import Tensor

from commlib.codecs.filter import Chain, Content, MissingKeys
from commlib.errors import ProtocolError
from commlib.messaging.endpoint import Endpoint
from commlib.messaging.frame import Buffer, Frame, from_buffer, to_buffer

CHANNELS = 2


class Kind(enum.IntEnum):
    """What a message is, in its frame's flags; its clock is the task's number, or the pass's."""

    PUSH = 1  # worker → server: of a block's keys the gradient, then the curvature
    PULL = 2  # server → worker: keys whose weight is 0, then those with another; they are the block's active keys
    REPORT = 3  # after a pass, to the server that leads: loss; or penalty, largest violation, active and not-0 weights
    VERDICT = 4  # of that server: stop, reactivate, theta
    ASK = 5  # a signature and a channel: which keys are that?
    KEYS = 6  # they are these


class Message(NamedTuple):
    """What came: contents as they were given to :meth:`Line.send`, None for an empty one."""

    kind: Kind
    clock: int
    numbers: list[Any]
    contents: list[Content | None]

    def content(self, channel: int) -> Content:
        """Single content; an empty one has no keys and no values."""
        found = self.contents[channel] if channel < len(self.contents) else None
        return found or Content(torch.empty(0, dtype=torch.int64), torch.empty(0))


class Line:
    """Line to and from one peer, for one thread.

    Args:
        endpoint: of this rank, connected to the peer.
        peer: its rank.
        size: keys are in [0, size) on both sides.
        filters: of both directions.
        seed: of what the filters draw, another for each line and direction.
        reading: of what comes, if that is another chain.
    """

    def __init__(
        self, endpoint: Endpoint, peer: int, size: int, filters: Chain, seed: int, *, reading: Chain | None = None
    ) -> None:
        self.peer, self.asked = peer, 0
        """How many times keys had to be asked for."""
        self._endpoint = endpoint
        self._senders = [filters.sender(size, CHANNELS * seed + c) for c in range(CHANNELS)]
        self._receivers = [(reading or filters).receiver(size) for _ in range(CHANNELS)]
        self._waiting: collections.deque[Frame] = collections.deque()  # the first one's keys are asked for

    def send(
        self,
        kind: Kind,
        clock: int,
        contents: Sequence[Content] = (),
        numbers: Sequence[object] = (),
    ) -> None:
        """Sends a message. ValueError: the filters do not take its values; PeerLost: the peer takes nothing."""
        heads: list[object] = []
        parts: list[Buffer] = []
        before: Tensor | None = None
        for channel, content in enumerate(contents):
            if not content.values.numel():
                heads.append(None)
                continue
            coded = self._senders[channel].encode(content)
            form = _form(coded.keys, torch.int64)
            if before is not None and coded.keys is not None and _same(coded.keys, before):
                form = 3
            elif coded.keys is not None:
                parts.append(_bytes(coded.keys))
            before = coded.keys
            parts.append(_bytes(coded.values))
            heads.append([list(coded.notes), form, _form(coded.values, torch.float32)])
        head = msgpack.packb([list(numbers), heads])
        self._endpoint.send(self.peer, clock=clock, flags=int(kind), parts=(head, *parts))

    def take(self, frame: Frame) -> list[Message]:
        """What a frame of this peer completes: mostly one message; none while keys must be asked for.

        Raises:
            ProtocolError: it is no message; or neither side knows its keys any more.
        """
        kind = _kind(frame)
        if kind is Kind.ASK:
            self._answer(frame)
            return []
        if kind is Kind.KEYS:
            self._learn(frame)
        else:
            self._waiting.append(frame)
            if len(self._waiting) > 1:
                return []
        came = []
        while self._waiting:
            try:
                came.append(self._read(self._waiting[0]))
            except _Missing as e:
                self.asked += 1
                self.send(Kind.ASK, frame.clock, numbers=[e.channel, e.signature])
                break
            self._waiting.popleft()
        return came

    def _answer(self, frame: Frame) -> None:
        (channel, signature), _ = _head(frame, 2)
        if type(channel) is not int or not 0 <= channel < CHANNELS or type(signature) is not bytes:
            raise ProtocolError(f"rank {self.peer} asks for keys without a channel and a signature")
        keys = self._senders[channel].keys_of(signature)
        if keys is None:
            raise ProtocolError(
                f"rank {self.peer} asks for keys that rank {self._endpoint.rank} has forgotten itself: "
                "give key_cache more entries, as key_cache:entries=256"
            )
        self.send(Kind.KEYS, frame.clock, numbers=[channel, signature, keys.numpy().tobytes()])

    def _learn(self, frame: Frame) -> None:
        (channel, signature, raw), _ = _head(frame, 3)
        if type(raw) is not bytes or type(signature) is not bytes or channel not in range(CHANNELS) or len(raw) % 8:
            raise ProtocolError(f"rank {self.peer} answers with what are no keys")
        self._receivers[channel].learn(signature, _tensor(raw, torch.int64))

    def _read(self, frame: Frame) -> Message:
        numbers, heads = _head(frame)
        parts = collections.deque(frame.parts[1:])
        contents: list[Content | None] = []
        before: Tensor | None = None
        if len(heads) > CHANNELS:
            raise ProtocolError(f"a message of {len(heads)} contents, {CHANNELS} can be")
        for channel, head in enumerate(heads):
            match head:
                case None:
                    contents.append(None)
                    continue
                case [[*notes], int(keys_form), int(values_form)]:
                    pass
                case _:
                    raise ProtocolError(f"rank {self.peer} sent a content without notes and forms")
            keys = before if keys_form == 3 else _part(parts, keys_form, torch.int64)
            values = _part(parts, values_form, torch.float32)
            if values is None or keys is None:
                raise ProtocolError(f"rank {self.peer} sent a content without keys or values")
            before = keys
            try:
                contents.append(self._receivers[channel].decode(Content(keys, values, tuple(notes))))
            except MissingKeys as e:
                raise _Missing(channel, e.signature) from e
        if parts:
            raise ProtocolError(f"rank {self.peer} sent {len(parts)} parts that no content needs")
        return Message(_kind(frame), frame.clock, numbers, contents)


class _Missing(Exception):
    def __init__(self, channel: int, signature: bytes) -> None:
        super().__init__(channel, signature)
        self.channel, self.signature = channel, signature


def _kind(frame: Frame) -> Kind:
    try:
        return Kind(frame.flags)
    except ValueError:
        raise ProtocolError(f"rank {frame.sender} sent a message of unknown kind {frame.flags}") from None


def _head(frame: Frame, numbers: int | None = None) -> tuple[list[Any], list[Any]]:
    try:
        found = msgpack.unpackb(frame.parts[0])
    except Exception as e:  # msgpack raises ValueError, its own and others; of bytes all mean the same
        raise ProtocolError(f"rank {frame.sender} sent a message that cannot be read ({type(e).__name__})") from None
    match found:
        case [[*given], [*heads]] if numbers is None or len(given) == numbers:
            return given, heads
    raise ProtocolError(f"rank {frame.sender} sent a message whose head is not numbers and contents")


def _form(part: Tensor | None, number: torch.dtype) -> int:
    return 0 if part is None else 1 if part.dtype == number else 2


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def _bytes(part: Tensor) -> Buffer:
    return to_buffer(part.contiguous()) if part.numel() else b""


def _part(parts: collections.deque[Buffer], form: int, number: torch.dtype) -> Tensor | None:
    if form == 0:
        return None
    if form not in (1, 2) or not parts:
        raise ProtocolError("a content whose form is unknown, or whose part is missing")
    return _tensor(parts.popleft(), number if form == 1 else torch.uint8)


def _tensor(raw: Buffer, dtype: torch.dtype) -> Tensor:
    n = memoryview(raw).nbytes
    if n % dtype.itemsize:
        raise ProtocolError(f"{n} bytes are no row of {dtype}")
    return from_buffer(raw, dtype) if n else torch.empty(0, dtype=dtype)
