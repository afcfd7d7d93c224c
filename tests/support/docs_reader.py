"""The documentation as tests read it: pages, their blocks of code, and the commands in them."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(r"^```(?P<language>\w*) ?(?P<marks>.*)$")


@dataclasses.dataclass(frozen=True)
class Block:
    """Code of a page.

    Args:
        line: of the page, at which its text begins, from 1.
        language: python, console, …; "" without one, and "indented" for a block that is not fenced.
        marks: what else is said there: ``notest``, ``title="train.py"``.
        text: of the code, with its newline.
    """

    line: int
    language: str
    marks: str
    text: str

    @property
    def file(self) -> str | None:
        """The file that it is."""
        found = re.search(r'title="([^"]+)"', self.marks)
        return found and found[1]


def name_of(page: Path) -> str:
    """From the root."""
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    """All code of a page, in order."""
    found: list[Block] = []
    fence: re.Match[str] | None = None
    text: list[str] = []
    begun = 0

    def end(language: str, marks: str) -> None:
        while text and not text[-1].strip():
            text.pop()
        if text:
            found.append(Block(begun, language, marks, "\n".join(text) + "\n"))
        text.clear()

    for number, line in enumerate(page.read_text().splitlines(), 1):
        if fence is not None:
            if line.strip() == "```":
                end(fence["language"], fence["marks"])
                fence = None
            else:
                text.append(line)
        elif (fence := _FENCE.match(line)) is not None:
            end("indented", "")
            begun = number + 1
        elif line.startswith("    ") or (text and not line.strip()):
            begun = begun if text else number
            text.append(line[4:])
        else:
            end("indented", "")
    assert fence is None, f"{name_of(page)}: a code block has no end"
    end("indented", "")
    return found


def commands(text: str) -> list[str]:
    """The commands of a block: one a line, lines that end in a backslash with the next, without comments at the end."""
    joined = re.sub(r" *\\\n *", " ", text)
    return [re.sub(r"\s+#\s.*$", "", line).strip() for line in joined.splitlines() if line.strip()]


_COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:commlib|make|torchrun|pip|python3?) \S.*|\.ci/run")


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of the documentation.

    Args:
        where: page and line.
        line: what a reader would type.
        inline: it stands in a sentence, and may be no more than a name.
        runs: it is one of a console that tests/docs/test_blocks.py runs.
    """

    where: str
    line: str
    inline: bool = False
    runs: bool = False


def all_commands(page: Path) -> list[Command]:
    """Those of indented blocks, of fenced ones that are no program, and of the sentences of a page."""
    found = []
    for block in blocks(page):
        if block.file or block.language not in ("indented", "", "text", "sh", "console"):
            continue
        lines = commands(block.text)
        if block.language != "indented":  # in a console, and in what looks like one, the rest is output
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        runs = block.language == "console" and not block.marks.startswith("notest")
        where = f"{name_of(page)}:{block.line}"
        found += [Command(where, line, runs=runs) for line in lines if _COMMAND.fullmatch(line)]
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    inline = [c for c in re.findall(r"`([^`\n]+)`", prose) if _COMMAND.fullmatch(c)]
    return found + [Command(name_of(page), line, inline=True) for line in dict.fromkeys(inline)]


def environment(folder: Path) -> dict[str, str]:
    """For what runs in a folder as a reader would in his: this Python's commands first, nothing of the tests'.

    But for the loops that numba has compiled: with a cache of its own every process would do it anew.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    kept = {k: v for k, v in os.environ.items() if not k.startswith("COMMLIB_") and k != "PYTHONPATH"}
    own = {"HOME": str(folder), "XDG_CACHE_HOME": cache}
    return {**kept, "PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "120", **own}


def without_make() -> dict[str, str]:
    """The environment without what a ``make`` above this process hands down: its flags, and ARGS=… and the like."""
    handed = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "ARGS", "AT", "PYTHON", "WORKERS")
    return {name: value for name, value in os.environ.items() if name not in handed}
