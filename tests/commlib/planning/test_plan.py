"""Plans as files: what is saved comes back, what cannot be read says why, and a pinned plan fits its model."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import commlib
from commlib.codecs import registry
from commlib.codecs.base import Kind, LayerSpec
from commlib.compressors.none import Identity
from commlib.planning.plan import Plan, PlannedLayer, diff, from_text, load, pin, save, to_text
from commlib.planning.planner import make_plan
from commlib.planning.route import Route, Rules, resolve
from commlib.runtime.layers import layer_specs
from tests.support.tiny_ddp import PAIRS

SMALL_DGC = "heavyball:momentum=0.5,nesterov=on,clip=0.25@dense"  # a layer under dgc that stays dense
TIMES = st.none() | st.floats(-1e12, 1e12)
PAST = st.none() | st.floats(0, 1e12)
WORDS = st.text(max_size=30)


def route_of(text: str, world: int) -> Route:
    """Any of PAIRS; and what dgc hands out."""
    if not text.startswith("heavyball"):
        return resolve(text, world)
    form = registry.make("dgc:momentum=0.5,nesterov=on,clip=0.25").dense_form()
    assert form is not None
    return Route("dense", form)


@st.composite
def planned_layers(draw: st.DrawFn, world: int) -> PlannedLayer:
    spec = LayerSpec(
        draw(st.text(min_size=1, max_size=12)),
        tuple(draw(st.lists(st.integers(0, 3000), max_size=4))),
        draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e5m2])),
        kind=draw(st.sampled_from(get_args(Kind))),
        rows=draw(st.none() | st.integers(0, 1 << 40)),
    )
    route = route_of(draw(st.sampled_from([*PAIRS, SMALL_DGC, "qsgd:ef=on", "topk:ratio=0.12345678901@gather"])), world)
    return PlannedLayer(spec, route, route, draw(WORDS), draw(TIMES), draw(PAST))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    world = draw(st.integers(1, 64))
    layers = draw(st.lists(planned_layers(world), max_size=6))
    return Plan({p.spec.name: p for p in layers}, world, draw(WORDS))


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 48), nn.LayerNorm(48), nn.Linear(48, 5))


SPECS = tuple(layer_specs(network()))
NAMES = ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]


def plan_for(rules: Rules, world: int = 4, min_size: int = 100) -> Plan:
    return make_plan(SPECS, rules, world=world, min_size=min_size)


def measured(plan: Plan) -> Plan:
    """As a manager leaves it: with rows, times and a line about it."""
    layers = {
        n: dataclasses.replace(p, spec=dataclasses.replace(p.spec, rows=32), predicted_s=0.25, measured_s=0.5)
        for n, p in plan.layers.items()
    }
    return Plan(layers, plan.world, "predicted 3.2 ms a step")


def changed(**fields: Any) -> str:
    """A plan's text with other fields at its top; None takes one out."""
    return json.dumps({k: v for k, v in {**json.loads(to_text(plan_for("onebit"))), **fields}.items() if v is not None})


def changed_layer(**fields: Any) -> str:
    """A plan's text with other fields in its first layer; None takes one out."""
    layers = json.loads(to_text(plan_for("onebit")))["layers"]
    layers[0] = {k: v for k, v in {**layers[0], **fields}.items() if v is not None}
    return changed(layers=layers)


# -- there and back ---------------------------------------------------------------------------------


@given(plans())
def test_what_is_saved_comes_back(plan: Plan) -> None:
    again = from_text(to_text(plan), "here")
    assert (again.world, again.about, list(again.layers)) == (plan.world, plan.about, list(plan.layers))
    for p, q in zip(plan, again, strict=True):
        assert q.spec == p.spec
        assert (q.route, q.reason) == (p.route, p.reason)
        assert (q.predicted_s, q.measured_s) == (p.predicted_s, p.measured_s)
    assert to_text(again) == to_text(plan)
    assert diff(plan, again) == "no difference"


@pytest.mark.parametrize("rules", ["onebit", "dgc", "dgc:momentum=0.5,clip=1", "powersgd", "qsgd", {"0.*": "topk"}])
def test_a_model_s_plan_comes_back_with_its_dense_routes_and_prints_alike(rules: Rules) -> None:
    plan = plan_for(rules)
    again = from_text(to_text(plan), "here")
    assert [p.dense for p in again] == [p.dense for p in plan]
    assert str(again) == str(plan)


