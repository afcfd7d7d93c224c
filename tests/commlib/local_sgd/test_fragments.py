"""Fragments: how a model is cut, and that a part of it is that part."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from commlib.local_sgd.fragments import cut
from commlib.runtime.layers import SubModel, layer_specs


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.data())
def test_fragments_are_of_about_as_many_bytes_in_order_and_none_is_empty(sizes: list[int], data: st.DataObject) -> None:
    parameters = {f"{i}.weight": nn.Parameter(torch.empty(n)) for i, n in enumerate(sizes)}
    parts = cut(parameters, data.draw(st.integers(1, len(sizes))))
    assert [n for part in parts for n in part] == list(parameters)
    assert all(parts)
    fair = sum(sizes) / len(parts)
    assert max(sum(p.numel() for p in part.values()) for part in parts) <= 2 * fair + 2 * max(sizes)


def test_layers_of_one_size_are_cut_evenly() -> None:
    parameters = {f"{i}.weight": nn.Parameter(torch.empty(7)) for i in range(8)}
    assert [len(part) for part in cut(parameters, 4)] == [2, 2, 2, 2]


def test_a_layers_parameters_stay_together() -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    assert [list(part)[::2] for part in cut(dict(model.named_parameters()), 2)] == [
        ["0.weight", "1.weight"],
        ["2.weight", "3.weight"],
    ]


@pytest.mark.parametrize("fragments", [0, 2])
def test_more_fragments_than_layers_are_refused(fragments: int) -> None:
    with pytest.raises(ValueError, match=f"cut in 1 to 1 fragments, not {fragments}"):
        cut(dict(nn.Linear(2, 2).named_parameters()), fragments)


def test_a_part_has_its_parameters_as_the_model_names_and_knows_them() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    whole = {spec.name: spec for spec in layer_specs(model)}
    part = layer_specs(SubModel(model, ["1.weight", "2.weight"]))
    assert [whole[spec.name] for spec in part] == part
    assert [spec.name for spec in part] == ["1.weight", "2.weight"]
