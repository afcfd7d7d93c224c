"""What all workers of a run agree on: blocks, their order, the parameter server's job, and what cannot be."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.bench.sparse_logistic.settings import OBJECTIVE, SparseSettings
from commlib.runtime.optimizers import Replace
from commlib.runtime.proximal import ProximalAdagrad


@given(features=st.integers(1, 300), blocks=st.integers(1, 40))
def test_blocks_have_every_feature_once_and_each_a_chunk_of_its_own(features: int, blocks: int) -> None:
    settings = SparseSettings(features=features, blocks=blocks)
    edges = settings.edges
    assert [k for low, high in edges for k in range(low, high)] == list(range(features))
    assert len(edges) == min(features, blocks)
    *chunks, last = settings.chunks()
    assert [[c.numel for c in each] for each in chunks] == [[high - low] for low, high in edges]
    assert [c.pieces[0].name for c in last] == [OBJECTIVE]
    assert sorted(settings.order(3)) == list(range(len(edges)))


def test_a_wide_block_is_cut_and_the_objective_is_a_sum_that_nothing_codes() -> None:
    settings = SparseSettings(features=1_200_000, blocks=1, kkt=True, filters="lossless", l1=0.5)
    job = settings.job()
    assert [c.numel for c in settings.chunks()[0]] == [400_000] * 3
    assert [r.kind for r in job.recipes] == [Replace, ProximalAdagrad]
    assert job.recipes[1].options == {"lr": 8.0, "l1": 0.5}
    assert job.coding.of_values(settings.chunks()[1][0].key) == (None, None)


def test_the_order_of_blocks_follows_from_the_seed_and_is_another_in_each_pass() -> None:
    settings = SparseSettings(features=1000)
    assert settings.order(0) == settings.order(0) != settings.order(1)
    assert settings.order(0) != dataclasses.replace(settings, seed=1).order(0)


@pytest.mark.parametrize(
    ("kkt", "filters", "push", "pull"),
    [
        (False, "none", "none", "none"),
        (True, "none", "kkt:l1=0.25", "none"),
        (False, "key_cache+fixed_float", "key_cache+fixed_float", "none"),
        (True, "fixed_float+lossless", "kkt:l1=0.25+fixed_float+lossless", "lossless"),
    ],
)
def test_gradients_pass_the_filters_and_weights_lossless_alone(kkt: bool, filters: str, push: str, pull: str) -> None:
    settings = SparseSettings(features=10, workers=4, kkt=kkt, filters=filters)
    assert (settings.push, settings.pull) == (push, pull)
    assert (settings.job().push, settings.job().pull) == (push, pull)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"features": 0}, "features must be at least 1, got 0"),
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"l1": 0.0}, "l1 must be above 0 and finite, got 0.0"),
        ({"lr": float("nan")}, "lr must be above 0 and finite, got nan"),
        ({"delay": -1}, "delay must not be negative, got -1"),
        ({"filters": "zip"}, "unknown filter 'zip'"),
        ({"filters": "lossless+key_cache"}, "key_cache must come before lossless"),
    ],
)
def test_settings_that_cannot_be_say_why(options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SparseSettings(**{"features": 10, **options})  # type: ignore[arg-type]
