"""Pushes as they come to a shard, decoded, those of one worker to one key in their order. Pure.

A message may have a signature in place of keys that this shard has never seen (another one did, which died): then it
and those after it wait until the worker has told them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from commlib.codecs.filter import MissingKeys
from commlib.server.protocol.messages import Keys, Push, Send, Unknown
from commlib.server.protocol.value_coding import Coding, Receiver


class Inbox:
    """Of one shard.

    Args:
        coding: of the job.
    """

    def __init__(self, coding: Coding) -> None:
        self._coding = coding
        self._receivers: dict[tuple[str, int], Receiver] = {}
        self._waiting: dict[tuple[str, int], list[Push]] = {}

    def take(self, push: Push) -> tuple[list[Push], list[Send]]:
        """Those that are ready, and what is to be asked.

        Raises:
            ProtocolError: it is no gradient.
        """
        waiting = self._waiting.get((push.key, push.worker))
        if waiting is not None:
            if all(p.stamp != push.stamp for p in waiting):
                waiting.append(push)
            return [], []
        return self._ready([push])

    def learn(self, keys: Keys) -> tuple[list[Push], list[Send]]:
        """The same, when keys have come.

        Raises:
            ProtocolError: nobody asked for them, or they are others.
        """
        waiting = self._waiting.pop((keys.key, keys.worker), [])
        if not waiting:  # in a view before, and then it did not matter any more
            return [], []
        self._receiver(waiting[0]).learn(keys.signature, keys.keys)
        return self._ready(waiting)

    def change(self, owned: Collection[str]) -> None:
        """In a new view workers send again what waits; and another owner's keys are none of ours."""
        self._waiting.clear()
        self._receivers = {at: r for at, r in self._receivers.items() if at[0] in owned}

    def _ready(self, pushes: list[Push]) -> tuple[list[Push], list[Send]]:
        ready = []
        for i, push in enumerate(pushes):
            try:
                ready.append(self._decoded(push))
            except MissingKeys as e:
                self._waiting[push.key, push.worker] = pushes[i:]
                return ready, [(push.worker, Unknown(push.view, push.key, push.worker, e.signature))]
        return ready, []

    def _decoded(self, push: Push) -> Push:
        if push.gradient is None:
            return push
        return dataclasses.replace(push, gradient=self._receiver(push).decode(push.gradient, push.stamp))

    def _receiver(self, push: Push) -> Receiver:
        at = push.key, push.worker
        if at not in self._receivers:
            self._receivers[at] = self._coding.receiver(*at)
        return self._receivers[at]
