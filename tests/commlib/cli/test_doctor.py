"""The doctor: its JSON, its verdicts, its self-test."""

from __future__ import annotations

import json

import pytest
import torch
import typer

from commlib.cli import doctor as module
from commlib.cli.doctor import DoctorReport, doctor, examine
from commlib.messaging.network import Interface, gloo_choice, nccl_choice, network

ETH = Interface(addresses=["192.0.2.7"], mbit=1000, up=True)
LO = Interface(addresses=["127.0.0.1", "::1"], mbit=None, up=True)
DOWN = Interface(addresses=[], mbit=None, up=False)


def test_json_has_the_promised_fields(capsys: pytest.CaptureFixture[str]) -> None:
    doctor(as_json=True, selftest=False)
    report = json.loads(capsys.readouterr().out)
    assert report.keys() == DoctorReport.__annotations__.keys()
    assert report["ok"] is True
    assert report["versions"]["torch"].startswith(torch.__version__.partition("+")[0])
    assert report["backends"].keys() == {"gloo", "nccl", "mpi", "ucc"}
    assert report["host"]["usable_cores"] >= 1
    assert "lo" in report["network"]["interfaces"]
    assert report["compressors"]["none"] is None
    assert report["selftest"] is None


def test_two_processes_all_reduce() -> None:
    report = examine(deadline=240.0)
    assert report["selftest"] is not None
    assert report["selftest"]["ok"], report["selftest"]["detail"]
    assert report["selftest"]["seconds"] > 0


def test_the_self_test_gives_up_at_its_deadline() -> None:
    outcome = module.all_reduce_between_two(0.01)
    assert not outcome["ok"]
    assert outcome["detail"] == "rank 0: no answer within 0.01 s; rank 1: no answer within 0.01 s"


@pytest.mark.full
def test_an_interface_that_is_not_there_breaks_gloo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(typer.Exit) as left:
        doctor(selftest=True)
    assert left.value.exit_code == 1
    out = capsys.readouterr().out
    assert "GLOO_SOCKET_IFNAME=nosuch0 names no usable interface (known: " in out
    assert "unset GLOO_SOCKET_IFNAME" in out
    assert "two Gloo processes all-reduce: FAILED" in out


def test_a_missing_required_package_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_version", lambda name: None if name == "msgpack" else "1.0")
    report = examine(None)
    assert not report["ok"]
    assert {"what": "msgpack is not installed", "fix": "pip install msgpack", "required": True} in report["problems"]


def test_a_missing_optional_package_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_version", lambda name: None if name == "numba" else "1.0")
    report = examine(None)
    assert report["ok"]
    assert [p["fix"] for p in report["problems"] if "numba" in p["what"]] == ['pip install "torch-commlib[numba]"']


def test_the_table_names_every_interface(capsys: pytest.CaptureFixture[str]) -> None:
    doctor(selftest=False)
    out = capsys.readouterr().out
    for name in network()["interfaces"]:
        assert f"interface {name}" in out
    assert "everything required works" in out


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        (None, "eth0"),
        ("", "eth0"),
        ("lo", "lo"),
        ("^eth", "lo"),
        ("=eth", None),
        ("=eth0", "eth0"),
        ("docker,eth", "eth0"),
        ("wlan", None),
    ],
)
def test_what_nccl_picks(wanted: str | None, chosen: str | None) -> None:
    assert nccl_choice({"lo": LO, "ifb0": DOWN, "eth0": ETH}, wanted) == chosen


def test_nccl_prefers_infiniband() -> None:
    assert nccl_choice({"lo": LO, "eth0": ETH, "ib0": ETH}, None) == "ib0"


@pytest.mark.parametrize(("wanted", "chosen"), [("eth0", "eth0"), ("eth0,lo", "eth0,lo"), ("wlan0", None)])
def test_what_gloo_is_told(wanted: str, chosen: str | None) -> None:
    assert gloo_choice({"lo": LO, "eth0": ETH}, wanted) == chosen


def test_gloo_follows_the_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: [(0, 0, 0, "", ("192.0.2.7", 0))])
    assert gloo_choice({"lo": LO, "eth0": ETH}, None) == "eth0"
    assert gloo_choice({"lo": LO, "eth0": DOWN}, None) == "lo"
