"""Which codec goes with which exchange, in which order, and why others are left out."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from commlib.bench.exchange import combinations
from commlib.bench.exchange.combinations import BASELINE, DEFAULT, Pair, cheapest_first, choose
from commlib.codecs.registry import compressors
from commlib.errors import MissingDependency


def names(found: list[Pair]) -> set[str]:
    return {str(p) for p in found}


def test_every_exchange_that_can_carry_a_codec() -> None:
    found = choose(["onebit", "powersgd:rank=4"])
    assert names(found.pairs) == {
        "none@dense",
        "onebit@gather",
        "onebit@scatter_gather",
        "powersgd:rank=4@gather",
        "powersgd:rank=4@low_rank",
    }
    assert found.left_out == []


def test_the_baseline_comes_first_and_once() -> None:
    found = choose(["int8@gather", "none", "dense"]).pairs
    assert found[0] == BASELINE
    assert [str(p) for p in found] == ["none@dense", "int8@gather", "none@gather", "none@scatter_gather"]


def test_all_is_every_installed_codec() -> None:
    assert {p.codec for p in choose(["all"]).pairs} == set(compressors())
    assert {p.exchange for p in choose(["all"], ["gather"]).pairs[1:]} == {"gather"}


def test_default_codecs_are_installed() -> None:
    assert {p.codec for p in choose(DEFAULT).pairs} == set(DEFAULT)


def test_what_an_exchange_asked_for_cannot_carry_is_left_out_with_the_reason() -> None:
    found = choose(["onebit", "fp16"], ["dense", "gather"])
    assert names(found.pairs) == {"none@dense", "onebit@gather", "fp16@dense", "fp16@gather"}
    assert found.left_out == [
        "onebit cannot go over dense: its payloads cannot be summed by an all-reduce; use gather or scatter_gather"
    ]


@pytest.mark.parametrize(
    ("codecs", "exchanges", "said"),
    [
        (["onebitt"], [], "did you mean 'onebit'"),
        (["topk:ratoi=0.1"], [], "did you mean 'ratio'"),
        (["onebit"], ["gathe"], "unknown exchange 'gathe'.*did you mean 'gather'"),
        (["onebit@gathe"], [], "unknown exchange 'gathe'"),
        (["onebit@low_rank"], [], "onebit cannot go over low_rank: its payload is no pair"),
        (["onebit"], ["dense", "low_rank"], "cannot go over dense: .*; onebit cannot go over low_rank"),
    ],
)
def test_what_cannot_be_is_refused(codecs: list[str], exchanges: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        choose(codecs, exchanges)


def test_a_codec_without_its_package_is_left_out_of_all_but_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    known = dict(compressors())
    known["needy"] = EntryPoint("needy", "a_package_nobody_has:Codec", "commlib.compressors")
    monkeypatch.setattr(combinations, "compressors", lambda: known)
    monkeypatch.setattr("commlib.codecs.registry.compressors", lambda: known)
    found = choose(["all"])
    assert "needy" not in {p.codec for p in found.pairs}
    assert any(x.startswith("needy: ") and "pip install a_package_nobody_has" in x for x in found.left_out)
    with pytest.raises(MissingDependency, match="pip install"):
        choose(["needy"])


def test_few_bytes_go_before_many_but_the_baseline_before_all() -> None:
    layers = [("a.weight", (512, 512)), ("a.bias", (512,))]
    chosen = choose(["none", "fp16", "onebit", "int8"]).pairs
    order = [str(p) for p in cheapest_first(chosen, layers, 4, 1024)]
    assert sorted(order) == sorted(str(p) for p in chosen)
    assert order[0] == "none@dense"
    assert order[1] == "onebit@scatter_gather"  # 2(P−1)/P payloads instead of P−1
    assert order[-1] == "none@gather"
