"""The race under FSDP2: what is sharded by itself, who may race, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from commlib.bench.training.fsdp import COMMLIB, Sharded, check_options, choose, split
from commlib.bench.training.models import MODELS
from commlib.bench.training.workloads import LEAST, Replaying, Training, units
from commlib.groups.world import World
from tests.support.rank_pool import Fleet


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("fc", ["0", "2", "4"]),
        ("conv", ["4", "8", "12", "16", "19", "23"]),
        ("gpt", [f"blocks.{i}" for i in range(4)]),
        ("gpt-small", [f"blocks.{i}" for i in range(3)]),
    ],
)
def test_blocks_and_large_layers_are_sharded_by_themselves(model: str, expected: list[str]) -> None:
    with torch.device("meta"):
        module = MODELS[model].module()
    assert units(module) == expected
    sizes = [sum(p.numel() for p in module.get_submodule(name).parameters()) for name in expected]
    assert min(sizes) >= LEAST
    assert sum(sizes) > 0.7 * sum(p.numel() for p in module.parameters())  # the root's come before any pass


def test_every_model_of_the_race_is_in_that_table() -> None:
    assert set(MODELS) == {"fc", "conv", "gpt", "gpt-small"}


def test_what_lies_in_a_unit_belongs_to_it() -> None:
    inner = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200))
    assert units(nn.Sequential(inner, nn.Linear(5, 5))) == ["0"]
    assert units(nn.ModuleDict({"a": inner, "b": nn.ModuleList([nn.Linear(200, 200)])})) == ["a.0", "a.1", "b.0"]
    assert units(nn.Linear(200, 200)) == []  # all of it is the root's


@pytest.mark.parametrize(
    ("spec", "gradients", "parameters"),
    [
        ("int8", "int8", None),
        ("int8+int8", "int8", "int8"),
        ("none + bf16", "none", "bf16"),
        ("topk:ratio=0.1,values=int8", "topk:ratio=0.1,values=int8", None),
        ("topk:ratio=0.1,values=int8+int4", "topk:ratio=0.1,values=int8", "int4"),
        ("topk:ratio=1e-2+int8", "topk:ratio=1e-2", "int8"),
        ("topk:ratio=1e+0", "topk:ratio=1e+0", None),  # the plus of a number parts nothing
        ("topk:ratio=1e+0+int8", "topk:ratio=1e+0", "int8"),
        ("onebit@reduce_scatter+fp16", "onebit@reduce_scatter", "fp16"),
        ("lossy:onebit+int8", "lossy:onebit+int8", None),
        ("lossy:onebit+int8+lossy:bf16+int8", "lossy:onebit+int8", "lossy:bf16+int8"),
        ("int8+lossy:int8", "int8", "lossy:int8"),
        ("auto+int8", "auto", "int8"),
    ],
)
def test_gradients_and_parameters_are_parted_at_the_plus(spec: str, gradients: str, parameters: str | None) -> None:
    assert split(spec) == (gradients, parameters)


@pytest.mark.parametrize("spec", ["int8+", "+int8", "int8+int8+int8", "", "+", "int8+ "])
def test_a_plus_has_one_codec_on_each_side(spec: str) -> None:
    with pytest.raises(ValueError, match=r"GRADIENTS or GRADIENTS\+PARAMETERS"):
        split(spec)


def test_the_baseline_comes_first_and_only_what_changes_nothing_is_exact() -> None:
    every = choose((), (), 4)
    assert [c.name for c in every] == ["fsdp2", *COMMLIB]
    assert [c.by for c in every] == ["pytorch", *["commlib"] * len(COMMLIB)]
    assert {c.name for c in every if c.exact} == {"fsdp2", "none"}
    assert not any(c.managed or c.places for c in every)
    asked = choose(("none+none", "none+int8", "int8+none", "dense"), (), 2)
    assert {c.name: c.exact for c in asked} == {
        "fsdp2": True,
        "none+none": True,
        "none+int8": False,
        "int8+none": False,
        "dense": True,
    }


def test_those_that_are_measured_settle_before_they_are_timed() -> None:
    asked = choose(("auto", "lossy:int8+onebit", "none+lossy:int8", "int8+int8"), (), 2)
    assert [(c.name, c.managed, c.exact) for c in asked[1:]] == [
        ("auto", True, True),
        ("lossy:int8+onebit", True, False),
        ("none+lossy:int8", True, False),
        ("int8+int8", False, False),
    ]


def test_those_asked_for_race_and_the_baseline_does_in_any_case() -> None:
    assert [c.name for c in choose((), ("int8+int8",), 2)] == ["fsdp2", "int8+int8"]
    assert [c.name for c in choose((), ("fsdp2",), 2)] == ["fsdp2"]
    assert [c.name for c in choose((), (), 2, quick=True)] == ["fsdp2", "none", "int8", "int8+int8", "onebit+int8"]
    assert [c.name for c in choose(("bf16+bf16",), (), 2, quick=True)] == ["fsdp2", "bf16+bf16"]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("lossy:powersgd", "cannot be shared out by rows"),
        ("lossy:", "names no codec"),
        ("int8+lossy:qsgd", "draws at random"),
        ("placed", "layers are placed under DDP only"),
        ("placed:head+blocks.*+more", "layers are placed under DDP only"),
        ("factors", "the rows of a layer's input are not caught under FSDP2"),
        ("owners", "not caught under FSDP2"),
        ("push_pull", "parameter servers are of DDP only"),
        ("torch-fp16", "it is DDP's"),
        ("fsdp2", "it is the baseline"),
        ("powersgd:rank=4", "cannot be shared out by rows"),
        ("onebit@gather", "by no other exchange"),
        ("onebitt", "did you mean 'onebit'"),
        ("int8+onebitt", "did you mean 'onebit'"),
        ("int8+qsgd", "draws at random"),
        ("int8+int8@gather", "names an exchange"),
        ("int8+int8+int8", "a codec each, as int8"),
    ],
)
def test_what_is_not_for_fsdp2_is_refused_and_says_why(spec: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"^--comm ") as raised:
        choose(("int8", spec), (), 2)
    assert said in str(raised.value)
    assert repr(spec) in str(raised.value)


@pytest.mark.parametrize(
    ("comm", "only", "said"),
    [
        (("int8", "int8"), (), "--comm 'int8' is given twice"),
        ((), ("torch-fp16",), "--only torch-fp16: it is DDP's"),
        ((), ("ddp",), "--only ddp: it is DDP's"),
        ((), ("int8+int9",), "did you mean 'int8\\+int8'"),
    ],
)
def test_names_that_are_not_known_are_named(comm: tuple[str, ...], only: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        choose(comm, only, 2)


PLAIN: dict[str, Any] = {"backward_s": None, "limit": None, "hierarchy": False, "buckets": {}}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"backward_s": 0.0}, "--compute simulated does not go with --fsdp2"),
        ({"limit": "50mbit"}, "--limit does not go with --fsdp2"),
        ({"hierarchy": True}, "--hierarchy does not go with --fsdp2"),
        ({"buckets": {"bucket_cap_mb": 1.0}}, "--bucket-cap-mb does not go with --fsdp2"),
        ({"buckets": {"gradient_as_bucket_view": True}}, "--gradient-as-bucket-view does not go with --fsdp2"),
    ],
)
def test_options_of_ddp_alone_are_refused(given: dict[str, Any], said: str) -> None:
    check_options(**PLAIN)
    with pytest.raises(ValueError, match=f"{said}: .*leave one of them out"):
        check_options(**PLAIN | given)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--compute", "simulated:50"], "--compute simulated does not go with --fsdp2"),
        (["--limit", "50mbit"], "--limit does not go"),
        (["--hierarchy"], "--hierarchy does not go"),
        (["--bucket-cap-mb", "1"], "--bucket-cap-mb does not go"),
        (["--comm", "lossy:powersgd"], "cannot be shared out by rows"),
        (["--only", "torch-fp16"], "there is no DDP with --fsdp2"),
        (["--ranks", "1"], "it takes --ranks 2"),
    ],
)
def test_the_command_refuses_in_one_line(call: Callable[..., tuple[int, str, str]], args: list[str], said: str) -> None:
    code, out, err = call("bench", "train", "--fsdp2", *args)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert said in err
    assert len(err.splitlines()) == 1


def looked(world: World) -> list[bool]:
    """Whether, after a step and a look at the loss: parameters are DTensors, as before; they moved; the loss fell."""
    course = Training("gpt-small", 2, torch.device("cpu"))
    model, comm = Sharded("fsdp2", "pytorch", True).wrap(course, dist.group.WORLD, 10.0)
    before = [p.to_local().clone() for p in model.parameters() if isinstance(p, DTensor)]
    course.step(model)
    found = course.evidence()
    after = [p.to_local() for p in model.parameters() if isinstance(p, DTensor)]
    every = comm is None and len(before) == len(after) == len(list(model.parameters()))
    moved = sum(not torch.equal(a, b) for a, b in zip(before, after, strict=False))
    return [every, moved > len(before) / 2, (found.last or 0.0) < (found.first or 0.0)]


def test_a_look_at_the_loss_leaves_the_root_sharded(fleet: Fleet) -> None:
    assert fleet.run(2, looked) == [[True] * 3] * 2  # else the next step would have less to gather


def simulated(world: World) -> str:
    course = Replaying("gpt-small", 0.0, torch.device("cpu"), 2)
    try:
        Sharded("fsdp2", "pytorch", True).wrap(course, dist.group.WORLD, 10.0)
    except ValueError as e:
        return str(e)
    return "no error"


def test_a_simulated_model_cannot_be_sharded(fleet: Fleet) -> None:
    (said,) = fleet.run(1, simulated)
    assert "use --compute real" in said
