"""Layer lists: the published sizes, known names, and models of one's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from commlib.bench.models.shapes import layers
from commlib.bench.models.simulated import Replay

OWN = """
import torch
number = 3
def module():
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    net[0].bias.requires_grad_(False)
    return net
def pairs():
    return [("a.weight", [3, 4]), ("a.bias", (4,)), ("scale", ())]
def five(): return 5
def text(): return "a.weight"
def nothing(): return []
def half(): return [("a", (2,)), "b"]
def empty(): return [("a", (0, 2))]
def unnamed(): return [(1, (2, 2))]
"""


@pytest.fixture
def own(users_module: Callable[[str, str], Path]) -> None:
    users_module("own_nets", OWN)


@pytest.mark.parametrize(
    ("model", "parameters", "tensors"),
    [
        ("vgg19", 143_667_240, 38),
        ("resnet50", 25_557_032, 161),
        ("gpt2-small", 124_439_808, 148),
        ("bert-large", 335_141_888, 391),
    ],
)
def test_sizes_are_the_published_ones(model: str, parameters: int, tensors: int) -> None:
    found = layers(model)
    assert sum(math.prod(shape) for _, shape in found) == parameters
    assert len(found) == len({name for name, _ in found}) == tensors


@pytest.mark.parametrize(
    ("model", "name", "shape"),
    [
        ("vgg19", "features.34.weight", (512, 512, 3, 3)),
        ("vgg19", "classifier.0.weight", (4096, 25088)),
        ("resnet50", "layer2.0.downsample.0.weight", (512, 256, 1, 1)),
        ("resnet50", "layer4.2.conv3.weight", (2048, 512, 1, 1)),
        ("resnet50", "fc.bias", (1000,)),
        ("gpt2-small", "transformer.h.11.attn.c_attn.weight", (768, 2304)),
        ("gpt2-small", "transformer.h.0.mlp.c_proj.bias", (768,)),
        ("bert-large", "encoder.layer.23.output.dense.weight", (1024, 4096)),
        ("bert-large", "embeddings.token_type_embeddings.weight", (2, 1024)),
    ],
)
def test_names_and_shapes_are_those_of_the_libraries(model: str, name: str, shape: tuple[int, ...]) -> None:
    assert dict(layers(model))[name] == shape


def test_a_module_can_be_made_of_them() -> None:
    model = Replay(layers("resnet50"))
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == dict(layers("resnet50"))


@pytest.mark.usefixtures("own")
def test_a_model_of_ones_own_is_found_in_the_current_directory() -> None:
    assert layers("own_nets:module") == [("0.weight", (4, 3)), ("1.weight", (2, 4)), ("1.bias", (2,))]
    assert layers("own_nets:pairs") == [("a.weight", (3, 4)), ("a.bias", (4,)), ("scale", ())]


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("resnet5", r"unknown model 'resnet5' \(known: .*did you mean 'resnet50'\?\); your own: module:factory"),
        ("own_nets:", "is module:factory, got 'own_nets:'"),
        ("own_net:module", "cannot import 'own_net'"),
        ("own_nets:modul", "unknown attribute 'modul'.*did you mean 'module'"),
        ("own_nets:number", "number is no callable but of type int"),
        ("own_nets:five", "returned int, and should"),
        ("own_nets:text", "returned str, and should"),
        ("own_nets:nothing", "has no parameters"),
        ("own_nets:half", r"'b' is no \(name, shape\) pair"),
        ("own_nets:empty", "whole sizes of at least 1"),
        ("own_nets:unnamed", "a text and whole sizes"),
    ],
)
def test_what_was_wrong_is_named(model: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        layers(model)
