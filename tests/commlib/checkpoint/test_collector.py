"""All ranks' states come to rank 0 and back; whoever does not come, or differs, is named on every rank that did."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commlib
from commlib import CheckpointMismatch, PeerLost
from commlib.checkpoint.collector import Collector
from commlib.errors import ProtocolError
from commlib.groups.world import World
from tests.support.rank_pool import Fleet
from tests.support.tiny_ddp import Trainer


def message(job: Any, kind: type[Exception]) -> str:
    with pytest.raises(kind) as raised:
        job()
    return str(raised.value)


def there_and_back(world: World, folder: str) -> dict[str, Any]:
    made = Trainer(world, "onebit")
    collector = Collector(made.ddp, made.comm)
    made.train(3)
    path = Path(folder) / "made" / "commlib.pt"
    collector.save(path)
    saved, before = torch.load(path) if world.rank == 0 else {}, made.comm.state_dict()
    dist.barrier()
    made.train(2)
    found = collector.load(path)
    after = made.comm.state_dict()
    equal = all(
        torch.equal(slot["value"], after["ranks"][str(world.rank)][name][key]["value"])
        for name, slots in before["ranks"][str(world.rank)].items()
        for key, slot in slots.items()
    )
    nothing = collector.load(Path(folder) / "other.pt")
    collector.close()
    made.close()
    files = sorted(p.name for p in path.parent.iterdir())
    return {"ranks": sorted(saved.get("ranks", [])), "found": (found, nothing), "equal": equal, "files": files}


def test_every_rank_gets_its_own_back_and_the_file_is_there_whole(fleet: Fleet, tmp_path: Path):
    first, second = fleet.run(2, there_and_back, str(tmp_path))
    assert first == {"ranks": ["0", "1"], "found": (True, False), "equal": True, "files": ["commlib.pt"]}
    assert second == {**first, "ranks": []}


def alone(world: World) -> tuple[str, bool]:
    made = Trainer(world, "onebit")
    collector = Collector(made.ddp, made.comm, timeout=0.3)
    made.train(1)
    said = message(collector.collect, PeerLost) if world.rank == 0 else ""
    dist.barrier()
    again = Trainer(world, "onebit")  # what one rank has tried alone leads nothing astray
    again.train(1)
    whole = Collector(again.ddp, again.comm).collect()
    made.close()
    again.close()
    return said, whole is not None


def test_a_rank_that_does_not_come_is_named_in_time_and_later_models_attach(fleet: Fleet):
    (said, first), (_, second) = fleet.run(2, alone)
    assert said.startswith("rank 1 of 2 did not come within 0.3 s to save a checkpoint (this is rank 0)")
    assert (first, second) == (True, False)


class Command:
    """What runs a command where it is unpickled."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.file}",)


def hostile(world: World, folder: str, kind: str) -> tuple[str, bool]:
    made = Trainer(world, "onebit")
    made.train(1)
    ran = Path(folder) / "ran"

    def send(state: object, to: int, group: Any) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(Command(str(ran)))), dtype=torch.uint8)
        dist.send(torch.tensor([len(data), 1 << 50 if kind == "huge" else len(data)]), to, group=group)
        if kind == "pickle":
            dist.send(data, to, group=group)

    said = ""
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr("commlib.checkpoint.collector._send", send)
        collector = Collector(made.ddp, made.comm, timeout=20.0)
        if world.rank == 0:
            said = message(collector.collect, ProtocolError)
        else:
            collector.collect()
        dist.barrier()
        collector.close()
    made.close()
    return said, ran.exists()


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("pickle", "what rank 1 sent is no state of commlib"),
        ("huge", r"rank 1 would send 1125899906842624 bytes of state, \d+ of them names: at most \d+ fit"),
    ],
)
def test_nothing_that_a_rank_sends_is_run_or_room_made_for_by_another(
    fleet: Fleet, tmp_path: Path, kind: str, wanted: str
) -> None:
    (said, ran), _ = fleet.run(2, hostile, str(tmp_path), kind)
    assert re.search(wanted, said), said
    assert not ran


def differing(world: World, folder: str) -> dict[str, str]:
    made = Trainer(world, "onebit")
    collector = Collector(made.ddp, made.comm)
    made.train(1)
    path = Path(folder) / "commlib.pt"
    collector.save(path)
    dist.barrier()
    state = torch.load(path)
    other = {**state, "layers": {**state["layers"], "new": "3 float32"}}
    broken = Path(folder) / "broken.pt"
    broken.write_bytes(path.read_bytes()[:1000])
    found = {
        "another model": message(
            lambda: collector.restore(lambda: other if world.rank == 1 else state), CheckpointMismatch
        ),
        "one has none": message(
            lambda: collector.restore(lambda: None if world.rank == 1 else state), CheckpointMismatch
        ),
        "broken": message(lambda: collector.load(broken if world.rank == 0 else path), CheckpointMismatch),
    }
    if world.rank == 1:
        made.comm._steps.count += 1
    found["steps"] = message(collector.collect, CheckpointMismatch)
    made.close()
    return found


def test_what_one_rank_cannot_load_or_save_is_an_error_on_all(fleet: Fleet, tmp_path: Path):
    first, second = fleet.run(2, differing, str(tmp_path))
    assert first["another model"].startswith("rank 1 could not load commlib's state: checkpoint of another model")
    assert second["another model"].startswith("checkpoint of another model: 1 parameters differ (new: ")
    assert first["one has none"] == second["one has none"]
    assert first["one has none"].startswith("rank 1 of 2 found no state of commlib, and the others did")
    assert "broken.pt is no readable state of commlib" in first["broken"]
    assert second["broken"].startswith("rank 0 could not load commlib's state: ")
    assert first["steps"] == second["steps"]
    assert "they have done 1, 2 steps, in rank order" in first["steps"]


def of_one(world: World, folder: str) -> list[str]:
    made = Trainer(world, "onebit")
    collector = Collector(made.ddp, made.comm)
    made.train(2)
    whole = collector.collect()
    assert whole is not None
    assert collector.restore(lambda: {**whole, "ranks": {}})
    assert made.comm.state_dict()["step"] == 2
    made.close()
    return sorted(commlib.merge_state_dicts([whole])["ranks"])


def test_one_rank_has_a_state_too_and_one_without_residuals_leaves_them_zero(fleet: Fleet, tmp_path: Path):
    assert fleet.run(1, of_one, str(tmp_path)) == [["0"]]
