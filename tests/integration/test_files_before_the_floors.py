"""What was written before the modules moved (docs/adr/0028-floors.md) still loads: the files were made at f95e50f.

Two ranks had trained three steps with ``topk:ratio=0.25``; a shard had two chunks, updated by AdamW and by Replace.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.groups.world import World
from commlib.messaging import keys
from commlib.runtime.optimizers import Recipe, Replace
from commlib.server.job.consistency import BSP
from commlib.server.job.job import ServerJob
from commlib.server.shard.chunk_state import ChunkState
from commlib.server.storage.snapshot import load
from tests.support.rank_pool import Fleet

FILES = Path(__file__).with_name("files_before_the_floors")


def attached(*given: Any, **options: Any) -> tuple[DistributedDataParallel, commlib.HookState]:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)))
    return ddp, commlib.attach(ddp, *given, **options)


def plain(x: Any) -> Any:
    if isinstance(x, dict):
        return {k: plain(v) for k, v in x.items()}
    if isinstance(x, torch.Tensor):
        return x.dtype, x.tolist()
    return [plain(v) for v in x] if isinstance(x, list | tuple) else x


def goes_on(world: World, path: str) -> tuple[bool, int]:
    saved = torch.load(path, weights_only=True)
    ddp, comm = attached("topk:ratio=0.25", min_size=1)
    ddp.module.load_state_dict(saved["model"])
    comm.load_state_dict(saved["comm"][world.rank])
    same = plain(comm.state_dict()) == plain(saved["comm"][world.rank])
    ddp(torch.ones(4, 8)).square().sum().backward()
    return same, comm.stats().steps


def test_a_checkpoint_gives_back_what_was_in_it_and_training_goes_on(fleet: Fleet) -> None:
    first, _ = torch.load(FILES / "checkpoint.pt", weights_only=True)["comm"]
    assert first["ranks"]["0"]["0.weight"]["residual"]["value"].count_nonzero() > 20
    assert fleet.run(2, goes_on, str(FILES / "checkpoint.pt")) == [(True, 4)] * 2


def planned(world: World, path: str) -> dict[str, str]:
    _, comm = attached(commlib.Plan.load(path))
    return {name: str(layer.route) for name, layer in comm.plan.layers.items()}


def test_a_plan_file_gives_every_layer_the_route_it_had(fleet: Fleet) -> None:
    routes = {"0.weight": "topk:ratio=0.25@gather", "2.weight": "topk:ratio=0.25@gather"}
    for found in fleet.run(2, planned, str(FILES / "plan.json")):
        assert found.items() >= routes.items()


def test_a_jobs_bytes_and_what_tells_jobs_apart_are_what_they_were() -> None:
    data = (FILES / "job.msgpack").read_bytes()
    job = ServerJob.unpack(data)
    assert [recipe.kind for recipe in job.recipes] == [torch.optim.AdamW, Replace]
    assert job.pack() == data
    assert (job.fingerprint, job.model) == ("f576957b4241beda", "97789b4f7d02ce76")


def test_a_snapshot_gives_a_shard_its_values_and_optimizers() -> None:
    job = ServerJob.unpack((FILES / "job.msgpack").read_bytes())
    loaded = load(FILES / "snapshots")
    assert loaded.abouts == {"shard0": {"fingerprint": job.model, "clock": 1}}
    values = torch.load(FILES / "values.pt", weights_only=True)
    assert set(loaded.cells) == set(job.chunks) == set(values)
    for key, chunk in job.chunks.items():
        recipe: Recipe = job.recipes[job.chosen[chunk.names[0]]]
        cell = ChunkState(torch.zeros(chunk.numel), recipe.make, range(2), BSP().threshold())
        cell.load_state_dict(loaded.cells[key])
        assert torch.equal(cell.values, values[key])
        assert plain(cell.state_dict()) == plain(loaded.cells[key])


def test_keys_and_the_list_of_those_allowed(tmp_path: Path) -> None:
    folder = shutil.copytree(FILES / "keys", tmp_path / "keys")
    (folder / "host.secret").chmod(0o600)  # git keeps no such modes
    pair = keys.load("host", folder)
    assert keys.allowed(folder) == {pair.public: "host"}
