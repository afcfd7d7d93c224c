"""Job of a simulated history: processes that meet at a store, and what befalls them."""

from __future__ import annotations

import abc
import contextlib
import functools
import random
from typing import Any

from tests.support.simulation.network import Network, SimulatedStore
from tests.support.simulation.world import Process, World


class Job(abc.ABC):
    """One job: processes that meet at a store, and train or exchange.

    Args:
        world: in which it runs.
        network: of it.
        random: from which the job is drawn; all ranks draw the same.
    """

    kind = ""
    may_fail = False
    """Whether ranks may raise without a fault from outside."""

    def __init__(self, world: World, network: Network, random: random.Random) -> None:
        self.world, self.network, self.random = world, network, random
        self.size = random.randint(2, 4)
        self.deadline_s = random.choice((5.0, 10.0, 20.0))
        self.values: dict[str, bytes] = {}
        self.faults: list[tuple[float, float, str]] = []
        self.cuts = False
        self.left: list[int] = []  # ranks that go by themselves
        self.results: dict[int, Any] = {}
        self.came: dict[int, float] = {}
        self.at_end = contextlib.ExitStack()  # nothing stays on the machine
        self.draw()

    @abc.abstractmethod
    def draw(self) -> None:
        """Choose what this job does."""

    @abc.abstractmethod
    def start(self) -> list[Process]:
        """Start its processes; returns its ranks, in order, if it has any."""

    def disturb(self, ranks: list[Process]) -> None:
        """Draw faults, and have them come."""
        for _ in range(self.random.choice((0, 1, 1, 1, 2, 3))):
            self.fault(self.random.expovariate(1.0), self.random.choice(ranks), self.random.choice(ranks))

    def fault(self, when: float, victim: Process, other: Process, what: str = "", lasts: float | None = -1.0) -> None:
        """One fault.

        Args:
            when: seconds from now.
            victim: process that it befalls.
            other: whose link to the victim it befalls, if it is a link's.
            what: kill, stop, cut or reset; by default it is drawn.
            lasts: seconds; None: for good. By default it is drawn.
        """
        world, network, draw = self.world, self.network, self.random
        what = what or draw.choice(("kill", "stop", "cut", "reset"))
        lasts = draw.choice((0.05, 1.0, 3.0, None)) if lasts == -1.0 else lasts
        hosts = victim.host, other.host
        begin, end = {
            "kill": (functools.partial(world.kill, victim), None),
            "stop": (functools.partial(world.stop, victim), functools.partial(world.resume, victim)),
            "cut": (functools.partial(network.cut, *hosts), functools.partial(network.mend, *hosts)),
            "reset": (functools.partial(network.reset, *hosts), None),
        }[what]
        lasts = None if end is None else lasts
        world.after(when, begin)
        if end is not None and lasts is not None:
            world.after(when + lasts, end)
        pair = f" - {other.name}" if what in ("cut", "reset") else ""
        when += world.now
        self.faults.append((when, when + (lasts or 0.0), f"{what} {victim.name}{pair}, {lasts or 'for good'}"))
        self.cuts = self.cuts or bool(pair)

    def replaced(self) -> list[tuple[Any, str, Any]]:
        """What a history of this job has in the place of what is real, besides what all have: (module, name, value)."""
        return []

    def store(self) -> SimulatedStore:
        """The store, for the process whose thread asks."""
        return SimulatedStore(self.network, self.world.processes[0], self.values)

    @property
    def longest_s(self) -> float:
        """Seconds after which who is still there hangs."""
        return 200.0 + 12 * self.deadline_s

    def passes(self, rank: int) -> None:
        """A rank has come past something that it waits for."""
        self.came[rank] = self.world.now

    @abc.abstractmethod
    def check(self, results: list[Any]) -> None:
        """Hold the results of ranks that came through against each other.

        Raises:
            Violation: they are not what they must be.
        """

    def __str__(self) -> str:
        return f"{self.kind}, {self.size} ranks, deadline {self.deadline_s:g} s"


class RankJob(Job):
    """Job of ranks that all do the same; what they return is compared."""

    def start(self) -> list[Process]:
        return [self.world.start(f"rank{r}", functools.partial(self.rank, r)) for r in range(self.size)]

    @abc.abstractmethod
    def rank(self, rank: int) -> Any:
        """What a rank does."""
