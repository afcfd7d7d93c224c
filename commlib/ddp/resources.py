"""Resources that plans need: process groups and threads, taps on linear layers, servers, a manager.

Another plan may come into force between two steps (:meth:`Resources.turn`). What that needs, too, stays and is used
again; what it lacks is made; so however often plans change, there are never more groups and threads than the largest
needs.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch

from commlib.ddp.config import AttachConfig
from commlib.exchange.factors.layers import FactorLayers
from commlib.exchange.hierarchy import Hierarchy
from commlib.exchange.lanes import Siblings, lay, make_sequencer, scopes
from commlib.exchange.rate_limit import RateLimit
from commlib.exchange.throttled_group import Throttle
from commlib.groups.coordinator import Coordinator
from commlib.groups.process_groups import deadline
from commlib.groups.world import World
from commlib.planning.manager.link_probe import LinkProbe
from commlib.planning.manager.manager import Manager
from commlib.server.worker.push_pull import Servers, join_servers
from commlib.telemetry.stats import Meter


class Resources:
    """Process groups, sequencer, rate limiter, taps, servers and manager of one attached model.

    Args:
        group: the model's process group.
        key: of this attachment.
        world: this rank.
        device: where the gradients are.
        levels: nodes, if there are some.
        about: what there is to say of them.
        limit: of rate, or None.
        servers: for ``push_pull``, or None.
        timeout: seconds to wait for the other ranks.

    Attributes:
        sequencer: drives exchanges.
        throttle: keeps the limit.
        servers: the way to the servers, once something has come to go by them.
        factors: taps that the plan in force needs, if it needs any.
        manager: that chooses, if one does.
    """

    def __init__(
        self,
        group: Any,
        key: str,
        world: World,
        device: torch.device,
        levels: Hierarchy | None,
        about: str,
        limit: RateLimit | None,
        servers: Servers | None,
        timeout: float,
    ) -> None:
        self._group, self._key, self._world, self._device, self._levels = group, key, world, device, levels
        self._about, self._timeout, self._given = about, timeout, servers
        self._siblings, self._rows = Siblings(group, device), None
        self.throttle = Throttle(limit, 0)
        self.sequencer = make_sequencer(group, f"{key}/lost", world, device, side=1 if levels else 2)
        self.servers: Any = None
        self._served: set[str] = set()
        self.factors: FactorLayers | None = None
        self.manager: Manager | None = None
        self._untap: Any = None

    def refuse(self, setup: AttachConfig) -> None:
        """Whether a plan can come into force while another is.

        Raises:
            ValueError: it needs servers for layers that they do not know.
        """
        unknown = [s.name for s in setup.served() if s.name not in self._served]
        if self.servers is not None and unknown:
            raise ValueError(
                f"{unknown[0]} would go by push_pull, and the servers were told of other layers: detach(), and attach "
                "with servers anew"
            )

    def turn(
        self,
        owner: object,
        setup: AttachConfig,
        factors: FactorLayers | None,
        key: str,
        meters: Mapping[str, Meter],
    ) -> None:
        """Put a plan into force from the next step on. Collective, between two steps.

        Args:
            owner: of the wiring; but it does not keep it alive.
            setup: what has been agreed on.
            factors: for its layers, without taps yet.
            key: of this agreement.
            meters: of all parameters.
        """
        self._plain()
        if self._given is not None and self.servers is None and setup.served():
            self._served = {s.name for s in setup.served()}
            self.servers = join_servers(
                owner, setup.served(), self._given, self._group, self._key, self._world, self._timeout
            )
        lanes = scopes(setup.exchanges(), self._levels)
        lay(self.sequencer, lanes, self._group, self._siblings, self.throttle, self._levels, self.servers)
        if factors is not None and self._rows is None:
            first = self.sequencer.tracks.first()
            self._rows = first["world"] if self.sequencer.inline else self.throttle.through(self._siblings.take())
        self.throttle.fit()
        if factors is not None:
            factors.tap(self._rows, among_buckets=self.sequencer.inline, traced=setup.chosen_later)
            self._untap = weakref.finalize(owner, factors.remove)
            self.factors = factors
            if setup.chosen_later:
                patience = min(self._timeout, deadline(self._group, self._device).total_seconds())
                board = Coordinator(self._group, key, self._world, patience)
                probe = LinkProbe(
                    self._rows,
                    self._world,
                    self._device,
                    self.throttle.limit,
                    self._levels,
                    self.sequencer.tracks.first(),
                )
                self.manager = Manager(setup, factors, board, probe, self._world, meters, self._about)

    def _plain(self) -> None:
        """The model's layers are plain again, and nobody chooses."""
        if self.factors is not None:
            self.factors.retire()
            self._untap()
        self.factors = self.manager = None

    def close(self, *, wait: bool = True) -> None:
        """Ends threads; leaves servers. (A further bucket would start threads again.)"""
        self.throttle.close(wait=wait)
        self.sequencer.close(wait=wait)
        if self.servers is not None and wait:
            self.servers.close()

    def release(self) -> None:
        """Leaves the model as it was, for good; all ranks do, and nothing is under way on any of them."""
        self._plain()
        self.close()
        if self.sequencer.failed is None:
            self._siblings.give_back()
