"""A generated problem: few features occur often, most of them seldom, and few matter."""

from __future__ import annotations

import dataclasses

import torch

from .rows import Rows


@dataclasses.dataclass(frozen=True)
class Generated:
    """Settings of generated examples; the same seed gives the same ones.

    The r-th most frequent feature is drawn with probability ∝ (r + 10)^-power, as words of a text are; rows are of
    length 1, as a text's are after tf-idf. Labels follow the logistic model of the true weights.

    Args:
        examples: rows.
        features: keys, shuffled: their numbers say nothing about how frequent they are.
        drawn: features drawn for an example; those drawn twice count once.
        power: of the frequencies' law.
        true: features whose true weight is not 0, among the ten times as many that are most frequent.
        strength: standard deviation of these weights.
        seed: of everything.
    """

    examples: int = 8_000
    features: int = 40_000
    drawn: int = 60
    power: float = 1.0
    true: int = 200
    strength: float = 12.0
    seed: int = 0

    def rows(self) -> Rows:
        """Examples that were made."""
        draws = torch.Generator().manual_seed(self.seed)
        names = torch.randperm(self.features, generator=draws)
        ranks = torch.arange(self.features, dtype=torch.float64)
        frequency = (ranks + 10).pow_(-self.power).cumsum_(0)
        places = torch.rand((self.examples, self.drawn), dtype=torch.float64, generator=draws) * frequency[-1]
        keys = names[torch.searchsorted(frequency, places).clamp_(max=self.features - 1)].sort(dim=1).values
        new = torch.ones_like(keys, dtype=torch.bool)
        new[:, 1:] = keys[:, 1:] != keys[:, :-1]
        values = torch.randn(keys.shape, generator=draws).abs_().add_(0.1).mul_(new)
        values /= values.norm(dim=1, keepdim=True)
        weights = torch.zeros(self.features)
        among = names[torch.randperm(min(10 * self.true, self.features), generator=draws)[: self.true]]
        weights[among] = self.strength * torch.randn(among.numel(), generator=draws)
        starts = torch.zeros(self.examples + 1, dtype=torch.int64)
        starts[1:] = new.sum(1).cumsum(0)
        unlabelled = Rows(starts, keys[new], values[new], torch.ones(self.examples), self.features)
        chance = torch.sigmoid(unlabelled.margins(weights))
        drawn = torch.rand(self.examples, dtype=torch.float64, generator=draws)
        labels = torch.where(drawn < chance, 1.0, -1.0)
        return dataclasses.replace(unlabelled, labels=labels)
