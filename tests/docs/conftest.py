"""Where commands of the documentation are run, and how."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from commlib.bench.lab import unavailable
from tests.docs import ranks
from tests.support.docs_reader import ROOT, environment

MODELS = """
from torch import nn
net = lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
gpt = lambda: nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 100))
few = lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
"""

OF_THE_CHECKOUT = re.compile(r"make |pip |python (tests/|.*-m (pytest|commlib|tests)\b)")
"""What a reader runs in the checkout; all else he does in a folder of his own."""


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In a folder of a reader's own, with a model of his, programs that say who they are, and a home without keys."""
    (tmp_path / "mymodels.py").write_text(MODELS)
    for name in ("train.py", "job.py", "figure.py"):  # one write, or lines of two ranks run into each other
        (tmp_path / name).write_text("import os\nos.write(1, f'rank {os.environ[\"RANK\"]}\\n'.encode())\n")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    for name in [n for n in os.environ if n.startswith("COMMLIB_")]:
        monkeypatch.delenv(name)
    ranks.use(monkeypatch)
    return tmp_path


@pytest.fixture
def run(
    reader: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    call: Callable[..., tuple[int, str, str]],
) -> Callable[[str], str]:
    """``run(line)``: what a command prints, which must end well; commlib's own in this process, its ranks forked."""

    def running(line: str) -> str:
        if ("--hosts " in line or "commlib bench lab" in line) and (reason := unavailable()) is not None:
            pytest.skip(reason)
        program, *words = shlex.split(line)
        if "=" in program:
            with monkeypatch.context() as m:
                m.setenv(*program.split("=", 1))
                return running(line.partition(" ")[2])
        if program == "commlib" and "&&" in words:
            return "".join(running(part) for part in line.split("&&"))
        if program == "commlib":
            status, out, err = call(*words)
        elif program == "torchrun":
            exits = ranks.torchrun(words)
            status = max(exits)
            out, err = capfd.readouterr()
        else:
            status, out, err = shell(line, ROOT if OF_THE_CHECKOUT.match(line) else reader)
        assert status == 0, f"{line}\n{out}{err}"
        assert out or err or program != "commlib", f"{line}\nprints nothing"
        return out + err

    return running


def shell(line: str, folder: Path) -> tuple[int, str, str]:
    """By bash: exit status, stdout, stderr."""
    done = subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr
