"""The command line as a shell sees it: exit status, standard output and standard error."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from commlib.cli import main
from commlib.errors import MissingDependency

COMMANDS = ("train", "bench", "doctor")


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def debug(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors are explained, whatever the tests' own environment asks for."""
    monkeypatch.delenv("COMMLIB_DEBUG", raising=False)


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A third party's distribution with commands that go wrong in every way, installed."""
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
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("other", "other_lacking"):
        monkeypatch.delitem(sys.modules, name, raising=False)  # of the test before
    return tmp_path


def test_help_lists_the_commands_in_order(call: Call) -> None:
    for args in (["--help"], []):
        status, out, err = call(*args)
        assert status == 0, err
        listed = re.findall(r"^  (\w+)  +\S", out.partition("Commands:")[2], flags=re.MULTILINE)
        assert tuple(listed[:3]) == COMMANDS
        assert "not available" not in out


def test_version_as_a_process_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "commlib", "--version"], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"commlib \d+\.\d+\.\d+\S*\n", done.stdout)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, call: Call) -> None:
    status, out, err = call(command, "--help")
    assert status == 0, err
    assert f"Usage: commlib {command}" in out
    assert "--help" in out


@pytest.mark.parametrize("args", [("--colour",), ("doctor", "--fast"), ("bench", "codec", "--repeat=many")])
def test_a_wrong_option_is_named(args: tuple[str, ...], call: Call) -> None:
    status, _, err = call(*args)
    assert status == 2
    assert args[-1].partition("=")[0] in err
    assert "Traceback" not in err


def test_an_unknown_command_gets_a_suggestion(call: Call) -> None:
    status, _, err = call("docter")
    assert status == 2
    assert err.startswith("error: unknown command 'docter' (known: ")
    assert "did you mean 'doctor'?" in err


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    ("command", "message"),
    [("clumsy", "ratio must be in (0, 1], got 7"), ("lost", "rank 3 did not answer within 5 s")],
)
def test_an_explained_error_is_one_line(command: str, message: str, call: Call) -> None:
    assert call(command) == (2, "", f"error: {message}\n")


@pytest.mark.usefixtures("plugin")
def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMLIB_DEBUG", "1")
    with pytest.raises(ValueError, match="ratio must be"):  # it comes to Python, which prints it and exits with 1
        main.main(["clumsy"])


@pytest.mark.usefixtures("plugin")
def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError, match="nobody expected this"):
        main.main(["bug"])


@pytest.mark.usefixtures("plugin")
def test_a_missing_package_is_named_with_its_cure(call: Call) -> None:
    needs = "`commlib lacking` needs 'a_package_that_nobody_has': pip install a_package_that_nobody_has"
    assert call("lacking") == (2, "", f"error: {needs}\n")


@pytest.mark.usefixtures("plugin")
def test_an_entry_point_that_is_no_command(call: Call) -> None:
    status, _, err = call("number")
    assert status == 2
    assert "neither a function nor a typer.Typer" in err


@pytest.mark.usefixtures("plugin")
def test_one_broken_command_leaves_the_help_alone(call: Call) -> None:
    status, out, err = call("--help")
    assert status == 0, err
    assert "Wait for a signal." in out
    assert re.search(r"lacking +\(not available: `commlib lacking`", out)


def test_only_the_called_command_is_imported() -> None:
    code = (
        "import sys\nfrom commlib.cli.main import main\n"
        "try:\n    main(['doctor', '--help'])\n"
        "finally:\n    print(*[m for m in sys.modules if m.startswith('commlib.bench')], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0
    assert done.stderr.strip() == ""


def test_interrupt_ends_quietly_with_130(plugin: Path) -> None:
    command = [sys.executable, "-m", "commlib", "wait"]
    pipe, env = subprocess.PIPE, {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=env, cwd=plugin, stdout=pipe, stderr=pipe, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=120)
    assert child.returncode == 130
    assert "Traceback" not in errors


def test_two_commands_under_one_name_are_refused(plugin: Path) -> None:
    (plugin / "other-1.0.dist-info" / "entry_points.txt").write_text("[commlib.commands]\ndoctor = other:wait\n")
    with pytest.raises(ValueError, match=r"two installed commands are called 'doctor'.*uninstall one of them"):
        main.commands()


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
    error = main.missing("`commlib train`", ImportError("no", name=module))
    assert isinstance(error, MissingDependency)
    assert cure in str(error)
