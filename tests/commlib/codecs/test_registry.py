"""Spec strings and where codecs come from."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.codecs import registry
from commlib.codecs.base import Compressor
from commlib.codecs.error_feedback import ErrorFeedback
from commlib.compressors.onebit import OneBit
from commlib.compressors.qsgd import QSGD
from commlib.compressors.topk import TopK
from commlib.errors import MissingDependency


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    """The entry points the registry will find, to be filled."""
    points: list[EntryPoint] = []
    monkeypatch.setattr("commlib.runtime.plugins.entry_points", lambda group: [p for p in points if p.group == group])
    registry.compressors.cache_clear()
    yield points
    registry.compressors.cache_clear()


def point(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, registry.GROUP)


def test_biased_codecs_get_feedback_and_unbiased_ones_do_not() -> None:
    assert registry.make("onebit") == ErrorFeedback(OneBit())
    assert registry.make("qsgd") == QSGD()
    assert registry.make("onebit:ef=off") == OneBit()
    assert registry.make("qsgd:ef=on") == ErrorFeedback(QSGD())
    assert registry.make("onebit:ef=0.9") == ErrorFeedback(OneBit(), 0.9)
    assert registry.make(OneBit()) == ErrorFeedback(OneBit())
    assert registry.make(ErrorFeedback(OneBit())) == ErrorFeedback(OneBit())


def test_lossless_codecs_and_those_with_their_own_residual_get_none() -> None:
    assert not isinstance(registry.make("none"), ErrorFeedback)
    assert not isinstance(registry.make("dgc"), ErrorFeedback)
    for spec in ("none:ef=on", "dgc:ef=on"):
        with pytest.raises(ValueError, match="lossless or keeps a residual of its own"):
            registry.make(spec)


@pytest.mark.parametrize(
    ("codec", "text"),
    [
        (ErrorFeedback(OneBit()), "onebit"),
        (OneBit(), "onebit:ef=off"),
        (OneBit("tensor"), "onebit:axis=tensor,ef=off"),
        (ErrorFeedback(TopK(0.1, "int8")), "topk:ratio=0.1,values=int8"),
        (QSGD(), "qsgd"),
        (ErrorFeedback(QSGD(3)), "qsgd:levels=3,ef=on"),
        (ErrorFeedback(TopK(chunk=64), 0.95), "topk:chunk=64,ef=0.95"),
        (ErrorFeedback(TopK(values="qsgd:levels=3;block=64")), "topk:values=qsgd:levels=3;block=64"),
    ],
)
def test_a_codec_is_written_by_what_differs_from_its_defaults(codec: Compressor, text: str) -> None:
    assert str(codec) == text
    assert registry.make(text) == codec


@given(st.sampled_from([f"0.{i:04d}" for i in range(1, 10000)]), st.sampled_from(["fp32", "fp16", "int8:block=64"]))
def test_any_ratio_of_four_digits_comes_back(ratio: str, values: str) -> None:
    codec = registry.make(f"topk:ratio={ratio},values={values}")
    assert registry.make(str(codec)) == codec


def test_blanks_around_parts_are_ignored() -> None:
    assert registry.make(" topk: ratio = 0.5 , values = fp16 ") == ErrorFeedback(TopK(0.5, "fp16"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("onebitt", "unknown compressor 'onebitt'.*did you mean 'onebit'"),
        ("", "unknown compressor ''"),
        ("topk:ration=0.5", "unknown option 'ration'.*known: chunk, ef, ratio, residual, values; did you mean 'ratio'"),
        ("topk:ratio", "cannot read 'ratio'"),
        ("topk:ratio=", "cannot read 'ratio='"),
        ("topk:=3", "cannot read '=3'"),
        ("topk:ratio=0.1,ratio=0.2", "'ratio' is given twice"),
        ("topk:ratio=much", "ratio must be a number, got 'much'"),
        ("qsgd:levels=3.5", "levels must be a whole number, got '3.5'"),
        ("topk:ef=maybe", "ef must be on or off, got 'maybe'"),
    ],
)
def test_a_spec_that_cannot_be_understood_says_what_is_wrong(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        registry.make(spec)


def test_only_strings_and_compressors_are_specs() -> None:
    with pytest.raises(TypeError, match="not int"):
        registry.make(8)  # type: ignore[arg-type]


def test_a_part_of_another_codec_has_no_feedback() -> None:
    assert registry.make_plain("onebit") == OneBit()
    with pytest.raises(ValueError, match="unknown option 'ef'"):
        registry.make_plain("onebit:ef=on")


def test_the_list_of_codecs_is_sorted_and_read_only() -> None:
    known = registry.compressors()
    assert list(known) == sorted(known)
    with pytest.raises(TypeError):
        known["mine"] = known["none"]  # type: ignore[index]


def test_two_different_codecs_of_one_name_are_an_error(installed: list[EntryPoint]) -> None:
    installed += [point("a", "commlib.compressors.onebit:OneBit"), point("a", "commlib.compressors.qsgd:QSGD")]
    with pytest.raises(ValueError, match=r"two installed codecs are called 'a': .*OneBit and .*QSGD"):
        registry.make("a")


def test_one_codec_found_twice_is_no_error(installed: list[EntryPoint]) -> None:
    installed += [point("onebit", "commlib.compressors.onebit:OneBit")] * 2
    assert registry.load("onebit") is OneBit


def test_a_codec_whose_package_is_missing_says_what_to_install(installed: list[EntryPoint]) -> None:
    installed.append(point("far", "no_such_package.codec:Far"))
    with pytest.raises(MissingDependency, match="pip install no_such_package"):
        registry.make("far")


def test_an_entry_point_that_is_no_codec_is_an_error(installed: list[EntryPoint]) -> None:
    installed.append(point("odd", "commlib.codecs.base:LayerSpec"))
    with pytest.raises(TypeError, match=r"is not a commlib\.Compressor"):
        registry.make("odd")
