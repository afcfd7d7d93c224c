"""The tables of docs/codecs.md say what the code does."""

from __future__ import annotations

import dataclasses
import re

import pytest

from commlib import LayerSpec
from commlib.codecs.registry import compressors, load, make
from commlib.planning.planner import make_plan
from commlib.planning.route import resolve
from tests.support.docs_reader import ROOT

pytestmark = pytest.mark.checkout

CODECS = ROOT / "docs" / "codecs.md"


def table(first: str, second: str) -> dict[str, list[str]]:
    """The rows of the table of codecs.md with these first two headings, by spec."""
    found: dict[str, list[str]] = {}
    inside = False
    for line in CODECS.read_text().splitlines():
        cells = [c.strip() for c in line.strip("|").split("|")] if line.startswith("|") else []
        if cells[:2] == [first, second]:
            inside = True
        elif not cells:
            inside = False
        elif inside and not set(cells[0]) <= set("-:"):
            assert cells[0].strip("`") not in found, f"{cells[0]} is there twice"
            found[cells[0].strip("`")] = cells
    return found


OURS = [n for n, e in compressors().items() if e.value.startswith("commlib.compressors.")]


def test_both_tables_name_every_codec_and_no_other():
    assert sorted(table("spec", "options and defaults")) == OURS
    assert sorted(table("spec", "bits/value")) == OURS


@pytest.mark.parametrize("name", OURS)
def test_options_and_their_defaults_are_those_of_the_code(name: str):
    written = re.findall(r"`([^`]+)`", table("spec", "options and defaults")[name][1])
    codec = load(name)
    fields = [f.name for f in dataclasses.fields(codec) if f.init]  # type: ignore[arg-type]
    assert [w.partition("=")[0] for w in written] == fields
    assert make(f"{name}:{','.join(written)}") == make(name)


@pytest.mark.parametrize("name", OURS)
def test_bits_memory_feedback_exchange_and_sums_are_those_of_the_code(name: str):
    _, bits, held, biased, feedback, exchange, summed, _ = table("spec", "bits/value")[name]
    layer = LayerSpec("layer", (1024, 1024))
    codec, plain = make(name), load(name)()
    assert float(bits) == pytest.approx(8 * codec.nbytes(layer) / layer.numel, abs=0.006)
    kept = make_plan([layer], name, world=2, min_size=0).held_bytes
    assert float(held) == pytest.approx(kept / layer.numel, abs=0.005)
    assert biased == ("no" if plain.unbiased else "yes")
    own = "residual" in plain.slots(layer)
    assert feedback == ("–" if plain.lossless else "its own" if own else "on" if codec.is_feedback else "off")
    assert exchange == f"{resolve(name, 2).exchange} / {resolve(name, 3).exchange}"
    assert summed == ("yes" if codec.reduce_dtype(layer) else "no")
