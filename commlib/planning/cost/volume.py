"""Values that each way of exchanging a matrix gradient moves, and that layers which stay put move. Pure functions.

One layer y = x·W + b has a gradient of M × N values, and it factors: dW = UᵀV with K rows of M + N values, K the
examples (times positions) that a worker saw. The schemes, and where their costs come from:

* **Matrix**: to servers on the workers' machines and back, which is what a ring all-reduce moves (Poseidon, USENIX ATC
  2017, table 1).
* **Factors**: every worker's factors to every other, each rebuilds the sum (Xie et al., UAI 2016; ATC 2017, table 1).
* **Adam**: factors to the one machine that owns the layer, the matrix back (Project Adam, OSDI 2014).
* **Push/pull**: to servers elsewhere, and back.
* **Placed**: every rank owns some of the outputs of a layer, and activations travel.

Counts are what a machine sends *and* receives in a step; divide by two for one direction of a full-duplex link. What
papers count besides is in :mod:`commlib.bench.plan.published_costs`.
"""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class FactorableShape:
    """A factorable layer on a cluster.

    Args:
        m: inputs of the layer.
        n: outputs.
        rows: K, the rows of a worker and step.
        workers: P1.
        servers: P2.

    Raises:
        ValueError: a number below 1, K below 0.
    """

    m: int
    n: int
    rows: int
    workers: int
    servers: int

    def __post_init__(self) -> None:
        for name in ("m", "n", "workers", "servers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.rows < 0:
            raise ValueError(f"rows must be at least 0, got {self.rows}")

    @property
    def matrix(self) -> int:
        """Number of values of the matrix, MN."""
        return self.m * self.n

    @property
    def factors(self) -> int:
        """K(M + N)."""
        return self.rows * (self.m + self.n)


def ps_colocated(s: FactorableShape) -> float:
    """Values of a machine that is worker and server: 2MN(P1 + P2 − 2)/P2. With P1 = P2: a ring all-reduce."""
    return 2 * s.matrix * (s.workers + s.servers - 2) / s.servers


def push_pull_worker(nbytes: float) -> float:
    """Bytes a worker sends by servers elsewhere, and as many come: the gradient, however many workers there are."""
    return nbytes


def push_pull_shard(nbytes: float, workers: int, shards: int) -> float:
    """Bytes that the busiest of so many servers gets, and sends: P1·bytes/P2, where each keeps as much."""
    return workers * nbytes / shards


def factors(s: FactorableShape) -> int:
    """Values of a worker that sends its factors to all others: 2K(P1 − 1)(M + N)."""
    return 2 * (s.workers - 1) * s.factors


def adam_colocated(s: FactorableShape) -> int:
    """Values of the machine that owns the layer and works too: (P1 − 1)(MN + KM + KN)."""
    return (s.workers - 1) * (s.matrix + s.factors)


def crossover_rows(m: int, n: int, workers: int, servers: int) -> float:
    """K above which the matrix is cheaper than its factors: MN(P1 + P2 − 2)/(P2(P1 − 1)(M + N)); ∞ for one worker.

    With P1 = P2 = P that is 2MN/(P(M + N)).
    """
    one = FactorableShape(m, n, 1, workers, servers)
    return ps_colocated(one) / factors(one) if workers > 1 else math.inf


# -- ours -----------------------------------------------------------------------------------------


def placed_sent(s: FactorableShape, *, input_grad: bool = True) -> tuple[float, ...]:
    """Values that a rank sends in each collective of a placed layer's step; as many come. ``s.servers`` is not used.

    Forward: inputs to all, (P − 1)·K·M, and its outputs of each rank's rows, (P − 1)/P·K·N. Backward: the same of
    gradients, in the other order; the last only if the input needs a gradient. Blocks as if P divided N.
    """
    others = s.workers - 1
    inputs, outputs = float(others * s.rows * s.m), others * s.rows * s.n / s.workers
    return (inputs, outputs, outputs, inputs) if input_grad else (inputs, outputs, outputs)


def placed(s: FactorableShape, *, input_grad: bool = True) -> float:
    """Values a machine sends and gets in a step: 4(P − 1)·K(M + N/P), or 2(P − 1)·K(M + 2N/P) for a first layer.

    In the terms of :mod:`commlib.planning.cost.volume`: against 4MN(P − 1)/P of a ring, and 2(P − 1)·K(M + N) of
    factors. So it is fewer values than factors where M < N(1 − 2/P); for a first layer, with more than two ranks
    always.
    """
    return 2 * sum(placed_sent(s, input_grad=input_grad))
