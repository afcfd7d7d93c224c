"""A codec from another distribution: installed by pip, found by name, checked by the public suite."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_SOURCE = Path(__file__).parents[2] / "examples" / "plugin"
_USE = """
from commlib import testing
from commlib.codecs import registry
codec = registry.make("clip8")
assert type(codec.inner).__module__ == "commlib_clip8", codec
testing.check_compressor("clip8")
testing.check_compressor("topk:ratio=0.5,values=clip8")
print("kept every promise")
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with the example distribution installed in it."""
    source = tmp_path / "source"
    shutil.copytree(_SOURCE, source, ignore=shutil.ignore_patterns("__pycache__"))
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--no-cache-dir"]
    subprocess.run([*pip, *offline, "--target", str(site), str(source)], check=True, cwd=tmp_path)
    return site


def run(site: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", _USE], env=env, cwd=site, capture_output=True, text=True, timeout=300)


@pytest.mark.full
def test_is_installed_found_and_keeps_every_promise(site: Path) -> None:
    done = run(site)
    assert done.returncode == 0, done.stderr
    assert "kept every promise" in done.stdout


@pytest.mark.full
def test_its_own_tests_pass(site: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path / "source" / "tests")]
    done = subprocess.run(pytest_, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


@pytest.mark.full
def test_a_broken_one_is_caught(site: Path) -> None:
    module = site / "commlib_clip8.py"
    sound = module.read_text()
    broken = sound.replace("copy_(top)", "copy_(torch.nan_to_num(top))")
    assert broken != sound
    module.write_text(broken)
    done = run(site)
    assert done.returncode != 0
    assert "AssertionError: clip8:ef=off for shape (): nan at place 0 decodes to finite values only" in done.stderr
