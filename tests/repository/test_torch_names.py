"""Nothing is used that the oldest torch lacks: pyproject.toml promises it, and few have it at hand to try."""

from __future__ import annotations

import ast
import re

import pytest

from tests.support import torch_names

GUARDED = {"get_group_store": "handshake.store_of has another way"}
"""What torch has got since, and is asked for only where it is there."""


def test_the_record_is_of_the_torch_that_is_promised() -> None:
    (oldest,) = re.findall(r'"torch>=([\d.]+)"', (torch_names.ROOT / "pyproject.toml").read_text())
    assert torch_names.RECORD.name == f"torch_{oldest}.txt"


def test_every_name_of_torch_was_there_in_the_oldest_torch() -> None:
    record = torch_names.recorded()
    unknown = {
        f"{path.relative_to(torch_names.ROOT)}: {name}"
        for path in torch_names.sources()
        for name in torch_names.chains(ast.parse(path.read_text()))
        for home, step in torch_names.homes(name)
        if step not in record.get(home, ())
    }
    assert not unknown, f"not in {torch_names.RECORD.name} (or a new module or class: make test-torch27 writes it anew)"


@pytest.mark.full
def test_nothing_is_asked_of_torchs_objects_that_they_have_got_since() -> None:
    record = torch_names.recorded()
    old = set().union(*record.values())
    newer = {name for home in torch_names.CLASSES for name in torch_names.names_in(home)} - old - set(GUARDED)
    asked = {
        f"{path.relative_to(torch_names.ROOT)}: {name}"
        for path in torch_names.sources()
        for name in torch_names.attributes(ast.parse(path.read_text())) & newer
    }
    assert not asked


def test_what_a_module_uses_is_found_whatever_it_calls_it() -> None:
    code = """
import os
import torch.distributed as dist
from torch import Tensor, nn as n
dist.a.b(n.c)
Tensor.d
x.e.f
os.g, self.h
"""
    tree = ast.parse(code)
    assert torch_names.chains(tree) == {
        *("torch.distributed", "torch.distributed.a", "torch.distributed.a.b"),
        *("torch.nn", "torch.nn.c", "torch.Tensor", "torch.Tensor.d"),
    }
    assert torch_names.attributes(tree) == set("abcdefg")
