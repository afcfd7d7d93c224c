"""Ranks that share a GPU are hosts of their own to NCCL, which refuses two of one host."""

from __future__ import annotations

import os

import pytest
import torch

from commlib.bench.launch import gpus


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices that were made the current one; PyTorch sees two."""
    devices: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.delenv(gpus.HOST, raising=False)
    return devices


def place(monkeypatch: pytest.MonkeyPatch, local: int, here: int) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(local))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))


def test_with_a_gpu_each_nccl_is_told_nothing(taken: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    place(monkeypatch, 1, 2)
    assert gpus.take_gpu() == torch.device("cuda", 1)
    assert taken == [torch.device("cuda", 1)]
    assert gpus.HOST not in os.environ


def test_ranks_that_share_one_have_a_host_each(taken: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = []
    for local in range(4):
        place(monkeypatch, local, 4)
        monkeypatch.delenv(gpus.HOST, raising=False)
        gpus.take_gpu()
        hosts.append(os.environ[gpus.HOST])
    assert len(set(hosts)) == 4
    assert [d.index for d in taken] == [0, 1, 0, 1]


def test_in_a_lab_the_emulated_host_stays_in_the_name(
    taken: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    place(monkeypatch, 2, 3)
    monkeypatch.setenv(gpus.HOST, "h7")
    gpus.take_gpu()
    assert os.environ[gpus.HOST] == "h7-2"
