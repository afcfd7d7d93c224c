"""``py.typed`` keeps its word: who installs the wheel has every public type, by mypy --strict and by pyright."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import built_distributions

pytestmark = [pytest.mark.full, pytest.mark.checkout]

CONSUMER = Path(__file__).with_name("consumer") / "uses_commlib.py"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a venv with the wheel in it. Other packages are this one's; the checkout is not to be seen."""
    venv = tmp_path_factory.mktemp("consumer") / "venv"
    (wheel,) = built_distributions.build(tmp_path_factory.mktemp("built"), "--wheel").glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = venv / "bin" / "python"
    where = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip())
    (site / "dependencies.pth").write_text("".join(f"{p}\n" for p in sys.path if Path(p).name == "site-packages"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(site), str(wheel)], check=True)
    assert (site / "commlib" / "py.typed").is_file()
    return python


def expected(source: str) -> set[int]:
    """Lines that are wrong, from 1."""
    return {i for i, line in enumerate(source.splitlines(), 1) if "# expect-error" in line}


def mypy(python: Path, folder: Path) -> dict[int, str]:
    """Line → what is wrong with it."""
    pytest.importorskip("mypy", reason="pip install mypy")
    options = ["--strict", "--config-file=", "--no-error-summary", "--cache-dir", str(folder / "cache")]
    command = [sys.executable, "-m", "mypy", *options, "--python-executable", str(python), CONSUMER.name]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=390)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = re.findall(rf"^{re.escape(CONSUMER.name)}:(\d+): error: (.*)$", done.stdout, flags=re.MULTILINE)
    assert len(found) == done.stdout.count(": error: "), done.stdout  # none is in commlib itself
    return {int(line): what for line, what in found}


def pyright(python: Path, folder: Path) -> dict[int, str]:
    """The same."""
    pytest.importorskip("pyright", reason="pip install 'pyright[nodejs]'")
    (folder / "pyrightconfig.json").write_text(json.dumps({"include": [CONSUMER.name], "typeCheckingMode": "strict"}))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", str(python), "-p", "."]
    env = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=390)
    if done.returncode not in (0, 1) or not done.stdout.startswith("{"):  # no node, or nowhere to get it from
        pytest.skip(f"pyright does not run here: {done.stderr.strip()[-200:]}")
    said = json.loads(done.stdout)["generalDiagnostics"]
    return {d["range"]["start"]["line"] + 1: d["message"] for d in said}


@pytest.mark.full
@pytest.mark.parametrize("check", [mypy, pyright])
def test_what_a_consumer_does_right_has_types_and_what_he_does_wrong_is_an_error(
    check: Callable[[Path, Path], dict[int, str]], python: Path, tmp_path: Path
) -> None:
    source = CONSUMER.read_text()
    (tmp_path / CONSUMER.name).write_text(source)
    found = check(python, tmp_path)
    wanted = expected(source)
    assert len(wanted) > 15
    assert {line: what for line, what in found.items() if line not in wanted} == {}
    assert sorted(wanted - found.keys()) == [], "these lines are wrong, and the checker does not see it"


def test_without_the_marker_mypy_would_not_look(python: Path, tmp_path: Path) -> None:
    """So the other test is about the wheel: nothing else gives the types."""
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    marker = site / "commlib" / "py.typed"
    marker.rename(tmp_path / "py.typed")
    try:
        (tmp_path / CONSUMER.name).write_text("import commlib\n")
        assert "missing library stubs or py.typed marker" in mypy(python, tmp_path)[1]
    finally:
        (tmp_path / "py.typed").rename(marker)
