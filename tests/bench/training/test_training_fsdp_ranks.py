"""Real ranks under FSDP2: losses, bytes, what is wrong is found, and what was saved can be reported and compared."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commlib.bench.results.record import read
from commlib.bench.results.table import Row
from commlib.bench.targets import Here
from commlib.bench.training import command
from commlib.bench.training.configurations import Configuration
from commlib.bench.training.fsdp import Sharded
from commlib.bench.training.results import rows
from commlib.bench.training.runner import BaselineFailed, race
from commlib.bench.training.schedule import Schedule
from commlib.bench.training.trial import TrainingJob
from commlib.bench.training.workloads import Workload, shapes

FSDP2 = Sharded("fsdp2", "pytorch", True)
VALUES = 664_704
INT8 = 4 / (1 + 4 / 256)  # times fewer bytes: a byte a value, and a scale for each 256


@dataclasses.dataclass(frozen=True)
class Sum(Sharded):
    """The sum of the gradients, not the mean."""

    def wrap(self, course: Workload, group: Any, timeout: float, options: Any = None) -> Any:
        model, _ = FSDP2.wrap(course, group, timeout)
        modules: list[Any] = list(model.modules())
        for module in modules:
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        return model, None


@dataclasses.dataclass(frozen=True)
class Old(Sharded):
    """Of a PyTorch whose FSDP2 cannot be given a communication."""

    def wrap(self, course: Workload, group: Any, timeout: float, options: Any = None) -> Any:
        from torch.distributed.fsdp import FSDPModule

        del FSDPModule.set_custom_reduce_scatter
        return super().wrap(course, group, timeout)


def run(*contenders: Configuration) -> dict[str, Row]:
    job = TrainingJob("gpt-small", contenders, 1, 4, None, "gloo")
    schedule = Schedule([c.name for c in contenders], 1, 1, 10.0, 200.0, 200.0)
    result = race(Here(2), job, schedule, lambda visit, s: None)
    assert result is not None
    return {str(r["route"]): r for r in rows(result[0], contenders, model="gpt-small", parameters=VALUES)}


@pytest.mark.full
def test_losses_agree_and_each_codec_sends_fewer_bytes(
    tmp_path: Path, call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(command, "_LEAST_S", 200.0)  # for a visit, however busy the machine is
    only = [word for name in ("none", "int8", "int8+int8") for word in ("--only", name)]
    code, out, err = call("bench", "train", "--fsdp2", "--quick", "--save", str(tmp_path), *only)
    assert code == 0, err
    for word in ("gpt-small", "664,704 parameters", "FSDP2, real compute", "vs fsdp2", "plain FSDP2"):
        assert word in out
    assert "DDP" not in out
    (record,) = read(tmp_path)
    assert (record.kind, record.run["ranks"]) == ("fsdp2", 2)
    assert [r["route"] for r in record.rows] == ["fsdp2", "none", "int8", "int8+int8"]
    assert [(r["status"], r["loss_ok"]) for r in record.rows] == [("ok", True)] * 4
    plain, none, int8, both = record.rows
    assert not {"vs_ddp", "loss_of_ddp"} & set(plain)
    assert plain["vs_fsdp2"] == 1
    assert none["loss"] == plain["loss"] == none["loss_of_fsdp2"]  # to the bit: these are FSDP2's own collectives
    assert int8["loss"] not in (plain["loss"], both["loss"])
    assert int8["loss"] == pytest.approx(plain["loss"], rel=0.01)
    assert both["loss"] == pytest.approx(plain["loss"], rel=0.01)

    # Of two ranks each sends its half: parameters before both passes (the root's before the first only), gradients
    # after the second, twice, for Gloo's reduce-scatter sends as an all-reduce does.
    blocks = sum(math.prod(shape) for name, shape in shapes("gpt-small") if name.startswith("blocks."))
    gathered, scattered = 4 * (VALUES + blocks) / 2, 4 * VALUES / 2
    sent = [float(str(r["socket_bytes"])) for r in record.rows]
    expected = [gathered + 2 * scattered, gathered + 2 * scattered, gathered + scattered / INT8]
    assert sent == pytest.approx([*expected, (gathered + scattered) / INT8], rel=0.03)
    assert both["times_fewer"] == pytest.approx(sent[0] / sent[3])

    assert call("bench", "report", str(tmp_path))[0] == 0
    assert "Training by FSDP2" in (tmp_path / "report.html").read_text(encoding="utf-8")
    code, out, _ = call("bench", "compare", str(tmp_path), str(tmp_path), "--within", "0", "--json")
    compared = [json.loads(line) for line in out.splitlines()]
    assert (code, len(compared)) == (0, 4)
    assert {r["vs_fsdp2"] for r in compared} == {1.0}


@pytest.mark.full
def test_a_wrong_mean_is_found_and_an_old_torch_is_named() -> None:
    seen = run(FSDP2, Sum("sum", "pytorch", True), Sharded("onebit", "commlib", False), Old("int8", "commlib", False))
    assert {n: r["loss_ok"] for n, r in seen.items()} == {"fsdp2": True, "sum": False, "onebit": True, "int8": None}
    assert "has no set_custom_reduce_scatter on FSDP2's modules" in str(seen["int8"]["status"])
    assert [seen[n]["status"] for n in ("fsdp2", "sum", "onebit")] == ["ok"] * 3


def test_without_plain_fsdp2_there_is_nothing_to_compare() -> None:
    with pytest.raises(BaselineFailed, match=r"gpt-small: plain FSDP2 came to nothing \(.*set_custom_reduce_scatter"):
        run(Old("fsdp2", "commlib", True), Sharded("int8", "commlib", False))