def test_layers_come_back_on_the_cpu_and_tied_to_no_linear_layer() -> None:
    plan = plan_for("factors")
    there = Plan({n: dataclasses.replace(p, spec=_on_meta(p.spec)) for n, p in plan.layers.items()}, 4)
    specs = [p.spec for p in from_text(to_text(there), "here")]
    assert {s.device for s in specs} == {torch.device("cpu")}
    assert {s.layer for s in specs} == {None}


def _on_meta(spec: LayerSpec) -> LayerSpec:
    return dataclasses.replace(spec, device=torch.device("meta"))


def test_a_file_says_who_wrote_it_and_what_is_not_known_in_it() -> None:
    found = json.loads(to_text(plan_for("onebit", world=3)))
    assert {k: v for k, v in found.items() if k != "layers"} == {
        "schema": 1,
        "commlib": commlib.__version__,
        "world_size": 3,
        "about": "",
    }
    assert found["layers"][0] == {
        "name": "0.weight",
        "shape": [48, 64],
        "dtype": "float32",
        "kind": "linear.weight",
        "route": "onebit@scatter_gather",
        "reason": "rule '*'",
        "predicted_s": None,
        "measured_s": None,
    }


def test_a_time_that_is_not_finite_is_left_out() -> None:
    plan = plan_for("none")
    odd = Plan(
        {n: dataclasses.replace(p, predicted_s=math.nan, measured_s=math.inf) for n, p in plan.layers.items()}, 4
    )
    assert from_text(to_text(odd), "here").layers["0.weight"].predicted_s is None
    assert "NaN" not in to_text(odd)
    assert "Infinity" not in to_text(odd)


def test_a_file_may_leave_out_what_is_not_known_and_the_exchange() -> None:
    text = changed_layer(rows=None, predicted_s=None, measured_s=None, route="onebit")
    assert str(from_text(text, "here").layers["0.weight"].route) == "onebit@scatter_gather"


@dataclasses.dataclass(frozen=True)
class Homemade(Identity):
    name = "homemade"


