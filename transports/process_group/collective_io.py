"""Input and output of a collective under way: the steps of its schedule as frames of an endpoint.

A Send waits for nobody, as schedules need it: what a peer has no room for waits here, and leaves while this rank waits
for something itself. So a rank that waits for its own messages never keeps others' from leaving, and the argument in
:mod:`commlib.transports.process_group.engine` holds for messages of any size.
"""

from __future__ import annotations

import collections
import time

from torch import Tensor

from commlib.errors import PeerLost, ProtocolError
from commlib.messaging.endpoint import Endpoint, Sent
from commlib.messaging.frame import Buffer, Frame, from_buffer, to_buffer
from commlib.transports.process_group.algorithms.steps import Recv, Send


class Going:
    """Messages of a collective that is under way.

    Args:
        endpoint: of the group.
        what: the call, in words; in every message.
        count: how many calls of the group it makes with those before; in every message.
        end: ``time.monotonic`` of its deadline.
    """

    def __init__(self, endpoint: Endpoint, what: str, count: int, end: float) -> None:
        self._endpoint, self._what, self._count, self._end = endpoint, what, count, end
        self._left: list[Sent] = []
        self._waiting: dict[int, collections.deque[Buffer]] = {}

    def send(self, step: Send) -> None:
        """Send a message at once, or when there is room."""
        buffer = to_buffer(step.tensor)
        if step.to in self._waiting or not self._offer(step.to, buffer):
            self._waiting.setdefault(step.to, collections.deque()).append(buffer)

    def receive(self, step: Recv) -> Tensor:
        """Wait for a message, and return it.

        Raises:
            PeerLost: it does not come in time.
            ProtocolError: it is not of this call, or of another size.
        """
        frame: Frame | None = None
        while frame is None:
            if self._waiting:
                self._leave()
            if self._waiting:
                frame = self._endpoint.await_room(self._room(), or_of=step.source, timeout=self._seconds())
            else:
                frame = self._endpoint.recv(step.source, timeout=self._seconds())
        return self._values(frame, step)

    def free(self) -> None:
        """Once all that was sent may be written to.

        Raises:
            PeerLost: a rank does not take it in time.
        """
        while self._waiting:
            self._leave()
            if self._waiting:
                self._endpoint.await_room(self._room(), timeout=self._seconds())
        for sent in self._left:
            if not sent.wait(self._seconds()):
                raise PeerLost(f"what rank {self._endpoint.rank} sent has not left")
        self._left = []

    def _leave(self) -> None:
        for peer, buffers in list(self._waiting.items()):
            while buffers and self._offer(peer, buffers[0]):
                buffers.popleft()
            if not buffers:
                del self._waiting[peer]

    def _offer(self, peer: int, buffer: Buffer) -> bool:
        sent = self._endpoint.offer(peer, clock=self._count, keys=(self._what,), parts=(buffer,))
        if sent is None:
            return False
        self._left.append(sent)
        return True

    def _room(self) -> dict[int, int]:
        return {peer: memoryview(buffers[0]).nbytes for peer, buffers in self._waiting.items()}

    def _seconds(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def _values(self, frame: Frame, step: Recv) -> Tensor:
        me = self._endpoint.rank
        if frame.keys != (self._what,) or frame.clock != self._count:
            raise ProtocolError(
                f"rank {step.source} is at its call {frame.clock}, {', '.join(frame.keys)}; rank {me} at its call "
                f"{self._count}, {self._what}: all ranks must make the same calls in the same order"
            )
        part = frame.parts[0] if frame.parts else b""
        came, due = memoryview(part).nbytes, step.like.nbytes
        if came != due:
            raise ProtocolError(
                f"rank {step.source} sent {came} bytes for {self._what}, and rank {me} expects {due}: their tensors "
                "differ in size"
            )
        return from_buffer(part, step.like.dtype)
