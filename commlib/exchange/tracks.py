"""The process groups that rounds go over, and how many bytes have gone over each."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from commlib.exchange.collectives import Collective, Scope, scope_of


class Tracks:
    """For each round, scope → process group.

    Args:
        groups: to begin with.
    """

    def __init__(self, groups: Sequence[Mapping[Scope, Any]]) -> None:
        self._groups: list[dict[Scope, Any]] = []
        self._sent: list[dict[Scope, float]] = []  # bytes by round: each is written by one thread only
        self.extend(groups)

    def __len__(self) -> int:
        return len(self._groups)

    def extend(self, more: Sequence[Mapping[Scope, Any]]) -> None:
        """More of them, by round; alike on all ranks, while no bucket is under way."""
        for i, groups in enumerate(more):
            if i == len(self._groups):
                self._groups.append({})
                self._sent.append({})
            self._groups[i].update(groups)
            self._sent[i].update(dict.fromkeys(groups, 0.0))

    @property
    def scopes(self) -> list[Collection[Scope]]:
        """Those that there is a process group for, by round."""
        return [list(groups) for groups in self._groups]

    def first(self) -> dict[Scope, Any]:
        """A process group of each scope, for whoever issues alike on all ranks while no bucket is under way.

        The first there is. Every rank has issued all that its buckets asked of it before it finds none under way, so
        that comes first in the sequence of each group, on all of its ranks.
        """
        return {scope: group for groups in reversed(self._groups) for scope, group in groups.items()}

    def issue(self, collective: Collective, round_: int) -> Any:
        """Starts a collective of a round; returns the Work."""
        return collective.issue(self._groups[round_][scope_of(collective)])

    def count(self, collective: Collective, round_: int) -> None:
        """It has been issued: its bytes go to its meters."""
        scope = scope_of(collective)
        sent = collective.wire_bytes(self._groups[round_][scope].size())
        self._sent[round_][scope] += sent
        total = sum(n for _, n in collective.payers) or 1
        for meter, n in collective.payers:
            meter.add_sent(sent * n / total)

    @property
    def wire_bytes(self) -> float:
        """Bytes this rank has sent."""
        return sum(sum(sent.values()) for sent in self._sent)

    @property
    def inter_bytes(self) -> float | None:
        """Those of them that it has sent to its counterparts on other nodes; None if no round knows of nodes."""
        known = [sent["inter"] for sent in self._sent if "inter" in sent]
        return sum(known) if known else None