def test_a_plan_whose_codec_is_not_installed_is_not_saved(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save(plan_for("onebit"), path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"cannot be saved: layer '.*'.*'homemade@gather'.*unknown compressor"):
        save(plan_for(Route("gather", Homemade())), path)
    assert path.read_bytes() == before


# -- files ------------------------------------------------------------------------------------------


def test_a_file_comes_back_and_nothing_else_is_left_in_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save(plan_for("onebit"), path)
    save(plan_for("qsgd"), str(path))
    assert diff(load(path), plan_for("qsgd")) == "no difference"
    assert os.listdir(tmp_path) == ["plan.json"]


def no_space(*args: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def half(path: Path, text: str, **options: Any) -> None:
    with path.open("w") as out:
        out.write(text[: len(text) // 2])
    no_space()


def interrupted(*args: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("where", "name", "fails", "raised"),
    [
        (Path, "write_text", half, OSError),
        (os, "replace", no_space, OSError),
        (os, "replace", interrupted, KeyboardInterrupt),
    ],
)
def test_the_old_file_stays_where_writing_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: Any,
    name: str,
    fails: Callable[..., None],
    raised: type[BaseException],
) -> None:
    path = tmp_path / "plan.json"
    save(plan_for("onebit"), path)
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(where, name, fails)
        with pytest.raises(raised) as caught:
            save(plan_for("qsgd"), path)
    if isinstance(caught.value, OSError):
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none" / "plan.json"
    with pytest.raises(FileNotFoundError, match="is no folder; make it first") as caught:
        save(plan_for("onebit"), path)
    assert caught.value.filename == str(path)
    assert str(path) in str(caught.value)


def test_a_file_where_the_folder_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="is no folder"):
        save(plan_for("onebit"), tmp_path / "file" / "plan.json")


def test_a_folder_in_the_file_s_place_stays(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        save(plan_for("onebit"), path)
    assert caught.value.filename == str(path)
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_file_is_as_readable_as_any_other(tmp_path: Path) -> None:
    save(plan_for("onebit"), tmp_path / "plan.json")
    (tmp_path / "other").touch()
    assert (tmp_path / "plan.json").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_file_that_is_not_there_is_an_os_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"plan\.json"):
        load(tmp_path / "plan.json")


@pytest.mark.parametrize("data", [b"", b"\xff\xfe\x00", b"PK\x03\x04\x80", b'{"schema": 1,'])
def test_a_file_of_another_kind_is_named_and_not_json(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "plan.json").write_bytes(data)
    with pytest.raises(ValueError, match=r"plan\.json is not JSON"):
        load(tmp_path / "plan.json")


# -- what cannot be read ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "here is not JSON"),
        ("{", "here is not JSON.*line 1"),
        ("<<<<<<< HEAD\n" + "{}", "here is not JSON"),
        ("[" * 100_000, "here is not JSON"),
        ("[]", "here is no plan that commlib has saved"),
        ("null", "here is no plan that commlib has saved"),
        ('{"layers": []}', "here is no plan that commlib has saved"),
        (changed(schema=2), r"here has schema 2; commlib .* reads schema 1"),
        (changed(schema=True), "here has schema True"),
        (changed(schema=1.0), r"here has schema 1\.0"),
        (changed(schema="1"), "here has schema '1'"),
        (changed(layers=None), "here: layers must be a list, and is missing"),
        (changed(layers={}), "layers must be a list, got {}"),
        (changed(world_size=0), "world_size must be a whole number > 0, got 0"),
        (changed(world_size=True), "world_size must be a whole number > 0, got True"),
        (changed(world_size="4"), "world_size must be a whole number > 0, got '4'"),
        (changed(about=3), "about must be a text, got 3"),
        (changed(commlib=None), "commlib must be a text, and is missing"),
        (changed(abuot=""), "unknown field 'abuot'.*did you mean 'about'"),
        (changed(layers=[3]), "layer 1 must be an object, got 3"),
        (changed(layers=[{}]), "layer 1: name must be a text, and is missing"),
        (changed(layers=2 * json.loads(changed())["layers"]), "here: layer '0.weight' is there twice"),
        (changed_layer(name=None), "here: layer 1: name must be a text, and is missing"),
        (changed_layer(name=["fc"]), "name must be a text"),
        (changed_layer(shape="48x64"), r"layer '0\.weight': shape must be a list of whole numbers ≥ 0, got '48x64'"),
        (changed_layer(shape=[48, -1]), "shape must be"),
        (changed_layer(shape=[48, 64.0]), "shape must be"),
        (changed_layer(shape=[True]), "shape must be"),
        (changed_layer(dtype="int8"), "dtype must be a floating-point dtype such as float32, got 'int8'"),
        (changed_layer(dtype="complex64"), "dtype must be"),
        (changed_layer(dtype=[]), "dtype must be"),
        (changed_layer(kind="linear"), "kind must be one of linear.weight, .*got 'linear'"),
        (changed_layer(kind={}), "kind must be"),
        (changed_layer(reason=None), "reason must be a text, and is missing"),
        (changed_layer(reason=3), "reason must be a text, got 3"),
        (changed_layer(rows=-1), "rows must be a whole number ≥ 0, or null, got -1"),
        (changed_layer(rows=2.5), "rows must be"),
        (changed_layer(predicted_s="1 ms"), "predicted_s must be seconds or null, got '1 ms'"),
        (changed_layer(predicted_s=math.nan), "predicted_s must be seconds or null, got nan"),
        (changed_layer(measured_s=math.inf), "measured_s must be seconds ≥ 0 or null, got inf"),
        (changed_layer(measured_s=math.nan), "measured_s must be seconds ≥ 0 or null, got nan"),
        (changed_layer(measured_s=-0.5), r"layer '0\.weight': measured_s must be seconds ≥ 0 or null, got -0\.5"),
        (changed_layer(measured_s=10**400), "measured_s must be seconds ≥ 0 or null, got 1000"),
        (changed_layer(measured_s=True), "measured_s must be seconds ≥ 0 or null, got True"),
        (changed(world_size=-4), "world_size must be a whole number > 0, got -4"),
        (changed(local_size=1), "local_size must be a whole number > 1, or null, got 1"),
        (changed_layer(measured=1.0), "unknown field 'measured'.*did you mean 'measured_s'"),
        (changed_layer(route=None), "route must be a text, and is missing"),
        (
            changed_layer(route="onebitt@gather"),
            r"layer '0\.weight': no route 'onebitt@gather': .*did you mean 'onebit'",
        ),
        (changed_layer(route="onebit@gathr"), r"layer '0\.weight': .*unknown exchange 'gathr'"),
        (changed_layer(route="onebit:axis=up@gather"), "axis must be column or tensor"),
        (changed_layer(route="onebit@dense"), "cannot be summed by an all-reduce"),
        (changed_layer(route="heavyball:momentum=3@dense"), "unknown compressor 'heavyball'"),
        (changed_layer(route="heavyball@gather"), "unknown compressor 'heavyball'"),
        (changed_layer(route="@dense"), "unknown compressor ''"),
        (changed_layer(route=""), "unknown compressor ''"),
    ],
)
def test_a_text_that_is_no_plan_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        from_text(text, "here")
    assert str(caught.value).startswith("here")
    assert len(str(caught.value)) < 400


