"""Waits for other ranks within an exchange: what a rank asks before it, and answers meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from commlib.errors import PeerLost, PlanMismatch
from commlib.groups.handshake import announce, answer_roll_call
from commlib.groups.process_groups import deadline
from commlib.groups.step_check import StepCheck
from commlib.groups.world import World


class PeerWait:
    """Waits of one attached model: roll calls, and comparisons of steps, over each of its process groups.

    Who waits in one group may be asked in another, so a wait answers in all of them.

    Args:
        places: process group, prefix of its keys, and this rank in it; roll calls are at ``prefix/lost``.
        device: of the gradients.
    """

    def __init__(self, places: Sequence[tuple[Any, str, World]], device: torch.device) -> None:
        self._places = places
        self._checks = [StepCheck(g, key, w, deadline(g, device).total_seconds()) for g, key, w in places]
        self._doing = ""

    def ask(self, why: str) -> None:
        """Compare steps before the next exchange; ``why``: what this rank has done, for errors."""
        for check in self._checks:
            check.ask(why)

    def begin(self, mine: Mapping[str, str], doing: str) -> None:
        """An exchange begins, of which nothing is issued yet.

        Args:
            mine: what must be the same on all ranks, by name: the count of steps.
            doing: what is exchanged, for errors: "exchange buckets of step 3".

        Raises:
            PeerLost: a rank did not come, or has given up.
            StoreSilent: the store does not answer.
        """
        self._doing = doing
        for check in self._checks:
            check.begin(mine, self._answer_roll_calls)

    def answer(self) -> None:
        """To be called every half second of a wait.

        Raises:
            PeerLost: another rank has given up.
            PlanMismatch: ranks are at different steps, and the exchange does not come through either.
        """
        try:
            self._answer_roll_calls()
        except PeerLost as e:  # another rank may have said already what this one is about to say
            raise (self._found() or e) from None
        for check in self._checks:
            check.answer(self._answer_roll_calls)

    @property
    def found(self) -> PlanMismatch | None:
        """The error to be raised now that the exchange is through: ranks are at different steps.

        Those who wait in another of these groups are told.
        """
        found = self._found()
        for group, key, world in self._places if found is not None else ():
            announce(group, f"{key}/lost", f"rank {world.rank}: {found}")
        return found

    def _found(self) -> PlanMismatch | None:
        return next((check.found for check in self._checks if check.found is not None), None)

    def _answer_roll_calls(self) -> None:
        for group, key, world in self._places:
            if found := answer_roll_call(group, f"{key}/lost", world):
                me = f"rank {world.rank} of {world.size}"
                raise PeerLost(f"{me} could not {self._doing}: another rank has given up; {found}")
