"""The command line as a shell sees it: exit status, standard output and standard error of real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from commlib import cli
from commlib.errors import MissingDependency

COMMANDS = ("train", "bench", "doctor")


def run(*args: str, path: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "commlib", *args],
        env=environment(path) | env,
        cwd=path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def environment(path: Path | None) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k != "COMMLIB_DEBUG"}
    return env if path is None else env | {"PYTHONPATH": os.pathsep.join([str(path), *sys.path])}


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """A third party's distribution with commands that go wrong in every way."""
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[commlib.commands]\n"
        "wait = other:wait\nclumsy = other:clumsy\nlost = other:lost\nbug = other:bug\nlacking = other_lacking:main\n"
        "number = other:number\n"
    )
    (tmp_path / "other_lacking.py").write_text("import a_package_that_nobody_has\n")
    (tmp_path / "other.py").write_text(
        "import time\n"
        "from commlib.errors import PeerLost\n"
        "number = 7\n"
        "def wait():\n    '''Wait for a signal.'''\n    print('ready', flush=True)\n    while True: time.sleep(0.05)\n"
        "def clumsy():\n    raise ValueError('ratio must be in (0, 1], got 7')\n"
        "def lost():\n    raise PeerLost('rank 3 did not answer within 5 s')\n"
        "def bug():\n    raise ZeroDivisionError('nobody expected this')\n"
    )
    return tmp_path


def test_help_lists_the_commands_in_order() -> None:
    for args in (["--help"], []):
        done = run(*args)
        assert done.returncode == 0, done.stderr
        listed = re.findall(r"^  (\w+)  +\S", done.stdout.partition("Commands:")[2], flags=re.MULTILINE)
        assert tuple(listed[:3]) == COMMANDS
        assert "not available" not in done.stdout


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"commlib \d+\.\d+\.\d+\S*\n", done.stdout)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    done = run(command, "--help")
    assert done.returncode == 0, done.stderr
    assert f"Usage: commlib {command}" in done.stdout
    assert "--help" in done.stdout


@pytest.mark.parametrize("args", [("--colour",), ("doctor", "--fast"), ("bench", "codec", "--repeat=many")])
def test_a_wrong_option_is_named(args: tuple[str, ...]) -> None:
    done = run(*args)
    assert done.returncode == 2
    assert args[-1].partition("=")[0] in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_command_gets_a_suggestion() -> None:
    done = run("docter")
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown command 'docter' (known: ")
    assert "did you mean 'doctor'?" in done.stderr


@pytest.mark.parametrize(
    ("command", "message"),
    [("clumsy", "ratio must be in (0, 1], got 7"), ("lost", "rank 3 did not answer within 5 s")],
)
def test_an_explained_error_is_one_line(plugin: Path, command: str, message: str) -> None:
    done = run(command, path=plugin)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {message}\n")


def test_debug_shows_the_traceback(plugin: Path) -> None:
    done = run("clumsy", path=plugin, COMMLIB_DEBUG="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ValueError: ratio must be" in done.stderr


def test_a_bug_keeps_its_traceback(plugin: Path) -> None:
    done = run("bug", path=plugin)
    assert done.returncode == 1
    assert "ZeroDivisionError: nobody expected this" in done.stderr


def test_a_missing_package_is_named_with_its_cure(plugin: Path) -> None:
    done = run("lacking", path=plugin)
    assert done.returncode == 2
    needs = "`commlib lacking` needs 'a_package_that_nobody_has': pip install a_package_that_nobody_has"
    assert done.stderr == f"error: {needs}\n"


def test_an_entry_point_that_is_no_command(plugin: Path) -> None:
    done = run("number", path=plugin)
    assert done.returncode == 2
    assert "neither a function nor a typer.Typer" in done.stderr


def test_one_broken_command_leaves_the_help_alone(plugin: Path) -> None:
    done = run("--help", path=plugin)
    assert done.returncode == 0, done.stderr
    assert "Wait for a signal." in done.stdout
    assert re.search(r"lacking +\(not available: `commlib lacking`", done.stdout)


def test_only_the_called_command_is_imported() -> None:
    code = (
        "import sys\nfrom commlib.cli import main\n"
        "try:\n    main(['doctor', '--help'])\n"
        "finally:\n    print(*[m for m in sys.modules if m.startswith('commlib.bench')], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0
    assert done.stderr.strip() == ""


def test_interrupt_ends_quietly_with_130(plugin: Path) -> None:
    command = [sys.executable, "-m", "commlib", "wait"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment(plugin), cwd=plugin, stdout=pipe, stderr=pipe, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=120)
    assert child.returncode == 130
    assert "Traceback" not in errors


def test_two_commands_under_one_name_are_refused(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (plugin / "other-1.0.dist-info" / "entry_points.txt").write_text("[commlib.commands]\ndoctor = other:wait\n")
    monkeypatch.syspath_prepend(str(plugin))
    with pytest.raises(ValueError, match=r"two installed commands are called 'doctor'.*uninstall one of them"):
        cli.commands()


@pytest.mark.parametrize(
    ("module", "cure"),
    [
        ("sklearn.datasets", "pip install scikit-learn"),
        ("yaml", "pip install yaml"),
        ("commlib.transports.zeromq", "reinstall torch-commlib"),
        (None, "reinstall torch-commlib"),
    ],
)
def test_what_to_install(module: str | None, cure: str) -> None:
    error = cli.missing("`commlib train`", ImportError("no", name=module))
    assert isinstance(error, MissingDependency)
    assert cure in str(error)
