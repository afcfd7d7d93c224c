"""``commlib top``: a run in a terminal, wide or narrow, once or until Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from commlib.cli.top import view
from commlib.groups.world import World
from tests.support.rank_pool import Fleet
from tests.support.tiny_ddp import Trainer

Call = Callable[..., tuple[int, str, str]]


def trained(world: World, folder: str) -> None:
    trainer = Trainer(world, {"2.*": "topk:ratio=0.1", "*": "onebit"}, check_replicas=4)
    with trainer.comm.log_to(f"{folder}/run.jsonl", every=5):
        trainer.train(10)
    trainer.close()


@pytest.fixture(scope="module")
def run(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two ranks that has ended."""
    folder = tmp_path_factory.mktemp("run")
    fleet.run(2, trained, str(folder))
    return folder


def shown(seen: dict[str, Any], width: int) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(view(seen, width))
    return capture.get().splitlines()


def test_a_run_is_shown_once(run: Path, call: Call) -> None:
    code, out, err = call("top", str(run), "--once")
    assert (code, err) == (0, "")
    head, _, first, second, *rest = out.splitlines()
    assert head.split() == [
        "rank",
        "step",
        "exposed",
        "ms",
        "steps/s",
        "state",
        "bytes/step",
        "of",
        "dense",
        "error",
        "skipped",
        "replicas",
        "host",
    ]
    for rank, line in enumerate((first, second)):
        cells = line.split()
        assert cells[:2] == [str(rank), "10"]
        assert cells[4] == "ended"
        assert cells[-3:-1] == ["same", "@7"]
    assert "layer" in rest[1]
    assert any("topk:ratio=0.1@gather" in line for line in rest)
    assert call("top", *(str(p) for p in run.iterdir()), "--once")[1] == out


def test_as_json_it_is_one_object(run: Path, call: Call) -> None:
    code, out, _ = call("top", str(run), "--json", "--layers", "2")
    seen = json.loads(out)
    assert code == 0
    assert [row["step"] for row in seen["ranks"]] == [10, 10]
    assert [len(seen[what]) for what in ("layers", "changes", "notes")] == [2, 0, 0]


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_it_fits_the_terminal_and_what_matters_least_goes_first(run: Path, call: Call, width: int) -> None:
    seen = json.loads(call("top", str(run), "--json")[1])
    seen["changes"] = [
        {"step": 7, "layer": "2.weight", "from": "none@dense", "to": "fp16@dense", "reason": "it is " * 30}
    ]
    seen["notes"] = ["ranks are at different steps: rank 1 at 5; ranks 0, 2 at 10, and more that is to be said of it"]
    lines = shown(seen, width)
    assert max(map(len, lines)) <= width
    assert lines[0].split()[:3] == ["rank", "step", "exposed"]
    assert ("host" in lines[0]) == (width >= 120)
    assert any(line.startswith("! ranks are at") for line in lines)
    assert sum(line.strip().startswith(("0 ", "1 ")) for line in lines) == 2  # a rank, a line


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["none-such.jsonl", "--once"], "none-such.jsonl cannot be read"),
        (["--once"], "no log in this folder: there is no .jsonl file in it"),
        (["--every", "0"], "--every must be a number of seconds > 0"),
        (["--layers", "-1"], "--layers must not be negative"),
    ],
)
def test_bad_arguments_are_refused(
    call: Call, args: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = call("top", *args)
    assert code == 2
    assert said in err


@pytest.mark.full
def test_it_follows_a_run_until_ctrl_c_and_leaves_the_last_picture(run: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [
        sys.executable,
        "-c",
        "from commlib.cli.main import main; main()",
        "top",
        str(tmp_path),
        "--every",
        "0.05",
    ]
    env = {**os.environ, "COLUMNS": "100", "LINES": "30", "TERM": "xterm"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        text = until(ours, "", "no rank has written anything yet")
        for path in run.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        text = until(ours, text, "topk:ratio=0.1@gather")
        process.send_signal(signal.SIGINT)
        text = until(ours, text, None)
        assert process.wait(timeout=60) == 0
    os.close(ours)
    assert "Traceback" not in text
    assert text.rstrip().endswith("\x1b[?25h")  # the cursor is there again


def until(terminal: int, text: str, said: str | None) -> str:
    """What has been written when that is there; None: when it is closed."""
    end = time.monotonic() + 60
    while said is None or said not in text:
        assert time.monotonic() < end, f"{said!r} is not in {text!r}"
        if select.select([terminal], [], [], 0.5)[0]:
            try:
                text += os.read(terminal, 65536).decode(errors="replace")
            except OSError:  # nobody has it open any more
                return text
    return text