# -- pinned to a model ------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", ["none", "onebit", "dgc", "powersgd:rank=2", "factors", {"0.*": "factors"}])
def test_a_saved_plan_pins_its_own_model(rules: Rules) -> None:
    plan = plan_for(rules, min_size=0)
    pinned = pin(from_text(to_text(plan), "here"), SPECS, 4)
    assert list(pinned.layers) == NAMES
    assert pinned.world == 4
    for old, new in zip(plan, pinned, strict=True):
        assert new.spec == old.spec  # its linear layer included
        assert (new.route, new.dense) == (old.route, old.dense)
        assert new.reason == f"pinned: {old.reason}"
    assert diff(plan, pinned) == "no difference"
    assert plan.describe() == pinned.describe()


def test_layers_come_in_the_model_s_order_on_its_device() -> None:
    specs = [_on_meta(s) for s in reversed(SPECS)]
    pinned = pin(plan_for("onebit"), specs, 4)
    assert list(pinned.layers) == NAMES[::-1]
    assert [p.spec for p in pinned] == specs


def test_pinning_twice_says_so_once() -> None:
    once = pin(measured(plan_for("onebit")), SPECS, 4)
    assert once.about == "pinned: predicted 3.2 ms a step"
    assert pin(once, SPECS, 4) == once
    nothing_said = pin(plan_for("onebit").because("", ""), SPECS, 4)
    assert {p.reason for p in pin(nothing_said, SPECS, 4)} == {"pinned"}


def test_rows_and_predictions_are_taken_over_and_measurements_are_not() -> None:
    layer = pin(measured(plan_for("factors")), SPECS, 4).layers["0.weight"]
    assert (layer.spec.rows, layer.predicted_s, layer.measured_s) == (32, 0.25, None)
    known = [dataclasses.replace(s, rows=8) for s in SPECS]
    assert pin(measured(plan_for("factors")), known, 4).layers["0.weight"].spec.rows == 8


@pytest.mark.parametrize(("made_for", "said"), [(4, "planned for 4 ranks"), (1, "planned for 1 rank")])
def test_a_plan_for_another_number_of_ranks_keeps_its_routes_and_says_so(made_for: int, said: str) -> None:
    plan = measured(plan_for("int8", world=made_for))
    pinned = pin(plan, SPECS, 2)
    assert pinned.world == 2
    assert [p.route for p in pinned] == [p.route for p in plan]
    assert pinned.layers["0.weight"].reason == f"pinned: {said}: rule '*'"
    assert pinned.layers["0.weight"].predicted_s is None


def without(name: str) -> list[LayerSpec]:
    return [s for s in SPECS if s.name != name]


