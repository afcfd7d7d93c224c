"""``random_skip``: each value is sent with a given probability."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from commlib.codecs.filter import Content, Filter, Receiving, Sending
from commlib.compressors.filters.significance import Dropping, Nothing, check_finite


@dataclasses.dataclass(frozen=True)
class RandomSkip(Filter):
    """Each entry is sent with probability ``keep``, drawn anew for every message.

    What is sent is divided by ``keep``: unbiased with ω = 1/keep - 1, E‖C(x) - x‖² = ω‖x‖². With ``ef`` it is sent as
    it is, and what is not waits on the sender and is added to the next value of its key: Σ sent + residual = Σ given,
    but for float32's rounding. Keys that were None become int64 where some are left out.

    Random skip filter of Li et al. (OSDI 2014), who do not say whether they scale; ``ef`` is our own.

    Args:
        keep: in (0, 1].
        ef: error feedback instead of scaling.
    """

    keep: float = 0.5
    ef: bool = False

    name = "random_skip"
    reads = frozenset({"keys", "values"})

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ValueError(f"random_skip: keep must be in (0, 1], got {self.keep!r}")
        object.__setattr__(self, "unbiased", not self.ef)

    def sender(self, size: int, seed: int) -> Sending:
        draws = torch.Generator().manual_seed(seed)
        return _Feedback(self, size, draws) if self.ef else _Scaled(self, draws)

    def receiver(self, size: int) -> Receiving:
        return Nothing(self.name)


class _Scaled(Sending):
    def __init__(self, options: RandomSkip, draws: torch.Generator) -> None:
        self._options, self._draws = options, draws

    def encode(self, content: Content) -> Content:
        values = content.values / self._options.keep
        check_finite(self._options.name, values)
        sent = _drawn(self._options.keep, values, self._draws)
        return dataclasses.replace(content, values=values).only(sent).push(None)


class _Feedback(Dropping):
    def __init__(self, options: RandomSkip, size: int, draws: torch.Generator) -> None:
        super().__init__(options.name, size)
        self._keep, self._draws = options.keep, draws

    def choose(self, values: Tensor) -> Tensor:
        return _drawn(self._keep, values, self._draws)


def _drawn(keep: float, values: Tensor, draws: torch.Generator) -> Tensor:
    """Bool (n,), each true with probability ``keep``: float64, whose 53 bits make that exact enough for any."""
    return torch.rand(values.shape, generator=draws, dtype=torch.float64) < keep
