"""Groups of workers and groups of servers, as one rule of consistency: in step inside a group, apart from the others.

After SINGA (Ooi et al., ACM Multimedia 2015), whose configuration has the same numbers. Four of them have names::

                            groups of   workers   groups of   shards
                            workers     in each   shards      in each
    Sandblaster             1           3         1           2         shards on machines of their own
    AllReduce               1           3         1           3         a shard beside each worker
    Downpour                2           2         1           2         shards on machines of their own
    Distributed Hogwild     3           1         3           1         a shard beside each worker

The workers of a group push, and their mean is applied, as one, once all have: BSP. Other groups are not waited for.
Each group of shards has all values; it serves every so-manieth group of workers, and tells the other groups of shards
how far its values have gone (:mod:`commlib.server.shard.group_sync`).
"""

from __future__ import annotations

import dataclasses

from commlib.server.job.staleness import Consistency, Fixed, Threshold, at_least


@dataclasses.dataclass(frozen=True)
class Topology(Consistency):
    """Worker groups × server groups::

        with commlib.ParameterServer(model, optimizer, commlib.Topology.downpour(groups=2, workers=2)) as server:

    Workers 0 to ``workers`` − 1 are the first group, and so on; group g pushes to server group g mod
    ``server_groups``.

    Args:
        groups: of workers.
        workers: in each.
        server_groups: of shards, no more than there are of workers.
        servers: shards in each.
        every: updates between two messages from a server group to another (SINGA's sync_freq).

    Raises:
        ValueError: a number below 1; or a server group that serves nobody.
    """

    groups: int = 1
    workers: int = 1
    server_groups: int = 1
    servers: int = 1
    every: int = 1

    name = "groups"

    def __post_init__(self) -> None:
        for option in dataclasses.fields(self):
            at_least(option.name, getattr(self, option.name), 1)
        if self.server_groups > self.groups:
            raise ValueError(
                f"{self.server_groups} groups of servers for {self.groups} of workers: each must serve one or more"
            )

    @classmethod
    def sandblaster(cls, workers: int = 3, servers: int = 2) -> Topology:
        """Single group in step, with shards elsewhere (Dean et al., NIPS 2012): give ``servers="HOST:PORT"``."""
        return cls(1, workers, 1, servers)

    @classmethod
    def all_reduce(cls, workers: int = 3) -> Topology:
        """Single group in step, with a shard beside each worker."""
        return cls(1, workers, 1, workers)

    @classmethod
    def downpour(cls, groups: int = 2, workers: int = 2, servers: int = 2) -> Topology:
        """Several groups, each in step, with the same shards elsewhere (Dean et al.): give ``servers="HOST:PORT"``."""
        return cls(groups, workers, 1, servers)

    @classmethod
    def hogwild(cls, groups: int = 3, workers: int = 1, every: int = 1) -> Topology:
        """Several groups, each with a shard of its own that has all values; the shards tell each other."""
        return cls(groups, workers, groups, 1, every)

    @property
    def shards(self) -> int:
        return self.server_groups * self.servers

    def group(self, worker: int) -> int:
        return worker // self.workers

    def server_group(self, worker: int) -> int:
        return self.group(worker) % self.server_groups

    def misfit(self, workers: int, shards: int, copies: int) -> str | None:
        for kind, wanted, there in (("workers", self.groups * self.workers, workers), ("shards", self.shards, shards)):
            if wanted != there:
                return f"{self} is of {wanted} {kind}, and there are {there}"
        if copies > 1 and self.server_groups > 1:
            return f"{self.server_groups} groups of servers have the values as often: copies must be 1, got {copies}"
        return None

    def threshold(self) -> Threshold:
        return Fixed(0)
