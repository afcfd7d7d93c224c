"""Specs of ``--local``: a rule of local steps, when ranks meet, and how differences travel.

What ``--server`` says: a rule of consistency, and how messages are coded.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from commlib.local_sgd import outer_optimizers
from commlib.local_sgd.sync_schedule import SyncSchedule
from commlib.planning.policy import policy_of
from commlib.planning.route import resolve
from commlib.server.job import consistency
from commlib.server.protocol.value_coding import way, way_of_values

LOCAL_PREFIX = "local "
"""Of such a run's name."""
_STREAMING = {"fragments": int, "delay": int, "mix": float}


@dataclasses.dataclass(frozen=True)
class LocalSpec:
    """``RULE [tau=N|auto] [codec=SPEC] [times=X] [fragments=N] [delay=N] [mix=X]``.

    Args:
        rule: of local steps.
        tau: as :class:`commlib.LocalSteps` takes it.
        codec: of the differences; None is the rule's.
        times: as many steps as runs that meet in each.
        streaming: the other options.
    """

    rule: str
    tau: int | str = 50
    codec: str | None = None
    times: float = 1.0
    streaming: tuple[tuple[str, Any], ...] = ()

    @staticmethod
    def of(text: str) -> LocalSpec:
        """Read what was written after ``--local``.

        Raises:
            ValueError: it cannot be read; or there is no such rule or codec.
        """
        rule, *words = text.split() or [""]
        given = dict(word.partition("=")[::2] for word in words)
        unknown = sorted(given.keys() - {"tau", "codec", "times", *_STREAMING})
        if unknown or len(given) < len(words):
            raise ValueError("write RULE, or 'RULE tau=auto codec=SPEC times=X fragments=N delay=N mix=X'")
        outer_optimizers.make(rule)
        tau = given.get("tau", "50")
        SyncSchedule(int(tau) if tau.isdecimal() else tau, 1)
        codec = given.get("codec")
        if codec is not None:
            if policy_of(codec) is not None:
                raise ValueError(f"codec={codec} chooses by backward passes: name a codec")
            resolve(codec, world=2)
        times = float(given.get("times", 1))
        if not 0 < times <= 1000:
            raise ValueError(f"times={times:g}: as many steps as the others, above 0 and at most 1000")
        streaming = tuple((k, _STREAMING[k](v)) for k, v in given.items() if k in _STREAMING)
        return LocalSpec(rule, int(tau) if tau.isdecimal() else tau, codec, times, streaming)


SERVER_PREFIX = "server "
"""Of such a run's name."""


@dataclasses.dataclass(frozen=True)
class ServerSpec:
    """``RULE [push=SPEC] [pull=SPEC] [background]``.

    Args:
        rule: of consistency.
        push, pull: how gradients and values are coded.
        background: whether they are moved in the background.
    """

    rule: str
    push: str = "none"
    pull: str = "none"
    background: bool = False

    @staticmethod
    def of(text: str) -> ServerSpec:
        """Read what was written after ``--server``.

        Raises:
            ValueError: it cannot be read; or there is no such rule, codec or filter.
        """
        rule, *words = text.split() or [""]
        given = dict(word.split("=", 1) for word in words if word.startswith(("push=", "pull=")))
        background = "background" in words
        if len(given) + background < len(words):
            raise ValueError("write RULE, or 'RULE push=SPEC pull=SPEC background'")
        served = ServerSpec(rule, background=background, **given)
        consistency.make(served.rule)
        way(served.push)
        way_of_values(served.pull)
        return served
