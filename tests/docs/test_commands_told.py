"""Commands of the documentation that belong together are run together (``TOLD`` in tests/docs/treated.py)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from commlib.bench.plan import convergence_measure
from commlib.bench.plan.convergence_model import written
from commlib.cli import top
from commlib.cli.main import commands, main
from commlib.codecs import registry
from tests.docs.treated import TOLD, cut
from tests.support import forked_ranks
from tests.support.docs_reader import ROOT, blocks

pytestmark = [pytest.mark.checkout, pytest.mark.full]

Run = Callable[[str], str]
DEADLINE = 200.0  # seconds; it takes a few


class Story:
    """``tell(line)`` runs a command as it is printed but for what is replaced, and ticks it off."""

    def __init__(self, name: str, run: Run) -> None:
        self.left, self._run = list(TOLD[name]), run

    def __call__(self, line: str, more: str = "", **replaced: str) -> str:
        said = self.line(line, more, **replaced)
        return self._run(said)

    def line(self, line: str, more: str = "", **replaced: str) -> str:
        self.left.remove(line)
        for printed, ours in replaced.items():
            assert printed.replace("_", " ") in line
            line = line.replace(printed.replace("_", " "), ours)
        return f"{line} {more}".strip()


@pytest.fixture
def tell(request: pytest.FixtureRequest, run: Run) -> Iterator[Story]:
    """The story that the test is named after; in the end all of it must have been told."""
    story = Story(request.node.name.removeprefix("test_"), run)
    yield story
    assert not story.left


def test_every_story_is_told():
    assert {f"test_{name}" for name in TOLD} <= globals().keys()


def test_figures(tell: Story, run: Run, reader: Path):
    small = "--quick --repeat 1 --codec none --codec onebit"
    tell("commlib bench codec --save before", small)
    run(f"commlib bench codec --save after {small}")
    assert "none" in tell("commlib bench compare before after")
    tell("commlib bench compare before/ after/")
    tell("commlib bench compare A B", A="before", B="after")
    tell("commlib bench compare A B --within 5", "--within 1e9", A="before", B="after")  # times of no more than a look
    (reader / "before").rename(reader / "figures")
    tell("commlib bench report FOLDER", FOLDER="figures")
    tell("commlib bench report figures/")
    assert "<html" in (reader / "figures/report.html").read_text()


def test_keys(tell: Story, run: Run, reader: Path):
    def made(said: str) -> str:
        return said.split("commlib keys allow '")[1].split("'")[0]  # the line for the others

    tell("commlib keys allow 'PUBLIC KEY' hostB", PUBLIC_KEY=made(run("commlib keys new")))
    tell("commlib keys allow 'NEW KEY' hostA", NEW_KEY=made(run("commlib keys new --replace")))
    shown = run("commlib keys show")
    assert "hostA" in shown
    assert "hostB" in shown


@pytest.fixture
def at() -> Iterator[str]:
    """Where a server may listen. The port stays bound, as one that listens may share: so nobody else is given it."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{s.getsockname()[1]}"


@contextlib.contextmanager
def beside(line: str) -> Iterator[None]:
    """A command that goes on until Ctrl-C, and must then end well."""
    process = forked_ranks.context().Process(target=become, args=(line.split()[1:], {**os.environ}))
    process.start()
    try:
        yield
        os.kill(process.pid, signal.SIGINT)
        process.join(DEADLINE)
        assert process.exitcode == 0, line
    finally:
        process.kill()
        process.join()


def become(args: list[str], env: dict[str, str]) -> None:
    """``commlib`` with these words, in a process that was forked."""
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    main(args)


def answers(at: str) -> bool:
    """Whether somebody listens there."""
    host, _, port = at.partition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
        return True
    return False


def test_servers(tell: Story, run: Run, at: str, reader: Path):
    here = {"10.0.0.1:29400": at}
    until = time.monotonic() + DEADLINE

    def members(job: str = "default") -> int:
        assert time.monotonic() < until
        (found,) = re.findall(
            r"^\{.*\}$", run(f"commlib server status --at {at} --job {job} --json"), flags=re.MULTILINE
        )
        return len(json.loads(found)["members"])

    with beside(tell.line("commlib server meet --at 10.0.0.1:29400", **here)):
        while not answers(at):
            assert time.monotonic() < until
            time.sleep(0.1)
        with beside(tell.line("commlib server run --at 10.0.0.1:29400", **here)):
            while members() < 1:
                time.sleep(0.1)
            assert "1 came, and wait" in tell("commlib server status --at 10.0.0.1:29400", **here)
            with beside(tell.line("commlib server run --job hetpipe-stage-0", f"--at {at}")):
                while members("hetpipe-stage-0") < 1:
                    time.sleep(0.1)
            snapshots = tell.line("commlib server run --snapshots FOLDER --every 1000", f"--at {at}", FOLDER="saved")
            with beside(snapshots):
                while members() < 2:
                    time.sleep(0.1)
    assert tell.line("commlib server meet | run | status")  # all three, above


