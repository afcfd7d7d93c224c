"""A program that is forked from a warm Python is, to who has started it, what one of its own would be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("warm_python")

CASES = {
    "code": (["-c", "import sys; print(sys.argv, sys.path[0] == '', __name__)", "a"], 0, "['-c', 'a'] True __main__\n"),
    "unbuffered": (["-u", "-c", "print(1)"], 0, "1\n"),
    "module": (["-m", "commlib", "--version"], 0, "commlib "),
    "exit": (["-c", "raise SystemExit(3)"], 3, ""),
    "words at the end": (["-c", "raise SystemExit('no')"], 1, "no\n"),
    "error": (["-c", "1 / 0"], 1, 'File "<string>", line 1, in <module>\nZeroDivisionError'),
    "killed": (["-c", "import os; os.kill(os.getpid(), 9)"], -9, ""),
    "broken": (["-c", "import os; os.kill(os.getpid(), 11)"], -11, ""),
    "no such module": (["-m", "nothing_of_that_name"], 1, "No module named nothing_of_that_name"),
    "at the end": (["-c", "import atexit; atexit.register(print, 'bye')"], 0, "bye\n"),
    "threads": (["-c", "import threading as t; t.Timer(0.1, print, ['late']).start()"], 0, "late\n"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_it_prints_and_how_it_ends(case: str) -> None:
    words, status, said = CASES[case]
    done = subprocess.run([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == status
    assert said in done.stdout
    assert "warm_python" not in done.stdout


def test_it_has_pytorch_from_the_beginning() -> None:
    said = subprocess.run([sys.executable, "-c", "import sys; print('torch' in sys.modules)"], capture_output=True)
    assert said.stdout == b"True\n"


def test_a_script_has_its_folder_its_environment_its_input_and_the_files_it_was_given(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("word = 'beside'\n")
    (tmp_path / "program.py").write_text(
        "import os, sys, beside\n"
        "os.write(int(sys.argv[1]), b'through the pipe')\n"
        "print(beside.word, os.environ['MINE'], os.getcwd(), input(), os.path.basename(__file__))\n"
    )
    ours, theirs = os.pipe()
    command = [sys.executable, str(tmp_path / "program.py"), str(theirs)]
    env = {**os.environ, "MINE": "now"}
    done = subprocess.run(command, input="typed\n", capture_output=True, text=True, cwd="/", env=env, pass_fds=[theirs])
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        assert pipe.read() == b"through the pipe"
    assert (done.stdout, done.stderr) == ("beside now / typed program.py\n", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signals_reach_it_and_it_does_not_outlive_who_was_started(number: signal.Signals) -> None:
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        pid = process.stdout.readline().decode().strip()
        process.send_signal(number)
        assert process.wait() == -number
    end = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_it_starts_is_forked_too_and_helpers_of_multiprocessing_are_not() -> None:
    inner = "import multiprocessing as m, subprocess, sys, torch; m.get_context('spawn')"
    inner += ".Process(target=print, args=['spawned']).start(); print('torch' in sys.modules, flush=True)"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}], check=True)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (sorted(done.stdout.split()), done.returncode) == (["True", "spawned"], 0)


def test_options_that_change_the_interpreter_are_left_to_a_python_of_its_own() -> None:
    said = subprocess.run(
        [sys.executable, "-O", "-c", "import sys; print(sys.flags.optimize, 'torch' in sys.modules)"],
        capture_output=True,
    )
    assert said.stdout == b"1 False\n"
