"""What the hook says to wrong input, on every rank, and that it says it instead of hanging."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.groups.world import World
from tests.support.rank_pool import Fleet

PATIENT = 600
"""Seconds that who attaches may wait for the others: longer than the fleet waits for a job. So none here has waited."""

# -- models, and what is caught ------------------------------------------------------------------


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


def with_frozen() -> nn.Module:
    model = mlp()
    model[2].weight.requires_grad_(False)  # type: ignore[index]
    model.register_parameter("count", nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False))
    return model


def all_frozen() -> nn.Module:
    return mlp().requires_grad_(False)


class Renamed(nn.Module):
    """The shapes of ``mlp``, in the same order, under other names."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


@dataclasses.dataclass
class Caught:
    """An error as a rank met it."""

    kind: str
    family: list[str]
    text: str


def caught(action: Callable[[], Any]) -> Caught | None:
    try:
        action()
    except Exception as e:
        return Caught(type(e).__name__, [k.__name__ for k in type(e).__mro__], str(e))
    return None


def wrap(model: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, **options)


def backward(ddp: nn.Module, rank: int = 0) -> None:
    gen = torch.Generator().manual_seed(100 + rank)
    ddp(torch.randn(8, 24, generator=gen)).square().mean().backward()


def check(error: Caught | None, kind: str, *parts: str) -> None:
    assert error is not None, f"nothing was raised; expected {kind}"
    assert error.kind == kind, f"{error.kind}: {error.text}"
    for part in parts:
        assert re.search(part, error.text), f"{part!r} is not in {error.text!r}"


# -- arguments that every rank gets wrong ---------------------------------------------------------

SPECS = {
    "onebitt": ("ValueError", r"unknown compressor 'onebitt'", r"known: .*onebit.*topk", r"did you mean 'onebit'\?"),
    "": ("ValueError", r"unknown compressor ''"),
    "topk:ratio=0": ("ValueError", "topk", "ratio", "0"),
    "topk:ratio=2": ("ValueError", "topk", "ratio", "2"),
    "topk:ratio=nan": ("ValueError", "topk", "ratio", "nan"),
    "topk:ratio=many": ("ValueError", "topk", "ratio must be a number", "'many'"),
    "topk:ration=0.1": ("ValueError", "unknown option 'ration'", "did you mean 'ratio'"),
    "powersgd:rank=0": ("ValueError", "powersgd", "rank must be at least 1", "0"),
    "powersgd:rank=1.5": ("ValueError", "rank must be a whole number", "'1.5'"),
    "onebit@gathr": ("ValueError", "unknown exchange 'gathr'", "did you mean 'gather'"),
    "topk@dense": ("ValueError", "topk cannot go over dense", "use gather"),
    "onebit@low_rank": ("ValueError", "onebit cannot go over low_rank", "powersgd"),
    "powersgd@scatter_gather": ("ValueError", "powersgd cannot go over scatter_gather", "basis", "use gather"),
    "dgc@scatter_gather": ("ValueError", "dgc.* cannot go over scatter_gather", "use gather"),
}
OPTIONS: dict[str, tuple[Any, ...]] = {
    "dense_steps=-1": ({"dense_steps": -1}, "ValueError", "dense_steps must be a whole number", "-1"),
    "dense_steps=True": ({"dense_steps": True}, "ValueError", "dense_steps must be a whole number", "True"),
    "dense_steps=1.0": ({"dense_steps": 1.0}, "ValueError", "dense_steps must be a whole number", "1.0"),
    "min_size=-1": ({"min_size": -1}, "ValueError", "min_size must be a whole number", "-1"),
    "min_size=False": ({"min_size": False}, "ValueError", "min_size must be a whole number", "False"),
    "min_size=0.5": ({"min_size": 0.5}, "ValueError", "min_size must be a whole number", "0.5"),
    "min_size='1k'": ({"min_size": "1k"}, "ValueError", "min_size must be a whole number", "'1k'"),
    "scaler=2.0": ({"scaler": 2.0}, "TypeError", "scaler must be a torch.amp.GradScaler, got float"),
    "scaler=class": ({"scaler": object()}, "TypeError", "scaler must be a torch.amp.GradScaler, got object"),
    "no such option": ({"ratio": 0.1}, "TypeError", "unexpected keyword argument 'ratio'"),
}
RULES: dict[str, tuple[Callable[[], nn.Module], Any, str, tuple[str, ...]]] = {
    "matches nothing": (
        mlp,
        {"2.wieght": "onebit"},
        "ValueError",
        (r"rule '2.wieght' matches no trained parameter", r"there are: 0.weight, ", r"did you mean '2.weight'\?"),
    ),
    "pattern matches nothing": (mlp, {"encoder.*": "onebit"}, "ValueError", (r"rule 'encoder.\*' matches no",)),
    "names a frozen parameter": (
        with_frozen,
        {"2.weight": "onebit"},
        "TypeError",
        (r"rule '2.weight'", r"is frozen \(requires_grad=False\)", "no gradient"),
    ),
    "names an integer parameter": (with_frozen, {"count": "onebit"}, "TypeError", ("rule 'count'", "torch.int64")),
    "auto for some layers": (mlp, {"2.*": "auto"}, "ValueError", ("'auto' chooses for all layers", "give it alone")),
    "is no rule": (mlp, {"2.weight": 3}, "TypeError", ("int",)),
    "pattern is no text": (mlp, {2: "onebit"}, "TypeError", ("pattern", "2")),
    "a list of rules": (mlp, ["onebit"], "TypeError", ("list",)),
    "None": (mlp, None, "TypeError", ("NoneType",)),
    "unknown codec in a rule": (mlp, {"2.weight": "onebitt"}, "ValueError", ("did you mean 'onebit'",)),
}


