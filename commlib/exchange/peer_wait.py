"""Waits for other ranks within an exchange: what a rank asks before it, and answers meanwhile."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from commlib.errors import CommlibError, PeerLost, PlanMismatch
from commlib.exchange.step_check import StepCheck
from commlib.groups.handshake import announce, answer_roll_call
from commlib.groups.process_groups import deadline
from commlib.groups.world import World


class PeerWait:
    """Waits of one attached model: roll calls, and comparisons of steps, over each of its process groups.

    Who waits in one group may be asked in another, so a wait answers in all of them. A step that has nothing to compare
    and does not wait asks nothing here.

    Args:
        places: process group, prefix of its keys, and this rank in it; roll calls are at ``prefix/lost``.
        device: of the gradients.
        give_up: called with every error before it is raised, so that nothing more is issued; returns it, or one that
            came before.

    Attributes:
        number: of the exchange under way, from 1; to be counted by who begins one.
        why: what this rank has done since the last one, for which steps are to be compared; empty if nothing.
        found: the error that :meth:`check` raises once the exchange is through: ranks are at different steps.
    """

    def __init__(
        self,
        places: Sequence[tuple[Any, str, World]],
        device: torch.device,
        give_up: Callable[[BaseException], BaseException],
    ) -> None:
        self._places, self._give_up = places, give_up
        self._checks = [StepCheck(g, key, w, deadline(g, device).total_seconds()) for g, key, w in places]
        self.number, self.why = 0, ""  # whoever attaches has taken no step, like all others
        self.found: PlanMismatch | None = None

    def begin(self, mine: Mapping[str, str], doing: str) -> None:
        """Compare steps, before anything of this exchange is issued.

        Args:
            mine: what must be the same on all ranks, by name: the count of steps.
            doing: what is exchanged, for errors: "exchange buckets of step 3".

        Raises:
            PeerLost: a rank did not come, or has given up.
            StoreSilent: the store does not answer.
        """
        why, self.why = self.why, ""
        meanwhile = functools.partial(self._answer_roll_calls, doing)
        with self._giving_up():
            for check in self._checks:
                check.begin(self.number, mine, doing, why, meanwhile)
                self.found = self.found or check.found

    def answer(self, mine: Mapping[str, str], doing: str) -> None:
        """Answer other ranks; to be called every half second of a wait. Arguments as :meth:`begin`.

        Raises:
            PeerLost: another rank has given up.
            PlanMismatch: ranks are at different steps, and the exchange does not come through either.
        """
        meanwhile = functools.partial(self._answer_roll_calls, doing)
        with self._giving_up():
            meanwhile()
            for check in self._checks:
                check.answer(self.number, mine, doing, meanwhile)
                self.found = self.found or check.found

    def check(self) -> None:
        """Raises what was found; those who wait in another of these groups are told."""
        if self.found is not None:
            for group, key, world in self._places:
                announce(group, f"{key}/lost", f"rank {world.rank}: {self.found}")
            raise self._give_up(self.found)

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except CommlibError as e:
            self.check()  # another rank may have said already what this one is about to say
            raise self._give_up(e) from None

    def _answer_roll_calls(self, doing: str) -> None:
        for group, key, world in self._places:
            if found := answer_roll_call(group, f"{key}/lost", world):
                me = f"rank {world.rank} of {world.size}"
                raise PeerLost(f"{me} could not {doing}: another rank has given up; {found}")
