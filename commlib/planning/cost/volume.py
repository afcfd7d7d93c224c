"""What each way of exchanging a matrix gradient moves, counted in values. Pure functions.

One layer y = x·W + b has a gradient of M × N values, and it factors: dW = UᵀV with K rows of M + N values, K the
examples (times positions) that a worker saw. The schemes, and where their costs come from:

* **PS**: the matrix to servers and back (Poseidon, USENIX ATC 2017, table 1). A ring all-reduce moves just the
  bytes of servers that share the workers' machines.
* **SFB**: every worker's factors to every other, each rebuilds the sum (Xie et al., UAI 2016; ATC 2017, table 1).
* **Adam**: factors to the one server that owns the layer, the matrix back (Project Adam, OSDI 2014).
* **Blocks**: Adam's, balanced (SACP, arXiv 1512.06216): server j owns a block of W's rows and gets those columns of
  U, and all of V. Where every worker is a server too, it is W's larger dimension that is cut.

Counts are what a machine sends *and* receives in a step; divide by two for one direction of a full-duplex link.

What layers that stay put move, counted in values. Pure functions.

Three ways of it. *Spark's* data and model parallelism: a master, and F processes with a part of every layer's columns
each (its cost equations (4) to (9), rebuilt from the prose around them). *RALP*: the trailing layers, of many
parameters and few activations, stay with parameter servers. *Ours*: every rank is a worker and owns some of the
outputs of a layer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

Scheme = Literal["factors", "hybrid", "matrix"]


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


def ps_worker(s: FactorableShape) -> int:
    """Values of a worker that talks to servers elsewhere: 2MN."""
    return 2 * s.matrix


def ps_server(s: FactorableShape) -> float:
    """Values of such a server: 2·P1·MN/P2."""
    return 2 * s.workers * s.matrix / s.servers


def ps_colocated(s: FactorableShape) -> float:
    """Values of a machine that is worker and server: 2MN(P1 + P2 − 2)/P2. With P1 = P2: a ring all-reduce."""
    return 2 * s.matrix * (s.workers + s.servers - 2) / s.servers


def push_pull_worker(nbytes: float) -> float:
    """Bytes a worker sends by servers elsewhere, and as many come: the gradient, however many workers there are."""
    return nbytes


def push_pull_shard(nbytes: float, workers: int, shards: int) -> float:
    """Bytes that the busiest of so many servers gets, and sends: P1·bytes/P2, where each keeps as much."""
    return workers * nbytes / shards


def push_pull_gain(workers: int, shards: int) -> float:
    """How many times as fast as a ring dedicated servers are, where all have links alike and nothing else takes time.

    2(P1 − 1)/P1 by max(1, P1/P2). Of three workers or more it wins from more than P1²/(2(P1 − 1)) servers on; with P1
    it is nearly twice.
    """
    ring = 2 * (workers - 1) / workers
    return ring / max(push_pull_worker(1.0), push_pull_shard(1.0, workers, shards))


def factors(s: FactorableShape) -> int:
    """Values of a worker that sends its factors to all others: 2K(P1 − 1)(M + N)."""
    return 2 * (s.workers - 1) * s.factors


def adam_worker(s: FactorableShape) -> int:
    """Values of a worker that sends factors and gets the matrix: K(M + N) + MN."""
    return s.factors + s.matrix


def adam_server(s: FactorableShape) -> int:
    """Values of the server that owns the layer: P1·MN + P1·K(M + N)."""
    return s.workers * (s.matrix + s.factors)


def adam_colocated(s: FactorableShape) -> int:
    """Values of the machine that owns the layer and works too: (P1 − 1)(MN + KM + KN)."""
    return (s.workers - 1) * (s.matrix + s.factors)


def blocks_worker(s: FactorableShape) -> int:
    """Values a worker sends and gets with the layer in P2 blocks of rows: K(M + P2·N) + MN."""
    return s.rows * (s.m + s.servers * s.n) + s.matrix


def blocks_colocated(s: FactorableShape) -> float:
    """Values of a machine that works and owns one of P blocks of the larger dimension, P1 = P2 = P.

    2(P − 1)·(K(min + max/P) + MN/P), min and max of M and N: rows to every other machine, and its block.

    Raises:
        ValueError: another number of servers than of workers.
    """
    if s.workers != s.servers:
        raise ValueError(f"every worker owns a block, so {s.workers} workers are as many servers; got {s.servers}")
    rows = s.rows * (min(s.m, s.n) + max(s.m, s.n) / s.servers)
    return 2 * (s.workers - 1) * (rows + s.matrix / s.servers)


def crossover_rows(m: int, n: int, workers: int, servers: int) -> float:
    """K above which the matrix is cheaper than its factors: MN(P1 + P2 − 2)/(P2(P1 − 1)(M + N)); ∞ for one worker.

    With P1 = P2 = P that is 2MN/(P(M + N)).
    """
    one = FactorableShape(m, n, 1, workers, servers)
    return ps_colocated(one) / factors(one) if workers > 1 else math.inf


def best_scheme(s: FactorableShape) -> Literal["factors", "matrix"]:
    """Poseidon's BestScheme (ATC 2017, algorithm 1) by bytes alone; a tie goes to the factors."""
    return "factors" if factors(s) <= ps_colocated(s) else "matrix"


