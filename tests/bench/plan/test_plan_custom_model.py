"""Models of one's own: what is counted, and what is said when they cannot be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from commlib.bench.plan.custom_model import own, parse_example

OWN = """
import torch
from torch import nn
number = 3
class Net(nn.Module):
    '''A convolution, a linear layer called twice, a head tied to the embedding, a product of its own.'''
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.unused = nn.Linear(2, 2)
        self.norm = nn.LayerNorm(16)
        self.fc = nn.Linear(16, 16)
        self.head = nn.Linear(16, 100, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(16, 16))
    def forward(self, tokens):
        x = self.fc(self.fc(self.norm(self.embedding(tokens))))
        return self.head(x @ self.scale)
def net(): return Net()
def conv(): return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                                 nn.BatchNorm1d(8), nn.Linear(8, 4))
def frozen():
    net = nn.Linear(3, 4)
    return net.requires_grad_(False)
def half_frozen():
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    net[0].bias.requires_grad_(False)
    return net
def here(): return nn.Linear(3, 4, device="cpu")
def norm(): return nn.LayerNorm(3)
def pairs(): return [("a.weight", (3, 4))]
def needs(width): return nn.Linear(width, 4)
def item(): return nn.Linear(3, int(torch.tensor(4).item()))
"""


@pytest.fixture(autouse=True)
def nets(users_module: Callable[[str, str], Path]) -> None:
    users_module("planned_nets", OWN)


def test_flops_rows_and_parameters_of_every_layer() -> None:
    model = own("planned_nets:net", "int:8")
    found = {x.name: x for x in model.layers}
    assert list(found) == ["Net", "embedding", "norm", "fc", "head"]
    assert found["Net"].flops == 2 * 8 * 16 * 16  # the product outside of any inner module
    assert found["Net"].parameters == 16 * 16 + 6  # its own, and of the module that is not called
    assert found["embedding"].parameters == 100 * 16
    fc = found["fc"]
    assert (fc.kind, fc.inputs, fc.outputs, fc.parameters) == ("linear", 16, 16, 16 * 16 + 16)
    assert (fc.rows, fc.flops) == (2 * 8, 2 * 2 * 8 * 16 * 16)  # called twice
    head = found["head"]
    assert (head.linear, head.parameters, head.flops) == (False, 0, 2 * 8 * 16 * 100)
    assert model.example == "int:8"


def test_a_network_of_images_with_norms() -> None:
    model = own("planned_nets:conv", "3, 10, 10")
    assert [(x.kind, x.parameters, x.flops, x.rows) for x in model.layers] == [
        ("conv", 3 * 8 * 9 + 8, 2 * 8 * 8 * 3 * 8 * 9, 0),
        ("norm", 16, 0, 0),
        ("norm", 16, 0, 0),
        ("linear", 36, 2 * 8 * 4, 1),
    ]


def test_a_linear_layer_that_attach_would_leave_alone_is_no_linear_layer_here() -> None:
    first, second = own("planned_nets:half_frozen", "3").layers
    assert (first.linear, first.parameters) == (False, 12)
    assert second.linear


def test_a_model_that_says_its_device_itself() -> None:
    assert own("planned_nets:here", "3").parameters == 16


@pytest.mark.parametrize(
    ("name", "example", "said"),
    [
        ("planned_nets:net", None, r"say what one example looks like.*--input 3,224,224 \(or int:128"),
        ("planned_nets:net", "3x4", "--input is the shape of one example, as 3,224,224, or int:128"),
        ("planned_nets:net", "3,0", "--input is the shape of one example"),
        ("planned_nets:net", "float:3", "--input is the shape of one example"),
        ("planned_nets:net", "8", r"cannot be run on the meta device with 2 examples of --input 8 \(.*whole numbers"),
        ("planned_nets:conv", "4,10,10", "cannot be run on the meta device.*is that its shape"),
        ("planned_nets:", "3", "module:factory, got 'planned_nets:'"),
        ("planned_net:net", "3", "cannot import 'planned_net'"),
        ("planned_nets:nets", "3", "unknown attribute 'nets'.*did you mean 'net'"),
        ("planned_nets:number", "3", "number is no callable but of type int"),
        ("planned_nets:pairs", "3", "returned list; a plan needs an nn.Module"),
        ("planned_nets:needs", "3", r"the factory failed on the meta device \(TypeError: .*width"),
        ("planned_nets:item", "3", "the factory failed on the meta device"),
        ("planned_nets:frozen", "3", "has no parameters that are trained"),
        ("planned_nets:norm", "3", "has no matrix product or convolution"),
    ],
)
def test_what_was_wrong_is_named_in_one_line(name: str, example: str | None, said: str) -> None:
    with pytest.raises(ValueError, match=said) as e:
        own(name, example)
    assert "\n" not in str(e.value)


def test_examples() -> None:
    assert parse_example("3,224,224") == ((3, 224, 224), torch.float32)
    assert parse_example("int:128") == ((128,), torch.int64)
