"""The documentation is executed, its links are followed, and its table of codecs is compared with the code."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from commlib import LayerSpec
from commlib.registry import compressors, load, make
from commlib.route import resolve

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
CODECS = ROOT / "docs" / "codecs.md"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def program(page: Path) -> str:
    """The page's blocks marked exactly ``python``, each on its own lines of the page, so that tracebacks are right."""
    lines = []
    running = fenced = False
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            running = not fenced and line.strip() == "```python"
            fenced = not fenced
            lines.append("")
        else:
            lines.append(line if running else "")
    assert not fenced, f"{name_of(page)}: a code block has no end"
    return "\n".join(lines)


PROGRAMS = {name_of(p): text for p in PAGES if (text := program(p)).strip()}


@pytest.mark.parametrize("page", PROGRAMS)
def test_code_blocks_run_in_order(page: str, tmp_path: Path):
    script = tmp_path / (Path(page).stem + ".py")
    script.write_text(PROGRAMS[page])
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"line numbers are those of {page}\n{done.stdout}{done.stderr}"


def test_pages_with_code_are_found():
    assert {"docs/guide.md", "docs/write-a-codec.md"} <= set(PROGRAMS)


def links(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", text))
    return [t for t in targets if not re.match(r"[a-z]+:", t)]


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_point_to_something(page: Path):
    dangling = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            dangling.append(link)
    assert not dangling


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
def test_bits_feedback_exchange_and_sums_are_those_of_the_code(name: str):
    _, bits, biased, feedback, exchange, summed, _ = table("spec", "bits/value")[name]
    layer = LayerSpec("layer", (1024, 1024))
    codec, plain = make(name), load(name)()
    assert float(bits) == pytest.approx(8 * codec.nbytes(layer) / layer.numel, abs=0.006)
    assert biased == ("no" if plain.unbiased else "yes")
    own = "residual" in plain.slots(layer)
    assert feedback == ("–" if plain.lossless else "its own" if own else "on" if codec.is_feedback else "off")
    assert exchange == f"{resolve(name, 2).exchange} / {resolve(name, 3).exchange}"
    assert summed == ("yes" if codec.reduce_dtype(layer) else "no")
