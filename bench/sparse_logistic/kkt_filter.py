"""The KKT filter: weights that are 0 and will very likely stay so are neither computed nor sent. Pure.

At the optimum w = 0 wherever |g| < λ. It is decided where the gradient is known: at the server, from the sum over all
workers. A worker must not decide from its own share g_p, not even at |g_p| ≤ λ/P: with λ = 1 and g = (0.8, 0.1, 0.1,
0.1) of four workers the sum is 1.1 and the weight moves; without the last three it is 0.8, and the weight never does.

Two promises. :func:`rests` is exactly lossless: for that same gradient these weights do not move. :class:`Active` is
not, as a later gradient is another: so all weights become active again before a result is believed (:class:`Rule`).
The active ones are known by their list of keys; no value stands for "not active", so a NaN stays what it is, an error.

After Li et al. (NIPS 2014) and the shrinking of LIBLINEAR. Losses are summed over examples, g and λ are in these units;
so is the largest violation, and θ = ratio·violation/examples.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .proximal_step import relative_change, violation

OFF = 1e20
"""θ with which nothing becomes inactive."""


def rests(w: Tensor, g: Tensor, l1: float) -> Tensor:
    """Weights that the proximal step leaves where they are, at 0, whatever their curvature: bool (n,)."""
    return (w == 0) & (g.abs() <= l1)


class Active:
    """Which of a server's weights are active.

    Args:
        size: weights.
        l1: λ.
    """

    def __init__(self, size: int, l1: float) -> None:
        self._l1, self.theta, self.violation = l1, OFF, 0.0
        self.mask = torch.ones(size, dtype=torch.bool)

    def decide(self, keys: Tensor, w: Tensor, g: Tensor) -> None:
        """Decide from a block's weights before the step, (n,), and the gradient of all workers together, float64 (n,).

        Inactive becomes what is 0 with |g| < λ - θ; the others count for the pass's largest violation.
        """
        out = (w == 0) & (g.abs() < self._l1 - self.theta)
        self.mask[keys[out]] = False
        self.violation = max(self.violation, violation(w, g, self._l1))

    def next_pass(self, verdict: Verdict) -> None:
        """Begins the pass after a verdict."""
        self.theta, self.violation = verdict.theta, 0.0
        if verdict.reactivate:
            self.mask.fill_(True)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What is to be done after a pass.

    Args:
        stop: it has converged.
        reactivate: every weight is active in the next pass.
        theta: θ of the next pass.
    """

    stop: bool = False
    reactivate: bool = False
    theta: float = OFF


class Rule:
    """When to stop, when to make all weights active again, and θ: one for all servers.

    Off in the first pass, θ comes from the last violation in all others. So in a pass that begins with all weights each
    is looked at, moves if it should, and is not sent again if it need not be: half the bytes of one with θ off.

    Args:
        start: objective before the first pass.
        examples: of all workers.
        on: whether there is a filter; else θ stays off, and the first small change is the end.
        tolerance: of the relative change of the objective in one pass.
        ratio: θ = ratio·violation/examples.
    """

    def __init__(self, start: float, examples: int, *, on: bool, tolerance: float = 1e-4, ratio: float = 10.0) -> None:
        self._objective, self._examples, self._on = start, examples, on
        self._tolerance, self._ratio = tolerance, ratio
        self._whole = True  # whether all weights were active when this pass began: so each was looked at

    def after(self, objective: float, violation: float) -> Verdict:
        """After a pass: its objective, and the largest violation that any server has seen in it."""
        converged = relative_change(self._objective, objective) <= self._tolerance
        self._objective = objective
        if not self._on or (converged and self._whole):
            return Verdict(stop=converged)
        self._whole = converged
        return Verdict(reactivate=converged, theta=self._ratio * violation / self._examples)