def all_wrong(world: World) -> dict[str, Caught | None]:
    """Every wrong argument in turn, on both ranks; and a good attach after each, so that none leaves a trace."""
    found: dict[str, Caught | None] = {}
    ddp = wrap(mlp())

    def attempt(title: str, target: Any, rule: Any, **options: Any) -> None:
        found[title] = caught(lambda: commlib.attach(target, rule, timeout=PATIENT, **options))

    for spec in SPECS:
        attempt(spec, ddp, spec)
    for title, (options, *_) in OPTIONS.items():
        attempt(title, ddp, "onebit", **options)
    for title, (model, rule, *_) in RULES.items():
        attempt(title, wrap(model()), rule)
    # the DDP model on which all that was tried is as it was
    attempt("a good attach afterwards", ddp, "onebit", min_size=0)
    found["trains afterwards"] = caught(lambda: backward(ddp, world.rank))
    attempt("attach after attach", ddp, "onebit")
    other = wrap(mlp())
    other.register_comm_hook(None, someone_elses_hook)
    attempt("attach after another hook", other, "onebit")
    attempt("plain module", mlp(), "onebit")
    attempt("wrapped in Sequential", nn.Sequential(wrap(mlp())), "onebit")
    attempt("no module", "onebit", ddp)
    tied = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 9))
    tied[1].weight = tied[0].weight
    attempt("sparse embedding, tied", wrap(tied), "none")
    found["nothing trained, DDP"] = caught(lambda: wrap(all_frozen()))
    found["nothing trained"] = caught(lambda: commlib.HookState(all_frozen(), "onebit", timeout=PATIENT))
    found["empty model"] = caught(lambda: commlib.HookState(nn.Sequential(), "onebit", timeout=PATIENT))
    return found


def someone_elses_hook(state, bucket):
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@pytest.fixture(scope="module")
def wrong(fleet: Fleet) -> list[dict[str, Caught | None]]:
    """What each of two ranks caught, by title."""
    return fleet.run(2, all_wrong)


@pytest.mark.parametrize("spec", SPECS)
def test_a_bad_spec_names_what_is_wrong_and_what_would_be_right(wrong: list[dict[str, Caught | None]], spec: str):
    kind, *parts = SPECS[spec]
    for found in wrong:
        check(found[spec], kind, *parts)


@pytest.mark.parametrize("title", OPTIONS)
def test_a_bad_option_is_named_with_its_value(wrong: list[dict[str, Caught | None]], title: str):
    _, kind, *parts = OPTIONS[title]
    for found in wrong:
        check(found[title], str(kind), *map(str, parts))


@pytest.mark.parametrize("title", RULES)
def test_a_bad_rule_is_named(wrong: list[dict[str, Caught | None]], title: str):
    _, _, kind, parts = RULES[title]
    for found in wrong:
        check(found[title], kind, *parts)


