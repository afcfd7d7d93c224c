"""``commlib plan`` as a user calls it."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from commlib.bench.plan import table
from commlib.bench.plan.assumptions import RANKS, Assumptions
from commlib.bench.plan.command import plan
from commlib.bench.plan.known_models import MODELS, known
from commlib.bench.plan.schemes import SCHEMES, outcomes
from commlib.bench.results.table import table_width
from commlib.cli import main
from commlib.errors import MissingDependency

APP = typer.Typer()
APP.command()(plan)
COLUMNS = ["model", "ranks", "scheme", "step_s", "exposed_s", "speedup", "efficiency", "sent_bytes", "routes"]
DOCS = Path(__file__).parents[3] / "docs" / "plan.md"


def call(*args: str) -> Any:
    return CliRunner().invoke(APP, args)


def printed(*args: str) -> str:
    done = call(*args)
    assert done.exit_code == 0, done.exception
    out: str = done.stdout
    return out


def strict(text: str) -> dict[str, object]:
    def refuse(word: str) -> object:
        raise AssertionError(f"{word} is no JSON")

    found: dict[str, object] = json.loads(text, parse_constant=refuse)
    return found


def test_defaults_and_the_figures_they_stand_for_are_printed() -> None:
    out = printed("vgg19")
    for words in ("143,667,240 parameters", "39.26 GFLOP", "10 Gbit/s, 20 µs, 10 TFLOP/s, batch 32", "3/3"):
        assert words in out
    assert "factors for classifier.0" in out
    assert "published" not in out


def test_the_published_points_come_with_their_model_and_ranks() -> None:
    out = printed("vgg19-22k", "--ranks", "16")
    assert "15.5" in out
    assert "Titan X" in out
    assert "published" not in printed("vgg19-22k", "--ranks", "8")


def test_published_lists_all_of_them_with_their_sources() -> None:
    out = printed("--published")
    for words in ("31.5", "20", "30", "15.5", "third-party summary", "3 to 6 TFLOP/s"):
        assert words in out
    rows = [strict(line) for line in printed("--published", "--json").splitlines()]
    assert [r["published"] for r in rows] == [31.5, 20, 30, 15.5]


@pytest.mark.parametrize("model", MODELS)
def test_json_has_a_row_for_every_number_of_ranks_and_scheme(model: str) -> None:
    rows = [strict(line) for line in printed(model, "--ranks", "1,4", "--ranks", "32", "--json").splitlines()]
    assert all(list(row) == ["schema", "kind", "run", *COLUMNS] for row in rows)
    assert [(r["ranks"], r["scheme"]) for r in rows] == [(p, s) for p in (1, 4, 32) for s in SCHEMES]
    assert {r["kind"] for r in rows} == {"plan"}
    run = rows[0]["run"]
    assert isinstance(run, dict)
    assert run["parameters"] == known(model).parameters
    assert (run["gbit"], run["latency_us"], run["tflops"], run["batch"]) == (10, 20, 10, known(model).batch)
    for layer in run["linear_layers"]:
        assert set(layer["crossover_rows"]) == {"4", "32"}
        for p, star in layer["crossover_rows"].items():
            assert layer["below"][p] == (layer["rows"] <= star)
            assert layer["below"][p] == (int(p) <= layer["pays_up_to_ranks"])


def test_saved_figures_are_those_of_json(tmp_path: Path) -> None:
    out = printed("resnet50", "--json", "--save", str(tmp_path))
    (file,) = tmp_path.glob("plan-*.jsonl")
    assert file.read_text() == out
    assert "ranks" in printed("resnet50", "--save", str(tmp_path))
    assert len(list(tmp_path.glob("plan-*.jsonl"))) == 2


def test_the_layer_table() -> None:
    out = printed("bert-large", "--layers")
    assert "encoder.layer.*.attention.self.query × 24" in out
    rows = [strict(line) for line in printed("vgg19", "--layers", "--json").splitlines()]
    assert sum(int(str(r["parameters"])) for r in rows) == 143_667_240
    assert [r["layer"] for r in rows if r["linear"]] == ["classifier.0", "classifier.3", "classifier.6"]
    assert [r["rows"] for r in rows if r["linear"]] == [1, 1, 1]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_a_terminal(model: str, width: int) -> None:
    m, s = known(model), Assumptions(batch=known(model).batch)
    found = [o for p in RANKS for o in outcomes(m, s, p)]
    assert table_width(table.scaling(m, found)) <= 80
    assert table_width(table.crossover_table(table.crossovers(m, s.batch, RANKS), width)) <= width
    assert table_width(table.layer_table(m, width)) <= width
    for line in (*table.about(m), table.of_a_rank(m, s), table.ROUTES_TITLE, table.CROSSOVER_TITLE):
        assert len(line) <= 80


def test_one_rank_alone_has_no_crossover() -> None:
    out = printed("vgg19", "--ranks", "1")
    assert "K*" not in out
    assert "376.9" in out


def test_crossovers_in_brackets_where_the_batch_is_above_them() -> None:
    rows = table.crossovers(known("vgg19"), 200, (2, 8, 16))
    shown = table.crossover_table(rows, 200)[-1]  # 4096 → 1000: 201 rows at 8 ranks
    assert (shown["K"], shown["K* P=8"], shown["K* P=16"]) == (200, "201", "(100)")
    assert shown["pays up to P"] == 8


def test_a_model_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plan_mine.py").write_text(
        "from torch import nn\ndef net(): return nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10))\n"
        "def conv(): return nn.Conv2d(3, 8, 3)\n"
        "factory = net\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "plan_mine", raising=False)
    out = printed("plan_mine:net", "--input", "4096", "--ranks", "8", "--gbit", "1")
    assert "16,822,282 parameters" in out
    assert "4096 → 4096" in out
    assert "plan_mine:factory: 16,822,282" in printed("plan_mine:factory", "--input", "4096")  # no emoji
    assert "No linear layer" in printed("plan_mine:conv", "--input", "3,8,8", "--ranks", "2")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "which model? One of vgg19"),
        (["vgg16"], "unknown model 'vgg16'"),
        (["vgg19", "--ranks", "0"], "--ranks must be from 1 to 4096, got 0"),
        (["vgg19", "--ranks", "4097"], "--ranks must be from 1 to 4096, got 4097"),
        (["vgg19", "--ranks", "many"], "--ranks takes numbers from 1 to 4096"),
        (["vgg19", "--gbit", "0"], "--gbit must be more than 0"),
        (["vgg19", "--gbit", "-3"], "--gbit must be more than 0"),
        (["vgg19", "--gbit", "inf"], "--gbit must be more than 0"),
        (["vgg19", "--gbit", "nan"], "--gbit must be more than 0"),
        (["vgg19", "--tflops", "0"], "--tflops must be more than 0"),
        (["vgg19", "--latency-us", "-1"], "--latency-us must be from 0"),
        (["vgg19", "--batch", "0"], "--batch must be from 1"),
        (["vgg19", "--positions", "5"], "--positions is for gpt2"),
        (["gpt2", "--positions", "5000"], "--positions of gpt2 must be from 1 to 1024"),
        (["vgg19", "--input", "3,224,224"], "--input is for a model of your own"),
        (["json:loads"], "say what one example looks like"),
        (["json:loads", "--input", "3"], "the factory failed on the meta device (TypeError"),
        (["collections:Counter", "--input", "3"], "returned Counter; a plan needs an nn.Module"),
        (["json:loads", "--positions", "3"], "--positions is for gpt2 and bert-large"),
        (["vgg19", "--plot", "plan.gif"], "--plot writes .png, .svg, .pdf"),
        (["vgg19", "--plot", "/nowhere/plan.png"], "there is no folder '/nowhere'"),
        (["vgg19", "--layers", "--save", "x"], "leave out --save and --plot"),
        (["--published", "--plot", "x.png"], "leave out --save and --plot"),
    ],
)
def test_a_mistake_gets_one_line(
    args: Sequence[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = EntryPoint("plan", "commlib.bench.plan.command:plan", main.GROUP)
    monkeypatch.setattr(main, "commands", lambda: {"plan": entry})
    monkeypatch.delenv("COMMLIB_DEBUG", raising=False)
    with pytest.raises(SystemExit) as e:
        main.main(["plan", *args])
    out, err = capsys.readouterr()
    assert e.value.code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert said in err
    assert len(err.splitlines()) == 1


def test_no_matplotlib_is_said_before_anything_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = call("vgg19", "--plot", "plan.png")
    assert isinstance(done.exception, MissingDependency)
    assert "pip install matplotlib" in str(done.exception)
    assert done.stdout == ""


def test_a_picture_beside_the_table(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert "speed-up" in printed("vgg19-22k", "--gbit", "40", "--plot", str(tmp_path / "plan.svg"))
    assert (tmp_path / "plan.svg").read_text().startswith("<?xml")


@pytest.mark.checkout
def test_the_documentation_shows_what_is_printed() -> None:
    blocks = [b.strip("\n") for b in DOCS.read_text().split("```")[1::2]]
    shown = [b for b in blocks if b.startswith("$ commlib plan ")]
    assert len(shown) >= 2
    for block in shown:
        first, _, rest = block.partition("\n")
        out = printed(*shlex.split(first)[3:])
        assert [line.rstrip() for line in rest.splitlines()] == [line.rstrip() for line in out.strip("\n").splitlines()]
