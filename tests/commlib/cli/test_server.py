"""``commlib server``: a meeting place, shards and a look at them, as processes that people start and stop."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import commlib
from commlib.server.membership import rendezvous
from tests.support.server_cluster import Cluster

COMMAND = [sys.executable, "-m", "commlib", "server"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as s:
        return int(s.getsockname()[1])


@contextlib.contextmanager
def running(*args: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*COMMAND, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def says(process: subprocess.Popen[str]) -> str:
    """What it waits for; nothing, if it has ended."""
    assert process.stdout is not None
    return process.stdout.readline()


@contextlib.contextmanager
def meeting_place() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """At a port that was free a moment ago; at another one, if somebody else has it by now."""
    while True:
        at = f"127.0.0.1:{free_port()}"
        with running("meet", "--at", at) as place:
            if says(place):
                yield at, place
                return
            assert "Address already in use" in place.communicate()[1]


Call = Callable[..., tuple[int, str, str]]


def started(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *args], capture_output=True, text=True, timeout=200)


def status(at: str) -> dict[str, object]:
    done = started("status", "--at", at, "--json", "--timeout", "60")
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def members(found: Any) -> dict[str, Any]:
    """The last of each kind."""
    return {m["kind"]: m for m in found["members"]}


def all_told(found: dict[str, Any]) -> bool:
    """Each member tells once a second how it is doing."""
    return bool(found.get("worker", {}).get("clock") == 11 and "owns" in found.get("shard", {}))


@pytest.mark.full
def test_shards_started_by_hand_serve_show_how_they_do_hand_over_at_ctrl_c_and_end_with_the_job() -> None:
    with (
        meeting_place() as (at, place),
        running("run", "--at", at) as first,
        running("run", "--at", at) as second,
    ):
        assert says(first)
        assert says(second)
        assert status(at)["state"] == "waiting"
        model = nn.Linear(300, 300)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with commlib.ParameterServer(
            model, optimizer, "ssp:3", at, shards=2, workers=1, rank=0, nbytes=32768, patience=60
        ) as server:
            for step in range(40):
                optimizer.zero_grad()
                model(torch.ones(2, 300)).sum().backward()
                server.step()
                if step == 10:
                    found = status(at)
                    while not all_told(members(found)):
                        found = status(at)
                    shown = started("status", "--at", at).stdout
                if step == 20:
                    first.send_signal(signal.SIGINT)
                    assert first.wait(200) == 0
        assert second.wait(200) == 0
        place.send_signal(signal.SIGINT)
        assert place.wait(200) == 0
        assert "it is over" in (second.stderr.read() if second.stderr else "")
    assert found["state"] == "training"
    told = members(found)
    assert told["worker"]["lag"] == 0
    assert told["worker"]["sent"] > 10 * 300 * 300 * 4
    assert told["shard"]["owns"] in range(4, 9)
    assert "worker-0" in shown
    assert all(len(line) < 140 for line in shown.splitlines())
    values = [p.detach() for p in model.parameters()]
    assert all(bool(v.isfinite().all()) for v in values)


def test_status_shows_who_is_there(call: Call) -> None:
    with Cluster(shards=1, workers=1) as cluster:
        model = nn.Linear(30, 30)
        with cluster.join(model, torch.optim.SGD(model.parameters(), lr=0.1), 0) as server:
            model(torch.ones(2, 30)).sum().backward()
            server.step()
            code, out, err = call("server", "status", "--at", cluster.address, "--json")
            shown = call("server", "status", "--at", cluster.address)[1]
    assert code == 0, err
    found = json.loads(out)
    assert found["state"] == "training"
    assert sorted(members(found)) == ["shard", "worker"]
    assert "worker-0" in shown


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("status", "--at", "nowhere"), "members meet at HOST:PORT, got 'nowhere'"),
        (
            ("status", "--at", "127.0.0.1:1", "--timeout", "0.5"),
            "no rendezvous server at 127.0.0.1:1 after 0.5 s",
        ),
        (("run", "--at", "127.0.0.1:1", "--restore"), "--restore needs --snapshots FOLDER"),
        (("run", "--at", "127.0.0.1:1", "--snapshots", "x", "--every", "0"), "must be 1 or more, got 0"),
    ],
)
def test_wrong_calls_are_explained_in_a_line(call: Call, args: tuple[str, ...], said: str) -> None:
    code, _, err = call("server", *args)
    assert code == 2
    assert said in err
    assert "Traceback" not in err


def test_a_port_in_use_is_said(call: Call) -> None:
    store = rendezvous.keep("127.0.0.1")
    code, _, err = call("server", "meet", "--at", f"127.0.0.1:{store.port}")
    assert code == 2
    assert f"members cannot meet at 127.0.0.1:{store.port}: Address already in use" in err
    del store
