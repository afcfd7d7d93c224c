"""``commlib train --server``: with a parameter server, beside codecs."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

Call = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--server", "sps:3"], "--server sps:3: unknown consistency 'sps'"),
        (["--server", "ssp:-1"], "--server ssp:-1: staleness must be 0 or more, got -1"),
        (["--server", "bsp", "--server", "bsp"], "--server bsp is given twice"),
        (["--server", "bsp push=onbit"], "unknown codec or filter 'onbit'"),
        (["--server", "bsp onebit"], "write RULE, or 'RULE push=SPEC pull=SPEC background'"),
        (["--server", "bsp pull=dgc"], "cannot code values"),
        (["--server", "bsp", "--amp"], "--amp goes with codecs, and not with --server"),
        (["--server", "bsp", "--limit", "1mbit"], "--limit goes with codecs, and not with --server"),
        (["--server", "bsp", "--hierarchy"], "--hierarchy goes with codecs, and not with --server"),
        (["--pauses", "0.5"], "--pauses is a share of the steps, with --step-time above 0"),
        (["--step-time", "-1"], "--step-time is in seconds, 0 or more"),
    ],
)
def test_bad_flags_are_one_line_and_exit_2(call: Call, args: list[str], said: str) -> None:
    code, out, err = call("train", *args)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.full
def test_messages_that_are_coded_are_a_fraction_of_the_bytes_and_it_learns_the_same(call: Call) -> None:
    coded = "bsp push=onebit pull=onebit"  # in bulk every run is the same run: what it learns is not a matter of luck
    code, out, err = call("train", "--ranks", "2", "--steps", "60", "--server", "bsp", "--server", coded, "--json")
    assert code == 0, err
    runs = {r["comm"]: r for r in json.loads(out)["runs"]}
    plain, small = runs["server bsp"], runs[f"server {coded}"]
    assert small["wire_bytes_per_step"] < plain["wire_bytes_per_step"] / 12
    assert small["accuracy"] > plain["accuracy"] - 3.0
    assert small["replicas_equal"]


@pytest.mark.full
def test_in_bulk_it_reaches_what_ddp_reaches_and_a_rule_that_follows_learning_is_told(call: Call) -> None:
    args = ["--ranks", "2", "--steps", "40", "--server", "bsp", "--server", "bsp background", "--server", "dtssp"]
    code, out, err = call("train", *args, "--step-time", "0.01", "--pauses", "0.1", "--json")
    assert code == 0, err
    runs = {r["comm"]: r for r in json.loads(out)["runs"]}
    assert list(runs) == ["none", "server bsp", "server bsp background", "server dtssp"]
    assert runs["server bsp background"]["loss"] == runs["server bsp"]["loss"]
    assert abs(runs["server bsp"]["accuracy"] - runs["none"]["accuracy"]) < 2.0  # sums are made in another order
    assert runs["server bsp"]["loss"] == pytest.approx(runs["none"]["loss"], rel=0.02)
    assert runs["server dtssp"]["accuracy"] > 50.0
    assert all(r["replicas_equal"] and r["steps"] == 40 for r in runs.values())
    assert all(r["seconds"] > 40 * 0.01 for r in runs.values())
    pushed = runs["server bsp"]["wire_bytes_per_step"]
    assert 4 * 301_066 < pushed < 1.05 * 4 * 301_066  # and questions, and what is asked for at the start and the end
