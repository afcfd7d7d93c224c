"""The page: one file that needs nothing, hides nothing it was given, and runs nothing of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.text import Text

from commlib.bench.report.command import report, write_whole
from commlib.bench.report.findings import of_group
from commlib.bench.report.formatting import groups
from commlib.bench.report.page import page
from commlib.bench.report.plots import Picture, pictures
from commlib.bench.report.tables import COLUMNS, table
from commlib.bench.results.record import Record, lines, read
from commlib.bench.results.table import Row

SAMPLES = Path(__file__).parent / "samples"
NAMESPACES = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
LOADS = {"src", "href", "xlink:href", "srcset", "data", "poster", "action", "background"}
VOID = {"meta", "br", "img", "link", "input", "hr"}
HOSTILE = '<script>alert("1")</script> $x_{1} & \' " --> url(http://example.org/x)'


class Elements(HTMLParser):
    """Every element with its attributes, all text, and whether all that opened was closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.cells: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag == "td":
            self.cells.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] == "td":
            self.cells[-1] += data


def check_self_contained(text: str) -> Elements:
    """Nothing is loaded, nothing runs, ids are there once and every reference within the page has its target."""
    parsed = Elements(text)
    assert parsed.open == []
    tags = {tag for tag, _ in parsed.found}
    assert not tags & {"script", "link", "iframe", "img", "object", "embed", "base", "form", "image"}
    ids = [a["id"] for _, a in parsed.found if "id" in a]
    assert len(ids) == len(set(ids))
    for tag, attributes in parsed.found:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name.startswith("xmlns"):
                assert value in NAMESPACES
            elif name in LOADS:
                assert value is not None
                assert value.startswith("#")
                assert value[1:] in ids
            elif name not in ("aria-label", "class"):
                for target in re.findall(r"url\(([^)]*)\)", value or ""):
                    assert target[1:] in ids, target
                assert "//" not in (value or "")
    style = text[text.index("<style>") : text.index("</style>")]
    assert not re.search(r"url\(|@import|https?:", style)
    return parsed


def drawn(found: list[Picture]) -> str:
    return " ".join(str(t.get_text()) for p in found for t in p.figure.findobj(Text))


def sample(kind: str) -> Record:
    return next(r for r in read(SAMPLES) if r.kind == kind)


def test_all_kinds_in_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    report(SAMPLES, out)
    assert capsys.readouterr().out == f"{out}\n"
    parsed = check_self_contained(out.read_text(encoding="utf-8"))
    assert sum(tag == "svg" for tag, _ in parsed.found) >= 5  # two models, exchange twice, codecs; link draws itself
    for record in read(SAMPLES):
        assert str(record.run["command"]) in parsed.text
    for word in ("Invented CPU", "2.13.0+cpu", "measured line 0.19 Gbit/s", "Verdict", "torch-bf16 (TypeError"):
        assert word in parsed.text


@pytest.mark.parametrize("kind", ["train", "exchange", "link", "codec"])
def test_any_kind_alone(kind: str) -> None:
    record = sample(kind)
    parsed = check_self_contained(page([record]))
    names = {str(row[column]) for row in record.rows for column in ("route", "codec", "op") if column in row}
    assert names
    assert all(name in parsed.text for name in names)


def test_several_records_of_a_kind_have_a_section_each() -> None:
    slow = sample("train")
    fast = Record("train", {**slow.run, "rate": "1gbit"}, slow.rows)
    parsed = check_self_contained(page([slow, fast, slow]))
    assert parsed.text.count("emulated hosts at 1 Gbit/s") > 1
    assert [a["id"] for t, a in parsed.found if t == "h2" and "id" in a] == ["r0", "r1", "r2"]


@pytest.mark.parametrize("kind", ["train", "exchange", "codec"])
def test_a_record_without_figures_still_makes_a_page(kind: str) -> None:
    record = sample(kind)
    rows: list[Row] = [
        dict.fromkeys(r, None) | {c: r[c] for c in ("model", "route", "exchange", "codec", "op") if c in r}
        for r in record.rows
    ]
    check_self_contained(page([Record(kind, {}, rows)]))


def test_hostile_names_are_shown_and_do_nothing() -> None:
    for kind, columns in (
        ("train", ("model", "route", "status")),
        ("exchange", ("model", "codec")),
        ("codec", ("codec", "dtype")),
    ):
        record = sample(kind)
        rows = [*record.rows, {**record.rows[-1], **dict.fromkeys(columns, HOSTILE)}]
        run = {**record.run, "command": HOSTILE, "cpu": HOSTILE, "rate": HOSTILE, "backend": HOSTILE, "time": HOSTILE}
        parsed = check_self_contained(page([Record(kind, run, rows)]))
        assert parsed.text.count(HOSTILE) >= 4


@given(st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1), min_size=1, max_size=5))
def test_every_cell_says_what_the_row_says(names: list[str]) -> None:
    rows = [{"codec": name, "op": "compress", "numel": 12345} for name in names]
    cells = Elements(table(rows, COLUMNS["codec"])).cells
    assert cells == [c for name in names for c in (name, "compress", "12,345")]


