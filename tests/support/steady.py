"""Whether the fast tier is ever red by chance: it runs again and again while other processes want the cores, too.

``make test-steady ARGS="--runs 10"``: each core is kept busy by a process of equal priority, and the last run has one
core only. Says for each test that was ever red in which runs, and why in the first of them; exits with 1 if any was.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

FAST = "not full"
"""What ``make test`` gives to ``-m``."""

_SPIN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(10**6):\n        pass\n"


@contextlib.contextmanager
def load(cores: Sequence[int]) -> Iterator[list[int]]:
    """Keep each of these cores busy with a process of its own inside the block; they end with this one, too."""
    spinning: list[subprocess.Popen[bytes]] = []
    try:
        for core in cores:
            spinning.append(subprocess.Popen([sys.executable, "-c", _SPIN]))
            os.sched_setaffinity(spinning[-1].pid, [core])
        yield [process.pid for process in spinning]
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def run(cores: Sequence[int], options: Sequence[str], workers: int) -> tuple[dict[str, str], str]:
    """Run the fast tier once on these cores, under load.

    Returns:
        Each red test and why; and pytest's last line.
    """
    with tempfile.TemporaryDirectory() as folder, load(cores):
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-n", str(workers), "--dist", "worksteal", "-m", FAST, "-q"]
        process = subprocess.Popen(
            [*command, f"--junitxml={report}", *options],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        try:
            out, _ = process.communicate()
        except BaseException:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
        if not report.exists():
            return {"pytest itself": out[-2000:]}, f"exit status {process.returncode}"
        red = red_in(ET.parse(report).getroot())
        if process.returncode and not red:
            red["pytest itself"] = f"exit status {process.returncode}: {out[-2000:]}"
        return red, next((line for line in reversed(out.splitlines()) if " in " in line), "")


def red_in(report: ET.Element) -> dict[str, str]:
    """Red tests of a JUnit report, and why: in a line, and below it all that pytest says."""
    red: dict[str, str] = {}
    for case in report.iter("testcase"):
        for kind in ("failure", "error"):
            if (found := case.find(kind)) is not None:
                line = (found.get("message") or found.text or kind).strip().splitlines()[0]
                name, why = f"{case.get('classname')}::{case.get('name')}", f"{line}\n{found.text or ''}"
                red[name] = f"{red[name]}\n{why}" if name in red else why  # a failure, and then an error, too
    return red


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=10, help="how often, the one on a single core included")
    parser.add_argument("--workers", type=int, default=4, help="tests at a time")
    given, options = parser.parse_known_args()
    cores = sorted(os.sched_getaffinity(0))
    ever: dict[str, list[int]] = collections.defaultdict(list)
    why: dict[str, str] = {}
    for n in range(1, given.runs + 1):
        last = n == given.runs
        began = time.monotonic()
        red, said = run(cores[:1] if last else cores, options, given.workers)
        where = "one core" if last else f"{len(cores)} cores"
        print(f"run {n} of {given.runs}, {where}, under load, {time.monotonic() - began:.0f} s: {said}", flush=True)
        for test, reason in red.items():
            ever[test].append(n)
            why.setdefault(test, reason)
            print(f"    red: {test}\n{textwrap.indent(reason, 8 * ' ')}", flush=True)  # the stacks of a hang, too
    for test, runs in ever.items():
        line = why[test].splitlines()[0][:300]
        print(f"red in {len(runs)} of {given.runs} runs ({', '.join(map(str, runs))}): {test}\n    {line}")
    print(f"{len(ever)} tests were ever red in {given.runs} runs")
    return 1 if ever else 0


if __name__ == "__main__":
    sys.exit(main())
