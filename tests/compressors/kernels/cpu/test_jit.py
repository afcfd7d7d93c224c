"""Where compiled loops are kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import logging; logging.basicConfig()
import torch
from commlib.codecs.registry import make
from commlib.codecs.registry import warm
warm([make("dgc:momentum=0,ratio=0.1")], torch.device("cpu"))
"""


def run(**environment: str) -> str:
    """What a process that compiles, or loads, a few loops says."""
    env = {k: v for k, v in os.environ.items() if k not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")} | environment
    return subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, check=True).stderr


def compiled(folder: Path) -> dict[str, int]:
    """Files of machine code, and when they were written."""
    return {str(f): f.stat().st_mtime_ns for f in folder.rglob("*.nbc")}


@pytest.mark.full
@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "NUMBA_CACHE_DIR"])
def test_what_one_process_compiles_the_next_one_loads(variable: str, tmp_path: Path) -> None:
    run(**{variable: str(tmp_path)})
    first = compiled(tmp_path / "commlib")
    assert first
    run(**{variable: str(tmp_path)})
    assert compiled(tmp_path / "commlib") == first


@pytest.mark.full
def test_where_nothing_can_be_kept_it_works_and_says_so_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = run(XDG_CACHE_HOME=str(tmp_path / "file"))
    assert said.count("compiled loops are not kept, so each process compiles them") == 1
    assert "set NUMBA_CACHE_DIR" in said
