"""What a user may let the manager choose among, and how that is written."""

from __future__ import annotations

from typing import Any

import pytest

import commlib
from commlib.planning.policy import Exact, Lossy, policy_of


@pytest.mark.parametrize("text", ["auto", " auto "])
def test_auto_means_exact_routes(text: str) -> None:
    assert policy_of(text) == Exact()
    assert policy_of(Exact()) == Exact()
    assert Exact().routes(4) == ()


@pytest.mark.parametrize("text", ["onebit", "none", "lossyness", "", "factors"])
def test_other_texts_are_no_policy(text: str) -> None:
    assert policy_of(text) is None
    assert policy_of({"*": "onebit"}) is None


def test_lossy_as_text_names_codecs_with_their_options_between_pluses() -> None:
    found = policy_of("lossy: onebit + topk:ratio=0.1,values=int8@gather")
    assert isinstance(found, Lossy)
    assert [str(r) for r in found.routes(4)] == ["onebit@scatter_gather", "topk:ratio=0.1,values=int8@gather"]
    assert policy_of(found) is found


@pytest.mark.parametrize("text", ["lossy", "lossy:", "lossy:onebit+", "lossy:+", "lossy: + fp16"])
def test_lossy_without_a_codec_or_with_an_empty_one_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"names no codec, or an empty one: write lossy:"):
        policy_of(text)


@pytest.mark.parametrize("one", ["fp16", commlib.make("fp16"), commlib.Route("dense", commlib.make("fp16"))])
def test_a_codec_alone_need_not_be_in_a_list(one: Any) -> None:
    assert [str(r) for r in Lossy(one).routes(2)] == ["fp16@dense"]
    assert Lossy([one]).routes(2) == Lossy(one).routes(2)


@pytest.mark.parametrize(
    ("codecs", "error", "message"),
    [
        ([], ValueError, r"Lossy\(\[\]\) would be Exact\(\)"),
        ([3], TypeError, "got 3"),
        ([None], TypeError, "got None"),
        ([["fp16"]], TypeError, "spec strings, Compressors and Routes"),
    ],
)
def test_what_is_no_codec_is_refused_at_once(codecs: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Lossy(codecs)


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        ("none", "loses nothing"),
        ("factors", "loses nothing"),
        ("owners", "loses nothing"),
        ("none@gather", "loses nothing"),
        ("dgc:ratio=0.1", "keeps the optimizer's momentum"),
        ("onebitt", "did you mean 'onebit'"),
        ("onebit@dense", "cannot go over dense"),
        ("auto", "give it alone"),
    ],
)
def test_what_is_not_for_choosing_is_refused_with_the_reason(codec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Lossy(["fp16", codec]).routes(4)


def test_it_says_what_it_is() -> None:
    assert str(Lossy(["onebit", "fp16"])) == "exact routes and onebit, fp16, chosen by measurement"
