"""The parts of the trainer that need no second process."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commlib.bench.launch.processes import run_ranks
from commlib.bench.trainer import report
from commlib.bench.trainer.checkpoint import run_path
from commlib.bench.trainer.ddp_run import learning_rate
from commlib.bench.trainer.evaluate import ReplicasDiffer, check_replicas
from commlib.bench.trainer.sampler import Shards
from commlib.bench.trainer.settings import TrainSettings
from commlib.bench.trainer.tasks import BadInput, load_task
from commlib.bench.trainer.worker import place


class TestShards:
    def test_ranks_share_an_epoch_without_overlap(self) -> None:
        ranks = [Shards(103, 5, r, 4, seed=3) for r in range(4)]
        seen = torch.cat([s.next() for s, _ in itertools.product(ranks, range(5))])
        assert len(seen) == len(set(seen.tolist())) == 100
        assert {s.epoch for s in ranks} == {0}
        assert ranks[0].steps_until(1) == 0
        assert ranks[0].steps_until(3) == 10

    def test_order_depends_on_seed_and_epoch_alone(self) -> None:
        def order(seed: int, ranks: int) -> list[int]:
            shards = [Shards(24, 12 // ranks, r, ranks, seed) for r in range(ranks)]
            return [i for _ in range(4) for s in shards for i in s.next().tolist()]

        assert order(0, 1) == order(0, 2) == order(0, 4) != order(1, 1)
        assert order(0, 1)[:24] != order(0, 1)[24:]
        assert sorted(order(0, 1)[24:]) == list(range(24))

    def test_going_on_from_a_position(self) -> None:
        whole = Shards(50, 4, 1, 2, seed=0)
        for _ in range(9):
            whole.next()
        later = Shards(50, 4, 1, 2, seed=0, epoch=whole.epoch, consumed=whole.consumed)
        assert [whole.next().tolist() for _ in range(9)] == [later.next().tolist() for _ in range(9)]

    def test_too_few_examples(self) -> None:
        with pytest.raises(BadInput, match="10 examples do not fill one step of 2 ranks × --batch 6"):
            Shards(10, 6, 0, 2, seed=0)


class TestSettings:
    @pytest.mark.parametrize(
        ("flags", "said"),
        [
            ({"task": "digit"}, "unknown task 'digit' .*did you mean 'digits'"),
            ({"comms": ("onebitt",)}, "--comm onebitt: unknown compressor .*did you mean 'onebit'"),
            ({"comms": ("onebit@gathr",)}, "--comm onebit@gathr: unknown exchange .*did you mean 'gather'"),
            ({"comms": ("onebit", "onebit")}, "--comm onebit is given twice"),
            ({"optimizer": "lbfgs"}, "--optimizer: unknown optimizer"),
            ({"device": "tpu"}, "--device: unknown device"),
            ({"steps": 0}, "--steps must be above 0, got 0"),
            ({"steps": 1, "epochs": 1}, "not both"),
            ({"seeds": ()}, "--seeds must be above 0"),
            ({"lr": float("nan")}, "--lr must be above 0"),
            ({"dense_steps": -1}, "--dense-steps must not be negative"),
            ({"resume": True}, "--resume needs --checkpoint"),
            ({"every": 5}, "--checkpoint-every needs --checkpoint"),
            ({"resume": True, "checkpoint": Path("/nowhere")}, "there is no folder /nowhere"),
            ({"data": Path("/nowhere.txt")}, "/nowhere.txt: no such file"),
        ],
    )
    def test_bad_flags_are_named(self, flags: dict[str, Any], said: str) -> None:
        with pytest.raises(BadInput, match=said):
            TrainSettings(**flags)

    def test_a_used_folder_is_not_overwritten(self, tmp_path: Path) -> None:
        run_path(tmp_path, "onebit", 0).mkdir(parents=True)
        TrainSettings(checkpoint=tmp_path, comms=("none",))
        TrainSettings(checkpoint=tmp_path, comms=("onebit",), resume=True)
        with pytest.raises(BadInput, match="already holds this run"):
            TrainSettings(checkpoint=tmp_path, comms=("none", "onebit"))

    def test_every_codec_gets_the_same_recipe_but_dgc_brings_its_momentum(self) -> None:
        defaults = load_task("digits", None, 64).defaults
        s = TrainSettings()
        assert s.recipe(defaults, "none") == s.recipe(defaults, "topk:ratio=0.01")
        assert s.recipe(defaults, "none").momentum == 0.9
        assert s.recipe(defaults, "dgc:ratio=0.01").momentum == 0.0


def test_run_folders_are_apart() -> None:
    specs = ["topk:ratio=0.01", "topk+ratio=0.01", "topk/ratio=0.01", "topk", "topk:ratio=0.01,values=int8"]
    paths = {run_path(Path("x"), s, 0) for s in specs}
    assert len(paths) == len(specs)
    assert {p.parent.parent for p in paths} == {Path("x")}


def test_learning_rate_warms_up_and_comes_down() -> None:
    rates = [learning_rate(1.0, i, 200) for i in range(200)]
    assert rates[0] == 0.05
    assert max(rates) == rates[20] == 1.0
    assert rates[:20] == sorted(rates[:20])
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert 0.05 < rates[-1] < 0.06


def test_no_gpu_is_no_surprise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert place("auto", 0, 2) == (torch.device("cpu"), "gloo")
    with pytest.raises(BadInput, match="torch sees no GPU"):
        place("cuda", 0, 2)


def test_ranks_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert place("auto", 1, 2) == (torch.device("cuda", 1), "nccl")
    assert place("auto", 1, 4) == (torch.device("cpu"), "gloo")
    assert place("cuda", 3, 4) == (torch.device("cuda", 1), "nccl")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert place("cuda", 3, 4) == (torch.device("cuda", 1), "gloo")


def drift() -> None:
    """Two replicas that differ in one bit."""
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    check_replicas(model, torch.device("cpu"), "none")
    if torch.distributed.get_rank() == 1:
        with torch.no_grad():
            model.bias[0] = torch.nextafter(model.bias[0], torch.tensor(9.0))
    try:
        check_replicas(model, torch.device("cpu"), "onebit")
    except ReplicasDiffer as e:
        text = str(e)
    torch.distributed.barrier()
    raise ReplicasDiffer(text)


def test_replicas_that_differ_are_found_on_every_rank() -> None:
    with pytest.raises(Exception, match=r"'onebit' the replicas differ: \w{12} on rank 0; \w{12} on rank 1"):
        run_ranks(drift, 2, timeout=300)


def test_summary_over_seeds() -> None:
    run = {"loss": 0.5, "ms_per_step": 2.0, "wire_bytes_per_step": 10.0, "ratio": 4.0, "big_ratio": None}
    runs = [{**run, "comm": c, "seed": s, "accuracy": 90.0 + s, "replicas_equal": True} for c in "ab" for s in (0, 2)]
    a, b = report.summary(runs)
    assert (a["comm"], b["comm"]) == ("a", "b")
    assert a["accuracy"] == {"mean": 91.0, "sd": pytest.approx(2**0.5)}
    assert report.table(runs).row_count == 2


class TestData:
    def test_text_is_cut_into_shifted_windows(self, tmp_path: Path) -> None:
        path = tmp_path / "t.txt"
        path.write_text("abcdefgh" * 200, encoding="utf-8")
        task = load_task("text", path, 8)
        x, y = task.train
        assert x.shape == y.shape == (22, 64)
        assert torch.equal(x.flatten()[1:], y.flatten()[:-1])
        assert len(task.test[0]) == 2

    @pytest.mark.parametrize(("content", "said"), [(b"short", "5 characters"), (b"\xff\xfe" * 99, "not UTF-8")])
    def test_odd_texts(self, tmp_path: Path, content: bytes, said: str) -> None:
        path = tmp_path / "t.txt"
        path.write_bytes(content)
        with pytest.raises(BadInput, match=said):
            load_task("text", path, None)

    def test_cifar_without_or_with_an_odd_file(self, tmp_path: Path) -> None:
        with pytest.raises(BadInput, match=r"'cifar' needs --data FILE: expected an \.npz"):
            load_task("cifar", None, None)
        path = tmp_path / "x.npz"
        path.write_bytes(b"PK\x03\x04 not a zip")
        with pytest.raises(BadInput, match=r"expected an \.npz with"):
            load_task("cifar", path, None)

    def test_digits_reads_no_file(self, tmp_path: Path) -> None:
        path = tmp_path / "x"
        path.touch()
        with pytest.raises(BadInput, match="reads no file"):
            load_task("digits", path, None)
