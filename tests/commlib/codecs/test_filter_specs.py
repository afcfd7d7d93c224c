"""Spec strings of filters and chains, orders that make no sense, and where filters come from."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.codecs.filter import GROUP, Chain, chain, filters, make_filter
from commlib.compressors.filters.fixed_float import FixedFloat
from commlib.compressors.filters.key_cache import KeyCache
from commlib.compressors.filters.lossless import Lossless
from commlib.compressors.filters.random_skip import RandomSkip
from commlib.compressors.filters.significance import Significance
from commlib.errors import MissingDependency


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    """The entry points that will be found, to be filled."""
    points: list[EntryPoint] = []
    monkeypatch.setattr("commlib.runtime.plugins.entry_points", lambda group: [p for p in points if p.group == group])
    filters.cache_clear()
    yield points
    filters.cache_clear()


def test_a_chain_is_read_from_its_specs_and_written_as_they_are() -> None:
    text = "significance:threshold=0.1+random_skip:keep=0.25,ef=on+key_cache:entries=8+fixed_float:nbytes=2+lossless"
    read = chain(text)
    parts = [Significance(0.1), RandomSkip(0.25, ef=True), KeyCache(8), FixedFloat(2), Lossless()]
    assert read == Chain(parts)
    assert str(read) == text
    assert chain(text.replace("+", " + ")) == read


@given(st.floats(0, 1e300), st.integers(1, 4))
def test_a_plus_in_a_number_is_not_one_between_filters(threshold: float, nbytes: int) -> None:
    made = Chain([Significance(threshold), FixedFloat(nbytes)])
    assert chain(str(made)) == made
    assert chain(f"significance:threshold={threshold:+.17e}+fixed_float:nbytes={nbytes}") == made


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("losless", "unknown filter 'losless'.*known: .*fixed_float.*did you mean 'lossless'"),
        ("key_cache+fixedfloat", "unknown filter 'fixedfloat'.*did you mean 'fixed_float'"),
        ("", "unknown filter ''"),
        ("key_cache+", r"unknown filter 'key_cache\+'"),
        ("key_cache:entry=3", "unknown option 'entry'.*did you mean 'entries'"),
        ("significance", "filter 'significance' needs threshold: write significance:threshold="),
        ("fixed_float:nbytes=two", "nbytes must be a whole number"),
    ],
)
def test_a_spec_that_cannot_be_understood_says_what_is_wrong(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chain(spec)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fixed_float+random_skip", "random_skip must come before fixed_float, which codes the values it reads"),
        ("fixed_float+significance:threshold=1", "significance must come before fixed_float"),
        ("key_cache+random_skip", "random_skip must come before key_cache, which codes the keys it reads"),
        ("key_cache+significance:threshold=1", "significance must come before key_cache"),
        ("lossless+key_cache", "key_cache must come before lossless, which codes the keys it reads"),
        ("lossless+fixed_float", "fixed_float must come before lossless, which codes the values it reads"),
        ("key_cache+fixed_float+key_cache", "key_cache stands twice"),
        ("lossless:level=1+lossless:level=2", "lossless stands twice"),
    ],
)
def test_an_order_that_makes_no_sense_is_refused(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chain(spec)


def test_a_filter_whose_package_is_missing_says_what_to_install(
    installed: list[EntryPoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed.append(EntryPoint("far", "no_such_package.filter:Far", GROUP))
    with pytest.raises(MissingDependency, match=r"filter 'far' needs .*: pip install no_such_package$"):
        chain("far")
    installed[:] = [EntryPoint("lossless", "commlib.no_module:Lossless", GROUP)]
    filters.cache_clear()

    def load(self: EntryPoint) -> object:
        raise ModuleNotFoundError("No module named 'zstandard'", name="zstandard")

    monkeypatch.setattr(EntryPoint, "load", load)
    with pytest.raises(MissingDependency, match=r"'zstandard': pip install 'torch-commlib\[filters\]'$"):
        chain("lossless")


def test_what_is_no_filter_and_two_of_one_name_are_errors(installed: list[EntryPoint]) -> None:
    installed.append(EntryPoint("odd", "commlib.codecs.filter:Content", GROUP))
    with pytest.raises(TypeError, match=r"is not a commlib\.codecs\.filter\.Filter"):
        make_filter("odd")
    installed.append(EntryPoint("odd", "commlib.codecs.filter:Chain", GROUP))
    filters.cache_clear()
    with pytest.raises(ValueError, match="two installed filters are called 'odd'"):
        make_filter("odd")
