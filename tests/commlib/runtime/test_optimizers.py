"""The user's optimizer, as shards make it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from commlib.runtime.optimizers import recipes


def test_every_parameter_has_the_options_of_its_group() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(
        [
            {"params": model[0].parameters(), "lr": 0.5},
            {"params": model[1].parameters(), "weight_decay": 0.0, "betas": (0.5, 0.6)},
        ],
        lr=0.1,
    )
    found = recipes(optimizer, dict(model.named_parameters()))
    assert set(found) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    made = found["1.weight"].make([nn.Parameter(torch.zeros(2))])
    assert isinstance(made, torch.optim.AdamW)
    (group,) = made.param_groups
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.1, 0.0, (0.5, 0.6))
    assert found["0.bias"].options["lr"] == 0.5


def test_an_optimizer_that_looks_at_a_whole_matrix_is_told_from_one_that_does_not() -> None:
    model = nn.Linear(4, 4, bias=False)
    assert recipes(torch.optim.SGD(model.parameters(), lr=1.0), dict(model.named_parameters()))["weight"].by_element
    own = type("SGD", (torch.optim.SGD,), {})(model.parameters(), lr=1.0)
    for optimizer in (torch.optim.Adafactor(model.parameters()), own):
        assert not recipes(optimizer, dict(model.named_parameters()))["weight"].by_element


def test_frozen_parameters_need_not_be_in_the_optimizer_and_others_must() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.SGD([model.weight], lr=1.0)
    assert set(recipes(optimizer, dict(model.named_parameters()))) == {"weight"}
    model.bias.requires_grad_(True)
    with pytest.raises(ValueError, match="the optimizer lacks bias"):
        recipes(optimizer, dict(model.named_parameters()))


def test_parameters_of_another_model_are_refused() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=1.0)
    with pytest.raises(ValueError, match="parameters that are not the model's"):
        recipes(optimizer, dict(model.named_parameters()))
