"""The distribution as it is built from the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def tracked() -> list[str]:
    """Files of the checkout that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return [name for name in dict.fromkeys(listed) if (ROOT / name).is_file()]


def build(folder: Path, *options: str) -> Path:
    """Builds from a copy of the tracked files, where nothing else lies about, and says where: sdist and wheel.

    There is no torch to import for it: who builds a distribution has none.

    Args:
        folder: empty.
        options: of ``python -m build``; ``--wheel`` builds the wheel only, without an sdist between.
    """
    copy, without = folder / "checkout", folder / "without"
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy / name)
    without.mkdir()
    (without / "torch.py").write_text("raise ImportError('the build imports torch')")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", *options]
    env = {**os.environ, "PYTHONPATH": str(without)}
    done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return copy / "dist"