@pytest.mark.parametrize(
    ("title", "kind", "parts"),
    [
        ("plain module", "TypeError", ("DistributedDataParallel, got Sequential", "wrap the model first")),
        ("wrapped in Sequential", "TypeError", ("DistributedDataParallel, got Sequential",)),
        ("no module", "TypeError", ("DistributedDataParallel, got str",)),
        ("attach after attach", "ValueError", ("attached already", r"comm\.swap\(…\)", r"comm\.detach\(\)")),
        ("attach after another hook", "ValueError", (r"already has a communication hook \(someone_elses_hook\)",)),
        ("sparse embedding, tied", "ValueError", ("0.weight is of an embedding with sparse=True", "set sparse=False")),
        ("nothing trained, DDP", "RuntimeError", ("requires a gradient",)),
        ("nothing trained", "ValueError", ("no parameter that requires a gradient",)),
        ("empty model", "ValueError", ("no parameter that requires a gradient",)),
    ],
)
def test_what_cannot_be_attached_says_why(
    wrong: list[dict[str, Caught | None]], title: str, kind: str, parts: tuple[str, ...]
):
    for found in wrong:
        check(found[title], kind, *parts)


def test_no_mistake_waits_for_the_time_out_or_leaves_a_trace(wrong: list[dict[str, Caught | None]]):
    for found in wrong:
        assert found["a good attach afterwards"] is None
        assert found["trains afterwards"] is None
        waited = [title for title, error in found.items() if error is not None and f"within {PATIENT} s" in error.text]
        assert waited == []


def test_without_torch_distributed_the_error_says_to_initialise_it():
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match=r"not initialised: call torch\.distributed\.init_process_group"):
        commlib.HookState(nn.Linear(4, 4), "onebit")


def test_attach_to_a_bare_module_without_torch_distributed_asks_for_ddp():
    with pytest.raises(TypeError, match=r"needs a torch\.nn\.parallel\.DistributedDataParallel, got Linear"):
        commlib.attach(nn.Linear(4, 4), "onebit")


# -- ranks that disagree ---------------------------------------------------------------------------


def on_one_rank(world: World, odd: int, common: Any, other: Any) -> Any:
    return other if world.rank == odd else common


def disagree(world: World) -> dict[str, Caught | None]:
    """Rank 1 of 3 does otherwise than the others."""
    found: dict[str, Caught | None] = {}

    def attempt(title: str, rule: Any = "onebit", model: Callable[[], nn.Module] = mlp, **options: Any) -> None:
        ddp = wrap(model())
        options.setdefault("timeout", PATIENT)
        found[title] = caught(lambda: commlib.attach(ddp, rule, **options))

    attempt("codec", on_one_rank(world, 1, "onebit", "topk:ratio=0.1"))
    attempt("an option of the codec", on_one_rank(world, 1, "topk:ratio=0.1", "topk:ratio=0.2"))
    attempt("exchange", on_one_rank(world, 1, "onebit@gather", "onebit@scatter_gather"))
    attempt("dense_steps", dense_steps=on_one_rank(world, 1, 0, 7))
    attempt("seed", seed=on_one_rank(world, 1, 0, 5))
    attempt("min_size", min_size=on_one_rank(world, 1, 0, 5000))
    attempt("names", model=on_one_rank(world, 1, mlp, Renamed))
    attempt("a bad spec", on_one_rank(world, 1, "onebit", "onebitt"))
    attempt("a bad option", min_size=on_one_rank(world, 1, 0, -1))
    ddp = wrap(mlp())
    found["good"] = caught(lambda: commlib.attach(ddp, "onebit", min_size=0, timeout=PATIENT))
    found["trains"] = caught(lambda: backward(ddp, world.rank))
    return found


@pytest.fixture(scope="module")
def disagreement(fleet: Fleet) -> list[dict[str, Caught | None]]:
    """What each of three ranks caught, by title."""
    return fleet.run(3, disagree)


@pytest.mark.parametrize(
    ("title", "common", "other"),
    [
        ("codec", "onebit@", "topk:ratio=0.1@"),
        ("an option of the codec", "topk:ratio=0.1@", "topk:ratio=0.2@"),
        ("exchange", "onebit@gather", "onebit@scatter_gather"),
        ("dense_steps", "dense_steps", "'7'"),
        ("seed", "seed", "'5'"),
        ("min_size", "onebit@", "none@dense"),
        ("names", r"0\.weight: rank", "32x24 float32"),
    ],
)
def test_ranks_that_disagree_all_hear_of_it_at_attach_with_both_sides_named(
    disagreement: list[dict[str, Caught | None]], title: str, common: str, other: str
):
    for rank, found in enumerate(disagreement):
        error = found[title]
        check(error, "PlanMismatch", common, rf"rank {rank} has .*rank {0 if rank == 1 else 1} has")
        assert error is not None
        assert re.search(other, error.text), error.text
        assert "CommlibError" in error.family


@pytest.mark.parametrize(
    ("title", "kind", "reason"), [("a bad spec", "ValueError", "onebitt"), ("a bad option", "ValueError", "min_size")]
)
def test_the_others_hear_at_once_why_one_rank_could_not_attach(
    disagreement: list[dict[str, Caught | None]], title: str, kind: str, reason: str
):
    check(disagreement[1][title], kind, reason)
    for rank in (0, 2):
        error = disagreement[rank][title]
        check(error, "PlanMismatch", "rank 1", "failed", reason)


def one_rank_without_ddp(world: World) -> Caught | None:
    ddp = wrap(mlp())
    given = on_one_rank(world, 1, ddp, ddp.module)
    return caught(lambda: commlib.attach(given, "onebit", timeout=10))


def test_the_others_do_not_hang_when_one_rank_passes_no_ddp_model(fleet: Fleet):
    first, odd, third = fleet.run(3, one_rank_without_ddp)
    check(odd, "TypeError", "wrap the model first")
    for error in (first, third):
        assert error is not None
        assert error.kind in ("PeerLost", "PlanMismatch"), f"{error.kind}: {error.text}"
        assert "rank 1" in error.text
        assert error.kind == "PlanMismatch" or "within 10 s" in error.text


def group_of_other_ranks(world: World) -> Caught | None:
    foreign = dist.new_group([0, 2])
    ddp = wrap(mlp())
    given = foreign if world.rank != 1 else None
    return caught(lambda: commlib.attach(ddp, "onebit", process_group=given, timeout=PATIENT))


def test_a_group_of_other_ranks_is_refused_with_both_lists_and_the_others_hear_of_it(fleet: Fleet):
    first, odd, third = fleet.run(3, group_of_other_ranks)
    for error in (first, third):
        check(error, "ValueError", r"ranks \[0, 2\]", r"\[0, 1, 2\]", "the same ranks")
    check(odd, "PlanMismatch", "rank [02]", "failed", "same ranks")


def attach_again(world: World) -> tuple[Caught | None, Caught | None, Caught | None]:
    """Rank 1's model has a hook already; then all attach to a fresh model."""
    hooked, plain = wrap(mlp()), wrap(mlp())
    commlib.attach(hooked, "onebit", timeout=PATIENT)
    first = caught(lambda: commlib.attach(on_one_rank(world, 1, plain, hooked), "onebit", timeout=PATIENT))
    fresh = wrap(mlp())
    second = caught(lambda: commlib.attach(fresh, "onebit", min_size=0, timeout=PATIENT))
    return first, second, caught(lambda: backward(fresh, world.rank))


def test_when_one_ranks_model_has_a_hook_already_the_others_hear_of_it_and_can_attach_to_another(fleet: Fleet):
    ranks = fleet.run(2, attach_again)
    check(ranks[1][0], "ValueError", "attached already")
    check(ranks[0][0], "PlanMismatch", "rank 1", "attached already")
    for _, attached, trains in ranks:
        assert attached is None
        assert trains is None


def test_after_every_disagreement_the_ranks_still_agree_on_the_next_attach(
    disagreement: list[dict[str, Caught | None]],
):
    for found in disagreement:
        assert found["good"] is None
        assert found["trains"] is None


def one_never_comes(world: World) -> Caught | None:
    ddp = wrap(mlp())
    if world.rank == 2:
        return None
    return caught(lambda: commlib.attach(ddp, "onebit", timeout=10))


def test_a_rank_that_never_attaches_is_named_within_the_time_out(fleet: Fleet):
    first, second, absent = fleet.run(3, one_never_comes)
    assert absent is None
    for error in (first, second):
        check(error, "PeerLost", "rank 2 of 3 did not attach within 10 s", "same order")


