"""A page of ``bench train --fsdp2`` beside one of DDP: each has its own baseline, in words, pictures and columns."""

from __future__ import annotations

import html
from pathlib import Path

from matplotlib.text import Text

from commlib.bench.report.formatting import groups
from commlib.bench.report.page import page
from commlib.bench.report.plots import pictures
from commlib.bench.results.record import Record, read
from commlib.bench.results.table import Row

SAMPLES = Path(__file__).parent / "samples"


def both() -> tuple[Record, Record]:
    """A record of DDP, and one of FSDP2 with the same figures."""
    ddp = next(r for r in read(SAMPLES) if r.kind == "train")
    names = {"ddp": "fsdp2", "onebit": "onebit+int8"}
    renamed: list[Row] = [{k.replace("_ddp", "_fsdp2"): v for k, v in r.items()} for r in ddp.rows]
    return ddp, Record("fsdp2", ddp.run, [{**r, "route": names.get(str(r["route"]), r["route"])} for r in renamed])


def test_each_has_its_own_section_columns_and_baseline() -> None:
    ddp, fsdp2 = both()
    text = html.unescape(page([fsdp2, ddp]))
    for word in ("Training by FSDP2: ", "FSDP2’s over this", "FSDP2’s loss", "DDP’s over this", "plain FSDP2"):
        assert word in text
    assert text.index("Training: ") < text.index("Training by FSDP2: ")
    assert text.count("<td>onebit+int8</td>") == text.count("<td>onebit</td>") == len(groups(ddp))
    assert text.count('<tr class="baseline">') == 2 * len(groups(ddp))


def test_the_picture_names_its_own_baseline() -> None:
    for record, own, other in zip(both(), ("plain DDP", "plain FSDP2"), ("plain FSDP2", "plain DDP"), strict=True):
        (title, rows), *_ = groups(record)
        words = " ".join(str(t.get_text()) for p in pictures(record, title, rows) for t in p.figure.findobj(Text))
        assert words.count(own) == 2  # the dashed line, and the key
        assert other not in words
