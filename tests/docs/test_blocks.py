"""The documentation is executed, page by page, as it is printed."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from commlib.bench.lab import unavailable
from tests.support.docs_reader import PAGES, ROOT, Block, blocks, environment, name_of

pytestmark = [pytest.mark.checkout, pytest.mark.usefixtures("warm_python")]

SECONDS = 300.0


def program(page: Path) -> str:
    """The page's blocks marked exactly ``python``, each on its own lines of the page, so that tracebacks are right."""
    lines: list[str] = []
    for block in blocks(page):
        if block.language == "python" and not block.marks:
            lines += [""] * (block.line - 1 - len(lines)) + block.text.splitlines()
    return "\n".join(lines)


def story(page: Path) -> list[Block]:
    """Its files and its console, in their order."""
    return [b for b in blocks(page) if b.file or b.language == "console"]


PROGRAMS = {name_of(p): text for p in PAGES if (text := program(p)).strip()}
STORIES = {name_of(p): told for p in PAGES if (told := story(p))}


@pytest.mark.full
@pytest.mark.parametrize("page", PROGRAMS)
def test_python_blocks_run_in_order(page: str, tmp_path: Path):
    script = tmp_path / (Path(page).stem + ".py")
    script.write_text(PROGRAMS[page])
    done = run([sys.executable, str(script)], tmp_path)
    assert done.returncode == 0, f"line numbers are those of {page}\n{done.stdout}{done.stderr}"


@pytest.mark.full
@pytest.mark.parametrize("page", STORIES)
def test_files_and_consoles_run_in_order(page: str, tmp_path: Path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for block in STORIES[page]:
        if block.file:
            (tmp_path / block.file).write_text(block.text)
        elif is_to_run(block):
            for command, printed in transcript(block.text):
                done = run(["bash", "-c", command], tmp_path)
                where = f"{page}, from line {block.line}: {command}\n{done.stdout}{done.stderr}"
                assert done.returncode == 0, where
                assert missing(printed, done.stdout) is None, f"not printed: {missing(printed, done.stdout)}\n{where}"


def is_to_run(block: Block) -> bool:
    """Blocks marked notest are not; those marked lab where there can be emulated hosts."""
    assert re.fullmatch(r"(|lab|notest: \S.*)", block.marks), f"line {block.line}: console, console lab, or a reason"
    return not block.marks or (block.marks == "lab" and unavailable() is None)


def transcript(text: str) -> Iterator[tuple[str, list[str]]]:
    """(command, the lines printed below it) of each; commands begin with ``$ ``."""
    for part in re.split(r"^\$ ", re.sub(r"\\\n>? *", "", text), flags=re.MULTILINE)[1:]:
        command, *printed = part.splitlines()
        yield command, printed


def missing(printed: list[str], out: str) -> str | None:
    """The first printed line that did not come, in this order. Numbers may be others, and … stands for any lines."""
    came = iter([shape(line) for line in out.splitlines()])
    return next((p for p in printed if p.strip() not in ("", "…") and not any(shape(p) == c for c in came)), None)


def shape(line: str) -> str:
    """A line without its numbers, and without what aligns it.

    Of a measurement that is cut short on a busy machine the last sizes are smaller, or a cell has a dash.
    """
    numbers = re.sub(r"[-+]?\d[\d,.]*(e[-+]\d+)?", "#", re.sub(r"[─\s]+", " ", line)).strip()
    return re.sub(r"(?<=│ )–(?= │)", "#", re.sub(r"# [kMG]B", "# B", numbers))


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment(folder), cwd=folder, capture_output=True, text=True, timeout=SECONDS)


def test_pages_with_code_are_found():
    assert {"docs/guide.md", "docs/write-a-codec.md"} <= set(PROGRAMS)
    assert {name_of(p) for p in (ROOT / "docs/tutorials").glob("*.md")} <= set(PROGRAMS) | set(STORIES)


def test_a_line_that_does_not_come_is_found():
    out = "loss 0.25 after 3 steps\n  a   ───  b\n"
    assert missing(["loss 7.5 after 12 steps", "…", "a b"], out) is None
    assert missing(["a b", "loss 7.5 after 12 steps"], out) == "loss 7.5 after 12 steps"
    assert missing(["loss 0.25 after steps"], out) == "loss 0.25 after steps"
    assert missing(["│ 0.18 │ 0.19 at 4 MB │"], "│ – │ 0.006 at 256 kB │") is None