def test_the_picture_of_a_training_run_says_everything_itself() -> None:
    record = sample("train")
    title, rows = groups(record)[0]
    found = pictures(record, title, rows)
    text = drawn(found)
    for said in (
        "gpt (3.7 M parameters)",
        "4 ranks on 4 emulated hosts at 200 Mbit/s",
        "shorter is better",
        "ddp  (baseline)",
    ):
        assert said in text
    assert "ms a step" in text
    for r in rows:
        assert str(r["route"]) in text
    assert "not shown, failed: torch-bf16: TypeError: bfloat16 over Gloo" in text
    assert text.count("WRONG RESULT") == 1
    assert "none  (exact)" in text
    assert "no difference" in text


def test_a_picture_claims_no_more_than_the_verdict() -> None:
    record = sample("exchange")
    once = [{**r, "spread": None} for r in record.rows]
    ((title, rows),) = groups(Record("exchange", record.run, list(once)))
    text = drawn(pictures(record, title, rows))
    assert "33.4×, no spread" in text
    assert "faster" not in text
    assert "slower" not in text
    found = " ".join(f.text for f in of_group(record, title, rows))
    assert "so that nothing is claimed: powersgd:rank=4@low_rank" in found
    assert "saves" not in found


def test_the_pictures_of_an_exchange_show_time_phases_and_bytes() -> None:
    record = sample("exchange")
    ((title, rows),) = groups(record)
    text = drawn(pictures(record, title, rows))
    for said in (
        "onebit@scatter_gather",
        "28.1× fewer; interface +5.",
        "2× more",
        "as dense",
        "none@dense  (baseline)",
    ):
        assert said in text
    for said in ("compress", "wire and waiting", "decompress", "at the sockets", "logarithmic"):
        assert said in text


def test_the_link_is_drawn_by_its_own_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    def figure(record: Record) -> Figure:
        made = Figure()
        axes = made.subplots()
        axes.loglog([float(str(r["bytes"])) for r in record.rows], [float(str(r["seconds"])) for r in record.rows])
        return made

    plot = ModuleType("commlib.bench.link.plot")
    monkeypatch.setattr(plot, "figure", figure, raising=False)
    monkeypatch.setitem(sys.modules, "commlib.bench.link.plot", plot)
    parsed = check_self_contained(page([sample("link"), sample("link")]))
    assert [a["aria-label"] for t, a in parsed.found if t == "svg"] == [
        "Time and bus bandwidth of collectives by message size: 4 ranks on 4 emulated hosts at 200 Mbit/s"
    ] * 2


def test_pictures_are_xml_of_their_own() -> None:
    text = page([sample("train")])
    found = re.findall(r"<figure>(.*?)</figure>", text, re.DOTALL)
    assert len(found) == 2
    for svg in found:
        root = ET.fromstring(svg)
        assert root.get("viewBox")
        assert root.get("width") is None  # as wide as the page
        assert str(root.get("aria-label")).startswith("Time of a training step: ")


def test_the_same_figures_make_the_same_page() -> None:
    assert page([sample("exchange")]) == page([sample("exchange")])


def test_the_page_stands_in_the_folder_by_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(lines(sample("codec"))))
    (tmp_path / "report.html").write_text("old")
    report(tmp_path)
    path = Path(capsys.readouterr().out.strip())
    assert path == tmp_path / "report.html"
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "report.html"]


@pytest.mark.full
def test_what_cannot_be_reported_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere: no saved figures there; .*--save"):
        report(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no saved figures there"):
        report(tmp_path)
    broken = tmp_path / "a.jsonl"
    with pytest.raises(ValueError, match=r"train-200mbit\.jsonl is a file; name the folder"):
        report(SAMPLES / "train-200mbit.jsonl")
    broken.write_text("\n\n{oops\n")
    with pytest.raises(ValueError, match=r"a\.jsonl:3: not JSON"):
        report(tmp_path)
    broken.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="cannot be read"):
        report(tmp_path)
    with pytest.raises(ValueError, match=r"is a folder; --output names a file"):
        report(SAMPLES, tmp_path)
    with pytest.raises(ValueError, match=r"cannot be written: No such file or directory; choose another place"):
        report(SAMPLES, tmp_path / "none" / "x.html")


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.html"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ValueError, match="No space left on device"):
        write_whole(path, "new")
    assert [p.name for p in tmp_path.iterdir()] == ["x.html"]
    assert path.read_text() == "old"


@pytest.mark.full
def test_without_matplotlib_the_package_is_named() -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from pathlib import Path; from commlib.bench.report.command import report\n"
        "from commlib.errors import MissingDependency\n"
        f"try: report(Path({str(SAMPLES)!r}), Path('/nowhere/x.html'))\n"
        "except MissingDependency as e: print(e)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == 'bench report draws with matplotlib: pip install "torch-commlib[report]"\n', done.stderr
