"""The picture says what it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from commlib.bench.plan import plots
from commlib.bench.plan.assumptions import Assumptions
from commlib.bench.plan.command import make_record
from commlib.bench.plan.known_models import known
from commlib.bench.plan.schemes import SCHEMES, outcomes
from commlib.bench.results.record import Record

pytest.importorskip("matplotlib")


def record(name: str, setting: Assumptions, *ranks: int) -> Record:
    model = known(name)
    return make_record(model, setting, [o for p in ranks for o in outcomes(model, setting, p)])


def test_speed_up_and_efficiency_of_every_scheme() -> None:
    drawn = plots.figure(record("vgg19", Assumptions(), 1, 2, 8), "vgg19 on paper")
    speedups, shares = drawn.axes
    assert speedups.get_xscale() == speedups.get_yscale() == "log"
    assert [t.get_text() for t in speedups.get_xticklabels()] == ["1", "2", "8"]
    assert shares.get_ylabel() == "% of ideal"
    assert [t.get_text() for t in drawn.legends[0].get_texts()] == ["ideal", *SCHEMES]
    assert len(shares.lines) == len(SCHEMES)


def test_a_published_point_is_drawn_only_over_its_own_link() -> None:
    def legend(gbit: float) -> list[str]:
        drawn = plots.figure(record("inception-v3", Assumptions(gbit=gbit), 16, 32), "")
        return [t.get_text() for t in drawn.legends[0].get_texts()]

    assert {"Poseidon, published", "TensorFlow, published"} <= set(legend(40.0))
    assert not any("published" in text for text in legend(10.0))


def test_many_numbers_of_ranks_are_marked_by_powers_of_two() -> None:
    drawn = plots.figure(record("resnet50", Assumptions(gbit=0.1), *range(1, 41)), "")
    assert [t.get_text() for t in drawn.axes[0].get_xticklabels()] == ["1", "2", "4", "8", "16", "32"]


def test_losses_have_their_place_on_the_scale() -> None:
    drawn = plots.figure(record("bert-large", Assumptions(batch=8), 1, 8), "")
    assert "0.125" in [t.get_text() for t in drawn.axes[0].get_yticklabels()]


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_it_is_written(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"plan{suffix}"
    plots.save(record("vgg19", Assumptions(), 1, 2), "vgg19\nof $one_line$ and another", path)
    assert path.stat().st_size > 5000


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "plan.png").mkdir()
    with pytest.raises(ValueError, match=r"--plot: .*cannot be written"):
        plots.save(record("vgg19", Assumptions(), 2), "", tmp_path / "plan.png")
