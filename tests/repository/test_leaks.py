"""The guard of conftest.py: what a test leaves behind fails it, what it cleans up does not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]

LEAKS = """
import multiprocessing as mp, socket, subprocess, sys, threading

from tests import conftest

kept = []

def setup_function(function):  # what goes by itself has time for it, what stays is not waited for
    conftest._PATIENCE = 0.5 if function in (test_socket, test_thread, test_child) else 60.0

def test_clean():
    with socket.create_server(("127.0.0.1", 0)):
        pass
    t = threading.Thread(target=int)
    t.start()
    t.join()
    assert subprocess.run([sys.executable, "-c", ""]).returncode == 0
    mp.get_context("spawn").Lock()  # starts Python's own resource tracker, which stays

def test_ends_by_itself():
    threading.Timer(0.1, int).start()

def test_socket():
    kept.append(socket.create_server(("127.0.0.1", 0)))

def test_thread():
    kept.append(threading.Event())
    threading.Thread(target=kept[-1].wait, name="sleeper").start()

def test_child():
    kept.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE))

def test_clean_up():
    kept[0].close()
    kept[1].set()
    kept[2].communicate()
"""


def test_leaks_fail_the_test_that_made_them(tmp_path: Path) -> None:
    shutil.copytree(TESTS / "support", tmp_path / "tests" / "support")
    shutil.copy(TESTS / "conftest.py", tmp_path / "tests")
    (tmp_path / "tests" / "test_leaks.py").write_text(LEAKS)
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\naddopts = --import-mode=importlib\n")
    assert shutil.which("cat")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rpE", "--rootdir", str(tmp_path)]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    out = done.stdout
    assert "6 passed, 3 errors" in out, out + done.stderr
    for name, what in (("socket", "listening sockets: tcp port"), ("thread", "sleeper"), ("child", "(cat)")):
        assert any(
            line.startswith(f"ERROR tests/test_leaks.py::test_{name} ") and what in line for line in out.splitlines()
        ), out
