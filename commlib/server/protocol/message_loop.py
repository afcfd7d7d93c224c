"""Thread of a worker's client and of a shard's node: takes the messages that come, and sends what waits to be sent.

Only this thread receives. Whoever puts messages into the queue from another thread has a lock for it, which
:meth:`MessageLoop._turn` and :meth:`MessageLoop._take` take, too.
"""

from __future__ import annotations

import abc
import logging
import threading
from collections.abc import Mapping

from commlib.errors import CommlibError, PeerLost
from commlib.messaging.endpoint import Endpoint
from commlib.messaging.frame import Frame
from commlib.server.protocol.send_queue import SendQueue

_log = logging.getLogger("commlib")
SLICE_S = 0.25
"""Seconds between two looks at what else there is to do, while nothing comes."""
_SOON_S = 0.005  # and while something waits for room at its receiver


class MessageLoop(abc.ABC):
    """Messages of one endpoint, taken in a thread from :meth:`start` to :meth:`stop`.

    Args:
        endpoint: connected to all others; its owner closes it, afterwards.
        name: of whoever this is, as ``worker 3``.
        urgency: of keys (:class:`~commlib.server.protocol.send_queue.SendQueue`).

    Attributes:
        sent, received: bytes of messages, without what frames and transports add.
    """

    def __init__(self, endpoint: Endpoint, name: str, urgency: Mapping[str, int] | None) -> None:
        self._endpoint, self._name = endpoint, name
        self._queue = SendQueue(endpoint, self._nobody, urgency)
        self.sent = self.received = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"commlib-{name.replace(' ', '-')}", daemon=True)

    def start(self) -> None:
        """Start to send and receive."""
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """Stop the thread; a second call does nothing. What still waits to be sent is not sent."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    @abc.abstractmethod
    def _take(self, frame: Frame) -> None:
        """Handle the messages of a frame."""

    @abc.abstractmethod
    def _turn(self) -> None:
        """Do what else there is, and send what there is room for: after each frame, and every :data:`SLICE_S`."""

    @abc.abstractmethod
    def _cut_off(self, error: PeerLost) -> None:
        """Messages between this one and ``error.rank`` were lost, and both live: nobody else sees that.

        Raises:
            CommlibError: this one has to end.
        """

    @abc.abstractmethod
    def _lost(self, error: CommlibError) -> None:
        """Note that the thread has ended by this error: nobody may wait for it any more."""

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                try:
                    frame = self._endpoint.recv(timeout=_SOON_S if self._queue else SLICE_S)
                    self.received += sum(len(part) for part in frame.parts)
                    self._take(frame)
                except PeerLost as e:  # nothing came; or one is gone, and the members will see that
                    if e.cut_off:
                        self._cut_off(e)
                    elif e.rank is not None:
                        _log.debug("%s: %s", self._name, e)
                self._turn()
        except CommlibError as e:
            if not self._ended.is_set():
                self._lost(e)
        except Exception as e:  # a mistake of ours
            _log.exception("%s cannot go on", self._name)
            self._lost(CommlibError(f"{self._name} cannot go on: {type(e).__name__}: {e}"))

    def _nobody(self, rank: int, why: str) -> None:
        _log.debug("%s has nobody to send to at rank %d: %s", self._name, rank, why)
