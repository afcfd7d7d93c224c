"""The mutation check: faults put in by hand, one at a time, each of which a test of the fast tier has to catch.

In each of twelve core files a sign (or a condition) is wrong, a number is off by one, and an order is swapped; and
faults that were there once return (:mod:`tests.support.mutant_tables`). For every mutant the package is copied with
that one fault, and the one test that the table names is run against the copy: it has to fail, and to pass without the
fault. Prints a line for each mutant, and exits with 1 unless all were caught::

    python -m tests.support.mutants [FILE ...]

The copy has the layout of an installed package, and pytest runs inside it: a checkout's own folder ``commlib`` comes
first for whatever is started in the checkout, pytest and the server that ranks are forked from among them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.support.mutant_tables import MUTANTS, RETURNED, Mutant
from tests.support.steady import FAST

ALL = (*MUTANTS, *RETURNED)
ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("commlib", "compressors", "transports", "bench")
PATIENCE = 120.0  # seconds that a run may take before it counts as one that hangs

_PASSED, _FAILED = 0, 1  # pytest's exit codes; by any other no test was judged
_HERE = "tests/test_copy.py"  # in the copy only
_HERE_SOURCE = '''"""What is tested is the copy, in this process and in forked ranks."""

import os
import sys

import commlib.bench
import commlib.compressors
import commlib.transports


def strays(world=None):
    import commlib.transports.process_group.engine  # a deep one

    found = [m.__file__ for name, m in sys.modules.items() if name.partition(".")[0] == "commlib"]
    return [f for f in found if not f.startswith(os.getcwd() + "/commlib/")]


def test_here():
    assert strays() == []


def test_in_ranks(fleet):
    assert fleet.run(2, strays) == [[], []]
'''


# -- the copy -----------------------------------------------------------------------------------


def package(file: str) -> str:
    """Where a file of the repository is in a copy."""
    return file if file.partition("/")[0] == "commlib" else f"commlib/{file}"


def copy(folder: Path) -> None:
    """The package as it is installed, and the tests."""
    nothing_built = shutil.ignore_patterns("__pycache__")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / package(name), ignore=nothing_built, dirs_exist_ok=True)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=nothing_built)
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / _HERE).write_text(_HERE_SOURCE, encoding="utf-8")


def put_in(mutant: Mutant, folder: Path) -> None:
    """The fault, into a copy.

    Raises:
        ValueError: what it replaces is not there, or several times.
    """
    path = folder / package(mutant.file)
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.file} has {text.count(mutant.old)} of: {mutant.old}")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")


# -- a run --------------------------------------------------------------------------------------


def run(folder: Path, tests: Sequence[str], patience: float = PATIENCE) -> tuple[int | None, str]:
    """Pytest's exit code and what it printed; None as code: it was not through in time, and was killed whole."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", FAST, *tests]
    env = {**os.environ, "PYTHONPATH": str(folder), "TMPDIR": str(folder.parent)}  # what a killed run leaves goes, too
    # A session of its own is a process group of its own: what hangs is killed with the ranks that it has forked.
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        start_new_session=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        said, _ = process.communicate(timeout=patience)
        return process.returncode, said
    except subprocess.TimeoutExpired:
        return None, ""
    finally:  # also at Ctrl-C
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def check(mutant: Mutant, clean: Path, folder: Path) -> bool:
    """Whether its test catches it; prints that.

    Raises:
        ValueError: no test was run: the table is wrong.
    """
    shutil.copytree(clean, folder)
    try:
        put_in(mutant, folder)
        code, said = run(folder, [mutant.caught_by])
    finally:
        shutil.rmtree(folder)
    if code not in (None, _PASSED, _FAILED):
        raise ValueError(f"{mutant.file}, {mutant.kind}: pytest {mutant.caught_by} exits with {code}:\n{said}")
    how = {None: f"hangs: {mutant.caught_by}", _PASSED: "SURVIVED", _FAILED: f"caught by {mutant.caught_by}"}[code]
    print(f"{mutant.file}, {mutant.kind}: {how}", flush=True)
    return code != _PASSED


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="only the mutants of these, from the root; default: all"
    )
    files = parser.parse_args().files
    if unknown := set(files) - {m.file for m in ALL}:
        parser.error(f"no mutants of {', '.join(sorted(unknown))}")
    chosen = [m for m in ALL if not files or m.file in files]
    with tempfile.TemporaryDirectory(prefix="commlib-mutants-") as room:
        clean = Path(room) / "clean"
        copy(clean)
        code, said = run(clean, [_HERE, *dict.fromkeys(m.caught_by for m in chosen)], patience=10 * PATIENCE)
        if code != _PASSED:
            print(f"without any fault pytest exits with {code}:\n{said}", file=sys.stderr)
            return 2
        try:
            caught = sum([check(m, clean, Path(room) / "mutant") for m in chosen])
        except ValueError as e:
            print(f"the table is wrong: {e}", file=sys.stderr)
            return 2
    print(f"{caught} of {len(chosen)} caught")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