# -- state dicts -----------------------------------------------------------------------------------


def trained(world: World, rule: Any = "onebit@scatter_gather", model: Callable[[], nn.Module] = mlp) -> Any:
    ddp = wrap(model())
    comm = commlib.attach(ddp, rule, min_size=0, timeout=PATIENT)
    for _ in range(3):
        backward(ddp, world.rank)
    return comm


def tensors_of(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    return [t for key in sorted(state) for t in tensors_of(state[key])] if isinstance(state, dict) else []


def spoilt(good: dict[str, Any], rank: int) -> dict[str, Any]:
    """State dicts that must not be loaded, by what is wrong with them."""
    mine = str(rank)

    def changed(**keys: Any) -> dict[str, Any]:
        return {**copy.deepcopy(good), **keys}

    def without(key: str) -> dict[str, Any]:
        return {k: v for k, v in copy.deepcopy(good).items() if k != key}

    layer = next(iter(good["ranks"][mine]))
    slot = next(iter(good["ranks"][mine][layer]))
    wrong_shape, no_value, surplus = (copy.deepcopy(good) for _ in range(3))
    wrong_shape["ranks"][mine][layer][slot]["value"] = torch.zeros(3)
    del no_value["ranks"][mine][layer][slot]["value"]
    surplus["ranks"][mine]["no.such.layer"] = surplus["ranks"][mine][layer]
    return {
        "wrong format": changed(format=2),
        "no format": without("format"),
        "a list": [good],
        "None": None,
        "a model's state dict": mlp().state_dict(),
        "only a format": {"format": good["format"]},
        "no layers": without("layers"),
        "no ranks": without("ranks"),
        "no step": without("step"),
        "no routes": without("routes"),
        "no world_size": without("world_size"),
        "another model": changed(layers={"other.weight": "3x3 float32"}),
        "ranks missing for another world size": changed(world_size=5),
        "a value of another shape": wrong_shape,
        "an entry without value": no_value,
        "a layer that is not there": surplus,
    }


def loads(world: World) -> dict[str, Any]:
    comm = trained(world)
    good = comm.state_dict()
    found: dict[str, Any] = {}
    for title, state in spoilt(good, world.rank).items():
        error = caught(lambda state=state: comm.load_state_dict(state))  # type: ignore[misc]
        now = comm.state_dict()
        same = now["step"] == good["step"] and [t.tolist() for t in tensors_of(now)] == [
            t.tolist() for t in tensors_of(good)
        ]
        found[title] = error, same
        comm.load_state_dict(good)
    return found


MUST_NAME = {
    "wrong format": ("not a commlib state dict of format 1", "found 2"),
    "no format": ("not a commlib state dict of format 1",),
    "a list": ("not a commlib state dict of format 1", "list"),
    "None": ("not a commlib state dict of format 1", "NoneType"),
    "a model's state dict": ("not a commlib state dict of format 1",),
    "only a format": ("layers",),
    "no layers": ("layers",),
    "no ranks": ("ranks",),
    "no step": ("step",),
    "no routes": ("routes",),
    "no world_size": ("world_size",),
    "another model": ("checkpoint of another model", r"other\.weight: 3x3 float32 there, absent here"),
    "ranks missing for another world size": ("of 5, loaded by rank", "merge_state_dicts", "missing: rank"),
    "a value of another shape": (r"0\.(weight|bias)", "shape|size"),
    "an entry without value": (r"0\.(weight|bias)", "value"),
    "a layer that is not there": (r"no\.such\.layer",),
}


@pytest.fixture(scope="module")
def loaded(fleet: Fleet) -> list[dict[str, Any]]:
    """By what is wrong with a state dict: the error, and whether the state is as before."""
    return fleet.run(3, loads)


@pytest.mark.parametrize("title", MUST_NAME)
def test_a_state_dict_that_does_not_fit_is_refused_and_changes_nothing(loaded: list[dict[str, Any]], title: str):
    for found in loaded:
        error, unchanged = found[title]
        check(error, "CheckpointMismatch", *MUST_NAME[title])
        assert unchanged, f"{error.text}, but residuals or the step count changed"


def merges(world: World) -> dict[str, Caught | None]:
    """All parts on rank 0."""
    comm = trained(world)
    parts: list[Any] = [None] * world.size
    dist.all_gather_object(parts, comm.state_dict())
    later: list[Any] = [{**p, "step": p["step"] + 1} for p in parts]
    merged = commlib.merge_state_dicts(parts)
    return {
        "good": caught(lambda: comm.load_state_dict(merged)),
        "nothing": caught(lambda: commlib.merge_state_dicts([])),
        "steps": caught(lambda: commlib.merge_state_dicts([parts[0], later[1]])),
        "world sizes": caught(lambda: commlib.merge_state_dicts([parts[0], {**parts[1], "world_size": 7}])),
        "routes": caught(lambda: commlib.merge_state_dicts([parts[0], {**parts[1], "routes": {}}])),
        "layers": caught(lambda: commlib.merge_state_dicts([parts[0], {**parts[1], "layers": {}}])),
        "formats": caught(lambda: commlib.merge_state_dicts([parts[0], {**parts[1], "format": 9}])),
        "twice": caught(lambda: commlib.merge_state_dicts([parts[0], parts[1], parts[1]])),
        "garbage": caught(lambda: commlib.merge_state_dicts([{"weight": torch.ones(2)}])),
        "no dict": caught(lambda: commlib.merge_state_dicts([parts[0], None])),  # type: ignore[list-item]
    }


@pytest.fixture(scope="module")
def merged(fleet: Fleet) -> dict[str, Caught | None]:
    """What rank 0 caught."""
    caught_by_rank: list[dict[str, Caught | None]] = fleet.run(2, merges)
    return caught_by_rank[0]


@pytest.mark.parametrize(
    ("title", "kind", "parts"),
    [
        ("nothing", "ValueError", ("no state dicts to merge", "every rank")),
        ("steps", "CheckpointMismatch", ("different runs", "step is 3 in one and 4 in another")),
        ("world sizes", "CheckpointMismatch", ("different runs", "world_size is 2 in one and 7 in another")),
        ("routes", "CheckpointMismatch", ("different runs", "routes")),
        ("layers", "CheckpointMismatch", ("different runs", "layers")),
        ("formats", "CheckpointMismatch", ("format",)),
        ("twice", "CheckpointMismatch", ("rank 1 is there twice",)),
        ("garbage", "CheckpointMismatch", ("not a commlib state dict",)),
        ("no dict", "CheckpointMismatch", ("not a commlib state dict", "NoneType")),
    ],
)
def test_state_dicts_that_do_not_belong_together_are_not_merged(
    merged: dict[str, Caught | None], title: str, kind: str, parts: tuple[str, ...]
):
    assert merged["good"] is None
    check(merged[title], kind, *parts)


# -- after close() -----------------------------------------------------------------------------------


def train_after_close(world: World) -> dict[str, Any]:
    ddp = wrap(mlp())
    comm = commlib.attach(ddp, "onebit@scatter_gather", min_size=0, timeout=PATIENT)
    backward(ddp, world.rank)
    comm.close()
    comm.close()
    steps = comm.stats().steps
    error = caught(lambda: backward(ddp, world.rank))
    after = comm.stats().steps
    comm.close()
    return {"steps": steps, "error": error, "after": after, "state": len(comm.state_dict())}


def test_training_after_close_works_or_says_that_it_is_closed(fleet: Fleet):
    for found in fleet.run(2, train_after_close):
        assert found["steps"] == 1
        assert found["state"] > 0
        if found["error"] is None:
            assert found["after"] == 2
        else:
            check(found["error"], "RuntimeError", "closed")


def frozen_between(world: World) -> str:
    ddp = DistributedDataParallel(mlp(), find_unused_parameters=True)
    ddp.module[2].weight.requires_grad_(False)
    commlib.attach(ddp, "onebit", timeout=PATIENT)
    try:
        ddp(torch.randn(4, 24)).sum().backward()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "no error"


def test_a_parameter_frozen_between_ddp_and_attach_is_named_by_its_shape(fleet: Fleet) -> None:
    for said in fleet.run(2, frozen_between):
        assert "shape (32, 32) that was frozen when commlib was attached" in said


def one_scaler(world: World) -> str:
    ddp = DistributedDataParallel(mlp())
    scaler = torch.amp.GradScaler("cpu") if world.rank == 0 else None
    try:
        commlib.attach(ddp, "onebit", scaler=scaler, timeout=PATIENT)
    except commlib.PlanMismatch as e:
        return str(e)
    return "no error"


def test_a_scaler_on_one_rank_only_is_a_mismatch(fleet: Fleet) -> None:
    for said in fleet.run(2, one_scaler):
        assert "scaler: rank" in said
        assert "'given'" in said
        assert "'none'" in said


# -- what is refused by name ----------------------------------------------------------------------


def builtin(world: World, rule: str) -> list[str]:
    """What attach() says beside a hook in C++, twice; and swap() on a model that has been given one meanwhile."""
    said = []
    ddp = DistributedDataParallel(mlp())
    ddp._register_builtin_comm_hook(c10d.BuiltinCommHookType.FP16_COMPRESS)
    for _ in range(2):
        with pytest.raises(ValueError, match="hook") as caught:
            commlib.attach(ddp, rule, min_size=0)
        said.append(str(caught.value))
    late = DistributedDataParallel(mlp())
    comm = commlib.attach(late, "none")
    late._register_builtin_comm_hook(c10d.BuiltinCommHookType.FP16_COMPRESS)
    before = {str(p.route) for p in comm.plan}
    with pytest.raises(ValueError, match="hook") as caught:
        comm.swap("onebit")
    said.append(str(caught.value))
    assert {str(p.route) for p in comm.plan} == before  # the old plan stays
    comm.close()
    return said


@pytest.mark.parametrize("rule", ["none", "onebit", "auto"])
def test_a_hook_in_cpp_is_refused_by_name_and_leaves_nothing_behind(fleet: Fleet, rule: str) -> None:
    for said in fleet.run(2, builtin, rule):
        assert all("already has a communication hook (BuiltinCommHookType.FP16_COMPRESS)" in s for s in said)
        assert all("new DistributedDataParallel" in s for s in said)


def failing(world: World) -> bool:
    """PyTorch refuses the hook in the last moment; then the model can be attached to."""
    ddp = DistributedDataParallel(mlp())
    register = ddp.register_comm_hook

    def refused(*_: Any) -> None:
        raise RuntimeError("not this time")

    vars(ddp)["register_comm_hook"] = refused
    with pytest.raises(RuntimeError, match="not this time"):
        commlib.attach(ddp, "onebit", min_size=0)
    vars(ddp)["register_comm_hook"] = register
    comm = commlib.attach(ddp, "onebit", min_size=0)
    ddp(torch.ones(2, 24)).sum().backward()
    comm.close()
    return comm.stats().steps == 1


def test_a_failed_attach_leaves_nothing_behind(fleet: Fleet) -> None:
    assert fleet.run(2, failing) == [True, True]


def another_group(world: World, rule: str) -> str:
    ddp = DistributedDataParallel(mlp())
    comm = commlib.attach(ddp, rule, min_size=0)
    ddp(torch.ones(2, 24)).sum().backward()
    ddp._update_process_group(dist.new_group())
    with pytest.raises((ValueError, RuntimeError)) as caught:
        ddp(torch.ones(2, 24)).sum().backward()
    comm.close()
    return str(caught.value)


@pytest.mark.parametrize("rule", ["none", "onebit", "factors", "auto"])
def test_another_process_group_under_the_model_is_refused_by_name(fleet: Fleet, rule: str) -> None:
    for said in fleet.run(2, another_group, rule):
        assert "_update_process_group" in said
        assert "comm.detach()" in said


def joined(world: World, rule: str) -> tuple[str, int]:
    """What Join says when it is to divide by the ranks that are left; and the steps it made otherwise."""
    ddp = DistributedDataParallel(mlp())
    comm = commlib.attach(ddp, rule, min_size=0)
    with pytest.raises(ValueError, match="Join") as caught:
        ddp.join(divide_by_initial_world_size=False)
    with ddp.join():
        for _ in range(2 + world.rank):
            ddp(torch.ones(2, 24)).sum().backward()
    steps = comm.stats().steps
    comm.detach()
    ddp.join(divide_by_initial_world_size=False)  # DDP's own again
    return str(caught.value), steps


@pytest.mark.parametrize("rule", ["none", "onebit", "auto"])
def test_join_that_divides_by_the_ranks_that_are_left_is_refused_by_name(fleet: Fleet, rule: str) -> None:
    for said, steps in fleet.run(2, joined, rule):
        assert "Join(divide_by_initial_world_size=False)" in said
        assert steps == 3
