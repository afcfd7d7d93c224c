"""What is in the wheel: every module of the four folders, and nothing at the top level but commlib."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "commlib": "commlib",
    "compressors": "commlib/compressors",
    "transports": "commlib/transports",
    "bench": "commlib/bench",
}


def tracked() -> list[str]:
    """Files of the checkout that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return [name for name in dict.fromkeys(listed) if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names in a wheel built from a copy of the tracked files: what lies about in the checkout has no part in it."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist"]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (copy / "dist").glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        return archive.namelist()


@pytest.mark.checkout
def test_every_module_is_in_the_wheel(wheel: list[str]) -> None:
    wanted = {}
    for name in tracked():
        folder, _, rest = name.partition("/")
        if folder in FOLDERS and name.endswith((".py", "py.typed")):
            wanted[f"{FOLDERS[folder]}/{rest}"] = name
    assert wanted
    forgotten = sorted(name for inside, name in wanted.items() if inside not in wheel)
    assert not forgotten, "list their package under [tool.setuptools] in pyproject.toml: " + ", ".join(forgotten)


@pytest.mark.checkout
def test_commlib_is_the_only_top_level_name(wheel: list[str]) -> None:
    top = {name.partition("/")[0] for name in wheel}
    assert {name for name in top if not name.endswith(".dist-info")} == {"commlib"}


@pytest.mark.checkout
def test_the_wheel_carries_no_tests_and_the_licence(wheel: list[str]) -> None:
    assert not [name for name in wheel if "test_" in name or "conftest" in name]
    assert any(name.endswith("/licenses/LICENSE") for name in wheel)


@pytest.mark.parametrize(
    "group", ["commlib.commands", "commlib.compressors", "commlib.filters", "commlib.process_groups"]
)
def test_every_entry_point_of_this_distribution_loads(group: str) -> None:
    ours = [ep for ep in entry_points(group=group) if ep.value.startswith("commlib.")]
    assert ours
    broken = {}
    for ep in ours:
        try:
            ep.load()
        except (ImportError, AttributeError) as e:
            broken[ep.name] = str(e)
    assert not broken


def test_to_import_commlib_does_not_load_torchs_compiler() -> None:
    """It takes a second; whoever compiles, or wraps a model in DDP, loads it himself."""
    loaded = "import sys, commlib; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], check=False).returncode == 0
