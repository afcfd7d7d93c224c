"""Two ranks on each of two emulated hosts: what leaves a host, flat and with two levels, and how long a step takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "two_levels.py"
LAYERS = 2
pytestmark = [pytest.mark.alone, pytest.mark.checkout]


def test_two_levels_send_two_thirds_of_a_flat_rings_bytes_between_2x2_ranks_and_are_faster(no_lab: str | None) -> None:
    if no_lab is not None:
        pytest.skip(no_lab)
    command = [sys.executable, "-m", "commlib", "bench", "lab", "--hosts", "2", "--ranks-per-host", "2"]
    done = subprocess.run(
        [*command, "--rate", "200mbit", "--", sys.executable, str(EXAMPLE), "--layers", str(LAYERS), "--steps", "3"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"exchange"')]
    assert [line["plan"] for line in lines[1:]] == 2 * ["dense inside a node of 2, routes between 2 nodes"]
    flat, levels, onebit = lines
    # Flat, one rank of each host sends to the other in the ring: 2(P − 1)/P of D; with levels 2(N − 1)/N of D.
    # Frames add 5 % at most; the barriers around a step send a few kB.
    gradient = 4 * LAYERS * 1024 * 1024
    assert 1.5 * gradient < flat["bytes"] < 1.08 * 1.5 * gradient
    assert 1.0 * gradient < levels["bytes"] < 1.08 * 1.0 * gradient
    assert onebit["bytes"] < levels["bytes"] / 20
    assert levels["seconds"] < 0.9 * flat["seconds"]
    assert onebit["seconds"] < levels["seconds"]