def altered(name: str, **fields: Any) -> list[LayerSpec]:
    return [dataclasses.replace(s, **fields) if s.name == name else s for s in SPECS]


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (without("1.bias"), r"another model: 1\.bias is missing in the model, 48 float32 in the plan$"),
        ([*SPECS, LayerSpec("3.weight", (2,))], r"3\.weight is 2 float32 in the model, missing in the plan$"),
        (altered("1.bias", shape=(49,)), r"1\.bias is 49 float32 in the model, 48 float32 in the plan$"),
        (altered("1.bias", dtype=torch.float16), r"1\.bias is 48 float16 in the model, 48 float32 in the plan$"),
        ([LayerSpec(f"m.{n}", (2,)) for n in NAMES], r"m\.0\.weight is .*; m\.1\.weight is .*; and 9 more$"),
        ([], "; and 3 more$"),
    ],
)
def test_a_plan_of_another_model_names_three_layers(specs: list[LayerSpec], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pin(plan_for("onebit"), specs, 4)


def rerouted(routes: dict[str, str]) -> Plan:
    plan = plan_for("none")
    route = {n: resolve(routes.get(n, "none"), 4) for n in NAMES}
    return Plan({n: dataclasses.replace(p, route=route[n]) for n, p in plan.layers.items()}, 4)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            rerouted({"1.bias": "powersgd"}),
            r"a route cannot carry its layer: 1\.bias by powersgd@low_rank: .*no matrix$",
        ),
        (rerouted({"1.weight": "factors"}), r"1\.weight by none@factors: its gradient has no factors"),
        (rerouted(dict.fromkeys(NAMES, "powersgd:rank=99")), "; and 3 more$"),
    ],
)
def test_a_route_that_refuses_its_layer_is_an_error(plan: Plan, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pin(plan, SPECS, 4)


def test_a_scalar_cannot_be_shared_out_among_more_ranks() -> None:
    scalar = LayerSpec("temperature", ())
    route = resolve("int8@scatter_gather", 4)
    with pytest.raises(ValueError, match="temperature by int8@scatter_gather: a scalar has no rows"):
        pin(Plan({"temperature": PlannedLayer(scalar, route, route, "")}, 4), [scalar], 4)


@pytest.mark.parametrize("routes", [{"0.weight": "factors"}, {"0.bias": "factors"}, {"0.weight": "owners"}])
def test_a_weight_and_its_bias_go_both_by_factors_or_neither(routes: dict[str, str]) -> None:
    said = r"a bias must go by factors or owners if its weight does, and only then: 0\.bias$"
    with pytest.raises(ValueError, match=said):
        pin(rerouted(routes), SPECS, 4)
    with pytest.raises(ValueError, match=said):
        pin(rerouted({"0.weight": "factors", "0.bias": "owners"}), SPECS, 4)
    for route in ("factors", "owners"):
        pin(rerouted(dict.fromkeys(["0.weight", "0.bias"], route)), SPECS, 4)


def test_a_linear_layer_may_be_the_whole_model() -> None:
    specs = layer_specs(nn.Linear(64, 48))
    plan = make_plan(specs, "factors", world=2, min_size=100)
    assert [str(p.route) for p in pin(plan, specs, 2)] == ["none@factors", "none@factors"]
    parted = {n: dataclasses.replace(p, route=resolve("none", 2)) if n == "bias" else p for n, p in plan.layers.items()}
    with pytest.raises(ValueError, match=r"only then: bias$"):
        pin(Plan(parted, 2), specs, 2)


# -- what differs -----------------------------------------------------------------------------------


def test_a_plan_does_not_differ_from_itself() -> None:
    assert diff(plan_for("onebit"), plan_for("onebit")) == "no difference"
    assert diff(Plan({}, 1), Plan({}, 1)) == "no difference"


def test_times_rows_and_reasons_alone_are_no_difference() -> None:
    plan = plan_for("onebit")
    assert diff(plan, dataclasses.replace(measured(plan).because("", "another"), about="")) == "no difference"


def test_all_that_differs_is_there_and_aligned() -> None:
    def planned(name: str, shape: tuple[int, ...], rule: str, reason: str) -> PlannedLayer:
        route = resolve(rule, 4)
        return PlannedLayer(LayerSpec(name, shape), route, route, reason)

    old = [
        planned("a", (3, 4), "none", "costs 2 ms"),
        planned("bcd", (3, 4), "none", "the same"),
        planned("e", (3,), "none", "left"),
        planned("g", (3,), "none", "alike"),
    ]
    new = [
        planned("a", (3, 4), "factors", "costs 1 ms"),
        planned("bcd", (300, 4), "none", "the same"),
        planned("f", (3,), "int8", ""),
        planned("g", (3,), "none", "alike"),
    ]
    before, after = (Plan({p.spec.name: p for p in ps}, 4, about) for ps, about in ((old, ""), (new, "predicted 3 ms")))
    assert diff(before, after).splitlines() == [
        "old: no prediction",
        "new: predicted 3 ms",
        "layer  old                     new                            why",
        "a      3x4 float32 none@dense  3x4 float32 none@factors       costs 2 ms → costs 1 ms",
        "bcd    3x4 float32 none@dense  300x4 float32 none@dense       the same",
        "e      3 float32 none@dense    -                              left",
        "f      -                       3 float32 int8@scatter_gather  -",
    ]


def test_a_changed_prediction_is_a_difference_by_itself() -> None:
    plan = measured(plan_for("none"))
    later = dataclasses.replace(plan, about="predicted 3.4 ms a step")
    assert diff(plan, later) == "old: predicted 3.2 ms a step\nnew: predicted 3.4 ms a step"