def test_watching(tell: Story, reader: Path, monkeypatch: pytest.MonkeyPatch):
    (program,) = (b.text for b in blocks(ROOT / "docs/watching.md") if 'log_to("run.jsonl", every=20)' in b.text)
    assert "range(60)" in program
    (reader / "watched.py").write_text(program.replace("range(60)", "range(2)"))
    tell("torchrun --nproc-per-node 2 watched.py")
    assert "ended" in tell("commlib top --once")

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    # Ctrl-C between the first look and the second.
    monkeypatch.setattr(top, "time", types.SimpleNamespace(sleep=interrupted))
    assert "ended" in tell("commlib top")


TRACED = """
import gc, torch, torch.distributed as dist, commlib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
ddp = DistributedDataParallel(nn.Linear(64, 64))
comm = commlib.attach(ddp, "onebit")
with comm.trace("trace.json"):
    ddp(torch.ones(2, 64)).sum().backward()
comm.close()
print("traced")
del comm, ddp
gc.collect()
dist.destroy_process_group()
"""


def test_traces(tell: Story, reader: Path):
    (reader / "train.py").write_text(TRACED)
    tell("torchrun --nproc-per-node 2 train.py")
    tell("commlib trace merge trace.json trace.rank1.json --into all.json")
    assert {event["pid"] for event in json.loads((reader / "all.json").read_text())["traceEvents"]} >= {0, 1}


def test_codecs(tell: Story, reader: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    """Two codecs of the pages, installed as ``pip install`` of a distribution with their entry points would."""
    installed = reader / "a_readers_codecs-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: a_readers_codecs\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(
        "[commlib.compressors]\nhalf = a_readers_half:Half\nfloat8 = a_readers_float8:Float8\n"
    )
    for name, page in (("half", "docs/conformance.md"), ("float8", "docs/tutorials/own-codec.md")):
        code = next(b.text for b in blocks(ROOT / page) if b.language == "python" and f'name = "{name}"' in b.text)
        (reader / f"a_readers_{name}.py").write_text(code)
    monkeypatch.syspath_prepend(reader)
    request.addfinalizer(registry.compressors.cache_clear)
    registry.compressors.cache_clear()
    assert "half" in tell("commlib bench codec --codec half", "--numel 4096 --repeat 1")
    assert "half" in tell("commlib train --comm none --comm half", "--steps 2")
    assert "half" in tell("commlib train --comm half", "--steps 2")
    assert "float8" in tell("commlib train --comm float8", "--steps 2")


def test_rounds(tell: Story, run: Run, reader: Path, monkeypatch: pytest.MonkeyPatch):
    """The table that takes minutes, of few ranks and few steps; then a plan by it."""
    line = tell.line("python -m commlib.bench.plan.convergence_measure > table.csv")
    assert line.endswith("> table.csv")
    monkeypatch.setattr(convergence_measure, "SEEDS", (0,))
    monkeypatch.setattr(convergence_measure, "RANKS", (1, 2))
    monkeypatch.setattr(convergence_measure, "TAUS", (1, 2))
    monkeypatch.setattr(convergence_measure, "WAVES", {"ssp": (1,), "wsp": (2,)})
    monkeypatch.setattr(convergence_measure, "MOST_STEPS", 60)
    (reader / "table.csv").write_text(written(convergence_measure.measure()))
    assert "ranks" in run("commlib plan --algorithm sparknet --accuracy 0.8 --ranks 2 --table table.csv")


def test_help(tell: Story, run: Run):
    line = tell.line("commlib COMMAND --help")
    for command in commands():
        assert "--help" in run(line.replace("COMMAND", command))


def test_a_line_that_is_not_told_is_missed(run: Run):
    story = Story("help", run)
    assert story.left == ["commlib COMMAND --help"]
    with pytest.raises(ValueError, match="not in list"):
        story("commlib doctor")
    assert cut("commlib bench codec") != "commlib bench codec"
