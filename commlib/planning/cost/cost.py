"""What layers that stay put move, counted in values. Pure functions.

Three ways of it. *Spark's* data and model parallelism: a master, and F processes with a part of every layer's columns
each (its cost equations (4) to (9), rebuilt from the prose around them). *RALP*: the trailing layers, of many
parameters and few activations, stay with parameter servers. *Ours*: every rank is a worker and owns some of the
outputs of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from commlib.planning.cost.volume import Shape

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


def placed_sent(s: Shape, *, input_grad: bool = True) -> tuple[float, ...]:
    """Values that a rank sends in each collective of a placed layer's step; as many come. ``s.servers`` is not used.

    Forward: inputs to all, (P − 1)·K·M, and its outputs of each rank's rows, (P − 1)/P·K·N. Backward: the same of
    gradients, in the other order; the last only if the input needs a gradient. Blocks as if P divided N.
    """
    others = s.workers - 1
    inputs, outputs = float(others * s.rows * s.m), others * s.rows * s.n / s.workers
    return (inputs, outputs, outputs, inputs) if input_grad else (inputs, outputs, outputs)


def placed(s: Shape, *, input_grad: bool = True) -> float:
    """Values a machine sends and gets in a step: 4(P − 1)·K(M + N/P), or 2(P − 1)·K(M + 2N/P) for a first layer.

    In the terms of :mod:`commlib.planning.cost.volume`: against 4MN(P − 1)/P of a ring, and 2(P − 1)·K(M + N) of
    factors. So it is fewer values than factors where M < N(1 − 2/P); for a first layer, with more than two ranks
    always.
    """
    return 2 * sum(placed_sent(s, input_grad=input_grad))