def sacp_scheme(s: FactorableShape) -> Scheme:
    """The choice of three that minimises the values moved in the whole system (after SACP, arXiv 1512.06216).

    Totals: matrix 2P·MN, factors P(P − 1)·K(M + N), hybrid (factors to a server, matrix back) P·K(M + N) + P·MN.
    The paper's own table could not be had; this follows from the totals, a tie going to the fewest values a worker
    sends.
    """
    p = s.workers
    totals: dict[Scheme, int] = {
        "factors": p * (p - 1) * s.factors,
        "hybrid": p * (s.factors + s.matrix),
        "matrix": 2 * p * s.matrix,
    }
    return min(totals, key=lambda scheme: totals[scheme])


# -- Spark: data and model parallel ---------------------------------------------------------------


def spark_seconds(start_s: float, value_s: float, messages: float, values: float) -> float:
    """(4) T = t_s·K + t_d·N.

    Args:
        start_s: t_s, seconds to start a message.
        value_s: t_d, seconds for each value.
        messages: K, of :func:`spark_messages`.
        values: N, of :func:`spark_values`.
    """
    return start_s * messages + value_s * values


def spark_messages(layers: int, processes: int, examples: int) -> float:
    """(5) K = M[(F − 1) + (L − 2)(F·log₂F + 2(F − 1))].

    Args:
        layers: L, of neurons: input and output count.
        processes: F.
        examples: M.

    Raises:
        ValueError: fewer than two layers or one process, examples below 0.
    """
    _check(layers, processes, examples)
    others = processes - 1
    return examples * (others + (layers - 2) * (processes * math.log2(processes) + 2 * others))


def spark_ends(sizes: Sequence[int], processes: int, examples: int) -> float:
    """(6) N₀ = M(F − 1)(S(x) + S(y)/F): inputs go to all, and each sends its part of the output.

    Args:
        sizes: neurons of each layer, the input first.
        processes: F.
        examples: M.

    Raises:
        ValueError: as :func:`spark_messages`.
    """
    _check(len(sizes), processes, examples)
    return examples * (processes - 1) * (sizes[0] + sizes[-1] / processes)


def spark_forward(sizes: Sequence[int], processes: int, examples: int) -> int:
    """(7) N_f = M·Σ(F − 1)·nᵢ over hidden layers: all have all of their outputs. As :func:`spark_ends`."""
    _check(len(sizes), processes, examples)
    return examples * (processes - 1) * sum(sizes[1:-1])


def spark_backward(sizes: Sequence[int], processes: int, examples: int) -> int:
    """(8) N_b = M·Σ(F − 1)(S(Eᵢ₊₁) + S(Eᵢ)) over hidden layers i: errors to all, and sums of full length back.

    As :func:`spark_ends`.
    """
    _check(len(sizes), processes, examples)
    return examples * (processes - 1) * sum(own + after for own, after in pairwise(sizes[1:]))


def spark_values(sizes: Sequence[int], processes: int, examples: int) -> float:
    """(9) N = N₀ + N_f + N_b. As :func:`spark_ends`."""
    found = spark_ends(sizes, processes, examples)
    return found + spark_forward(sizes, processes, examples) + spark_backward(sizes, processes, examples)


def _check(layers: int, processes: int, examples: int) -> None:
    if layers < 2:
        raise ValueError(f"a network has an input and an output: at least 2 layers, got {layers}")
    if processes < 1 or examples < 0:
        raise ValueError(f"at least one process and no fewer than 0 examples, got {processes} and {examples}")


# -- RALP -----------------------------------------------------------------------------------------


def ralp_values(outputs: Sequence[int], parameters: Sequence[int], rows: int, cut: int) -> int:
    """T(l) = 2K·a_l + 2·Σ_{i ≤ l} pᵢ: values that a worker moves if layers from ``cut`` on stay with the servers.

    Args:
        outputs: a, outputs of each layer for one row.
        parameters: p, of each layer.
        rows: K, of a worker and step.
        cut: l, how many layers the workers keep: at least one. With all of them no activations travel: 2Σp.

    Raises:
        ValueError: lists of unlike length, or a cut that is not among the layers.
    """
    if len(outputs) != len(parameters) or not 1 <= cut <= len(outputs):
        raise ValueError(
            f"a cut is after one of the layers: got {cut}, {len(outputs)} outputs and {len(parameters)} parameters"
        )
    activations = 0 if cut == len(outputs) else 2 * rows * outputs[cut - 1]
    return activations + 2 * sum(parameters[:cut])


def ralp_cut(
    outputs: Sequence[int], parameters: Sequence[int], rows: int, seconds: Sequence[float], workers: int, speed: float
) -> int:
    """The cut that moves fewest values, of those where the servers keep up; the later one of two alike.

    Servers get the rows of all workers, and have the time that a worker needs for its own layers.

    Args:
        outputs, parameters, rows: as :func:`ralp_values`.
        seconds: of each layer, both passes over a worker's rows.
        workers: P.
        speed: of all servers together, in workers.

    Raises:
        ValueError: as there; another number of seconds; no worker, or servers without speed.
    """
    if len(seconds) != len(outputs) or workers < 1 or not speed > 0:
        raise ValueError(f"seconds of every layer, a worker, a speed: got {len(seconds)}, {workers}, {speed}")
    fit = [c for c in range(1, len(outputs) + 1) if workers * sum(seconds[c:]) / speed <= sum(seconds[:c])]
    return min(fit, key=lambda c: (ralp_values(outputs, parameters, rows, c), -c))


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
