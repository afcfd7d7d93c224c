"""Published points beside the prediction: all from one set of assumptions, none fitted, whatever they come to."""

from __future__ import annotations

import pytest

from commlib.bench.plan import published
from commlib.bench.plan.assumptions import Assumptions
from commlib.bench.plan.known_models import known
from commlib.bench.plan.schemes import SCHEMES, outcomes
from commlib.bench.results.table import Row


def test_the_points_are_those_that_were_published() -> None:
    assert {(p.system, p.model, p.ranks, p.gbit, p.speedup) for p in published.POINTS} == {
        ("Poseidon", "inception-v3", 32, 40.0, 31.5),
        ("TensorFlow", "inception-v3", 32, 40.0, 20.0),
        ("Poseidon", "vgg19-22k", 32, 40.0, 30.0),
        ("Poseidon", "vgg19-22k", 16, 10.0, 15.5),
    }
    assert all(p.scheme in SCHEMES for p in published.POINTS)


def test_the_one_known_at_second_hand_says_so() -> None:
    (point,) = [p for p in published.POINTS if p.ranks == 16]
    assert "third-party summary" in point.source
    assert any("third-party summary" in line for line in published.sources())


@pytest.mark.parametrize("row", published.rows(), ids=lambda r: f"{r['system']} {r['model']} {r['ranks']}")
def test_a_prediction_is_the_plans_own_for_that_set_up(row: Row) -> None:
    for tflops in (3.0, 6.0):
        setting = Assumptions(gbit=float(str(row["gbit"])), latency_us=20.0, tflops=tflops, batch=32)
        found = outcomes(known(str(row["model"])), setting, int(str(row["ranks"])))
        expected = next(o.speedup for o in found if o.scheme == row["scheme"])
        assert row[f"at_{tflops:g}_tflops"] == expected
        assert 1 < expected <= int(str(row["ranks"]))


def test_only_the_points_of_the_model_and_its_ranks() -> None:
    assert [r["ranks"] for r in published.rows("vgg19-22k", (8, 16))] == [16]
    assert published.rows("vgg19-22k", (8,)) == []
    assert published.rows("vgg19", (16, 32)) == []
    assert len(published.rows()) == len(published.POINTS)


def test_for_people_the_lower_prediction_comes_first() -> None:
    for row in map(published.for_people, published.rows()):
        low, high = map(float, str(row["predicted"]).split("–"))
        assert low <= high
