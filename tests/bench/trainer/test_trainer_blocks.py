"""``blocks`` trains: close to dense after as many steps, for a fraction of the bytes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.full
@pytest.mark.usefixtures("warm_python")
def test_digits_are_learnt_as_well_as_dense_within_two_points() -> None:
    pytest.importorskip("sklearn")
    comms = ["none", "blocks:keep=0.1,staleness=4", "blocks"]
    args = [x for comm in comms for x in ("--comm", comm)]
    command = [sys.executable, "-m", "commlib", "train", "--task", "digits", "--ranks", "2", "--json", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    dense, tight, loose = json.loads(done.stdout)["runs"]
    for run in (tight, loose):
        assert run["replicas_equal"] is True
        assert run["accuracy"] > dense["accuracy"] - 2
    assert tight["ratio"] > 4.5  # a fifth of each layer goes, and what stays dense
    assert loose["ratio"] > 8
