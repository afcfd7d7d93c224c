"""Layer tables of known models: published sizes and FLOPs, and equal to those of the modules built with PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from commlib.bench.plan.custom_model import count
from commlib.bench.plan.known_models import MODELS, inception_v3, known
from commlib.bench.plan.model import LayeredModel, ModelLayer
from commlib.bench.plan.table import briefly, groups


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("vgg19", 143_667_240),
        ("vgg19-22k", 143_667_240 - 1000 * 4097 + 21841 * 4097),
        ("resnet50", 25_557_032),
        ("inception-v3", 27_161_264),
        ("gpt2", 124_439_808),
        ("bert-large", 335_141_888),
    ],
)
def test_parameters_are_the_published_ones(name: str, parameters: int) -> None:
    assert known(name).parameters == parameters


def test_inception_without_its_auxiliary_classifier() -> None:
    found = list(inception_v3(auxiliary=False))
    assert sum(x.parameters for x in found) == 23_834_568
    assert sum(x.flops for x in found) / 2e9 == pytest.approx(5.71, abs=0.005)


@pytest.mark.parametrize(("name", "gmac"), [("vgg19", 19.6), ("resnet50", 4.09), ("inception-v3", 5.7)])
def test_flops_are_the_published_ones(name: str, gmac: float) -> None:
    assert known(name).flops / 2e9 == pytest.approx(gmac, rel=0.005)


@pytest.mark.parametrize("name", MODELS)
def test_layers_have_names_of_their_own_and_linear_ones_have_rows_and_a_weight(name: str) -> None:
    layers = known(name).layers
    assert len({x.name for x in layers}) == len(layers)
    for x in layers:
        assert x.linear == (x.rows > 0) == (x.kind == "linear")
        if x.linear:
            assert x.flops == 2 * x.inputs * x.outputs * x.rows
            assert x.parameters in (x.inputs * x.outputs, x.inputs * x.outputs + x.outputs)


def test_rows_are_one_for_a_classifier_and_the_positions_for_a_transformer() -> None:
    assert {x.rows for x in known("vgg19").linear} == {1}
    assert {x.rows for x in known("gpt2", 100).linear} == {100}
    assert {x.name: x.rows for x in known("bert-large", 100).linear}["pooler.dense"] == 1


def test_the_tied_head_of_gpt2_computes_and_has_no_gradient_of_its_own() -> None:
    head = known("gpt2", 10).layers[-1]
    assert (head.parameters, head.flops, head.linear) == (0, 2 * 768 * 50257 * 10, False)


def test_vgg19_is_what_pytorch_counts() -> None:
    parts: list[nn.Module] = []
    channels = 3
    for width, depth in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        for _ in range(depth):
            parts += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        parts.append(nn.MaxPool2d(2))
    with torch.device("meta"):
        top = [nn.Linear(25088, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout()]
        net = nn.Sequential(nn.Sequential(*parts), nn.Flatten(), nn.Sequential(*top, nn.Linear(4096, 1000)))
    counted = count(net.to("meta"), torch.zeros(2, 3, 224, 224, device="meta"))
    expected = known("vgg19").layers
    assert [figures(x) for x in counted] == [figures(x) for x in expected]


def test_a_block_of_bert_is_what_pytorch_counts() -> None:
    with torch.device("meta"):
        block = nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True)
    counted = count(block, torch.zeros(2, 512, 1024, device="meta"))
    expected = [x for x in known("bert-large").layers if ".layer.7." in x.name]
    assert sum(x.flops for x in counted) == sum(x.flops for x in expected)
    assert sum(x.parameters for x in counted) == sum(x.parameters for x in expected)


def figures(x: ModelLayer) -> tuple[object, ...]:
    return x.kind, x.parameters, x.flops, x.inputs, x.outputs, x.rows


@pytest.mark.parametrize(
    ("name", "positions", "said"),
    [
        ("vgg16", None, r"unknown model 'vgg16' \(known: .*did you mean 'vgg19'\?\); your own: module:factory"),
        ("gpt2", 1025, "--positions of gpt2 must be from 1 to 1024, got 1025"),
        ("bert-large", 0, "--positions of bert-large must be from 1 to 512, got 0"),
        ("vgg19", 128, "--positions is for gpt2 and bert-large"),
    ],
)
def test_what_was_wrong_is_named(name: str, positions: int | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        known(name, positions)


def test_equal_layers_of_all_blocks_are_one_group() -> None:
    found = {g.name: len(g.layers) for g in groups(known("bert-large").linear)}
    assert found["encoder.layer.*.attention.self.query"] == 24
    assert found["pooler.dense"] == 1
    assert [g.name for g in groups(known("vgg19").linear)] == ["classifier.0", "classifier.3", "classifier.6"]


def test_some_layers_of_a_group_are_counted() -> None:
    layers = known("gpt2", 1).linear
    all_first = {x.name for x in layers if x.name.endswith("c_attn")}
    assert briefly(all_first, layers) == "transformer.h.*.attn.c_attn"
    assert briefly({"transformer.h.3.attn.c_attn"}, layers) == "1 of 12 transformer.h.*.attn.c_attn"
    assert briefly((), layers) == ""


def test_numbers_that_all_have_in_common_stay_in_the_name() -> None:
    made = [ModelLayer(f"stage2.block{i}.fc", "linear", 4, 8, 2, 2, 1) for i in range(3)]
    assert [g.name for g in groups(LayeredModel("m", tuple(made), "", 1).linear)] == ["stage2.block*.fc"]
