"""Costs that papers count, of schemes that commlib has under another form or not at all. Pure functions.

* **Dedicated servers** against a ring (BytePS, OSDI 2020), and **blocks** of a layer on the workers' machines (SACP,
  arXiv 1512.06216).
* **Spark's** data and model parallelism: a master, and F processes with a part of every layer's columns each: equations
  (4) to (9), rebuilt from the prose around them.
* **RALP**: the trailing layers, of many parameters and few activations, stay with parameter servers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from commlib.planning.cost.volume import FactorableShape, push_pull_shard, push_pull_worker


def push_pull_gain(workers: int, shards: int) -> float:
    """How many times as fast as a ring dedicated servers are, where all have links alike and nothing else takes time.

    2(P1 − 1)/P1 by max(1, P1/P2). Of three workers or more it wins from more than P1²/(2(P1 − 1)) servers on; with P1
    it is nearly twice.
    """
    ring = 2 * (workers - 1) / workers
    return ring / max(push_pull_worker(1.0), push_pull_shard(1.0, workers, shards))


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
