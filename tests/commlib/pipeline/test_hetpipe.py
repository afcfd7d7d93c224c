"""Two virtual workers of two stages each, as real processes with real shards: what they compute, read, and survive."""

from __future__ import annotations

import datetime
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from commlib.errors import CommlibError, PeerLost
from commlib.groups.store import store_of
from commlib.groups.world import World
from commlib.pipeline.hetpipe import HetPipe
from commlib.pipeline.schedule import depth
from commlib.server.job.consistency import WSP
from tests.support.rank_pool import Fleet
from tests.support.trace_reader import shown

STAGES, WORKERS = 2, 2


def whole(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))


def halves(model: nn.Sequential) -> list[nn.Module]:
    return [model[:2], model[2:]]


def batch(worker: int, p: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1000 * worker + p)
    x = torch.randn(8 + p % 2, 6, generator=g)  # not all of one size
    return x, x[:, :3].argmax(1)


def wave(worker: int, first: int, count: int) -> tuple[list[Tensor], list[Tensor]]:
    xs, ys = zip(*(batch(worker, p) for p in range(first, first + count)), strict=True)
    return list(xs), list(ys)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


# -- what it computes -------------------------------------------------------------------------------

LOCAL, WAVES = 2, 4


def trained(world: World) -> tuple[list[Tensor], list[float]]:
    stage = halves(whole(world.rank // STAGES))[world.rank % STAGES]
    losses = list[Tensor]()
    with HetPipe(
        stage, sgd(stage), nn.functional.cross_entropy, stages=STAGES, distance=0, local=LOCAL, timeout=120
    ) as pipe:
        assert (pipe.stage, pipe.worker) == (world.rank % 2, world.rank // 2)
        for w in range(WAVES):
            losses += pipe.step(*wave(pipe.worker, w * (LOCAL + 1), LOCAL + 1))
            if w == 1:
                pipe.flush()  # a pause; the next forward pass has all local steps
        assert pipe.waves == WAVES
    pipe.close()
    with pytest.raises(CommlibError, match="has been closed"):
        pipe.step()
    return values(stage), [float(loss) for loss in losses]


class Reference:
    """What they compute in one process, minibatch by minibatch, from the rule alone: no pipeline, no messages."""

    def __init__(self) -> None:
        self.shared = [halves(whole())[i] for i in range(STAGES)]
        self.shards = [sgd(stage) for stage in self.shared]
        self.local = [halves(whole()) for _ in range(WORKERS)]
        self.optimizers = [[sgd(stage) for stage in own] for own in self.local]
        first = [[values(stage)] for stage in self.shared]
        self.versions = [[list(v) for v in first] for _ in range(WORKERS)]  # worker, stage → after so many local steps
        self.losses: list[list[float]] = [[] for _ in range(WORKERS)]

    def run(self, waves: int, local: int, flushed: int) -> list[list[Tensor]]:
        for w in range(waves):
            sums: list[list[list[Tensor]]] = [[] for _ in range(WORKERS)]
            for p in range(w * (local + 1), (w + 1) * (local + 1)):
                for worker in range(WORKERS):
                    grads = self._gradients(worker, p, local, p - (local + 1) * flushed if w >= flushed else p)
                    self._step(worker, grads)
                    sums[worker].append([g for stage in grads for g in stage])
            self._wave(sums)
        return [values(stage) for stage in self.shared]

    def _gradients(self, worker: int, p: int, local: int, since: int) -> list[list[Tensor]]:
        """With what each stage has at minibatch p: the local steps of those ≤ p − d, or of all before a pause."""
        used = []
        for i in range(STAGES):
            version = max(p - since, p - depth(i, local) + 1, 0)
            used.append([v.clone().requires_grad_() for v in self.versions[worker][i][version]])
        x, y = batch(worker, p)
        hidden = torch.tanh(nn.functional.linear(x, *used[0]))
        hidden = torch.tanh(nn.functional.linear(hidden, *used[1][:2]))
        loss = nn.functional.cross_entropy(nn.functional.linear(hidden, *used[1][2:]), y)
        loss.backward()
        self.losses[worker].append(loss.item())
        return [[v.grad for v in stage if v.grad is not None] for stage in used]

    def _step(self, worker: int, grads: list[list[Tensor]]) -> None:
        for i, stage in enumerate(self.local[worker]):
            for p, g in zip(stage.parameters(), grads[i], strict=True):
                p.grad = g.clone()
            self.optimizers[worker][i].step()
            self.versions[worker][i].append(values(stage))

    @torch.no_grad()
    def _wave(self, sums: list[list[list[Tensor]]]) -> None:
        """One push of each worker: the sum over its wave; and the mean of these is one step of the shards."""
        total: list[Tensor] = []
        for own in sums:
            mine = [g.clone() for g in own[0]]
            for grads in own[1:]:
                mine = [m.add_(g) for m, g in zip(mine, grads, strict=True)]
            total = [t.add_(m) for t, m in zip(total, mine, strict=True)] if total else mine
        every = [p for stage in self.shared for p in stage.parameters()]
        for p, t in zip(every, total, strict=True):
            p.grad = t.div_(WORKERS)
        for shard in self.shards:
            shard.step()
        for worker, local in enumerate(self.local):
            for i, stage in enumerate(local):
                for p, v in zip(stage.parameters(), self.shared[i].parameters(), strict=True):
                    p.copy_(v)
                self.versions[worker][i][-1] = values(stage)


def test_with_no_distance_two_pipelines_compute_what_one_process_does_to_the_last_bit(fleet: Fleet) -> None:
    found = fleet.run(4, trained)
    reference = Reference()
    expected = reference.run(WAVES, LOCAL, flushed=2)
    for rank, (after, losses) in enumerate(found):
        stage, worker = rank % 2, rank // 2
        assert losses == (reference.losses[worker] if stage else [])
        assert all(torch.equal(a, b) for a, b in zip(after, expected[stage], strict=True))
    assert reference.losses[0] != reference.losses[1]


# -- what it reads ----------------------------------------------------------------------------------

RULE = WSP(distance=1, local=1)
HELD, FREE = 3, 3  # waves of virtual worker 1: as late as they can be; at random


class Gate(nn.Module):
    """Tells how many minibatches have come so far; and, of the slow one, keeps a wave's end back until another's did.

    A stage of virtual worker 0 that has all m waves of the other may go on to minibatch (m + D + 1)N + d − 2, and no
    further. Virtual worker 1 ends its wave m only when that has come: so it is as late as it can be.
    """

    def __init__(self, inner: nn.Module, world: World) -> None:
        super().__init__()
        self.inner, self.stage, self.worker = inner, world.rank % 2, world.rank // 2
        self.store: Any = store_of(dist.group.WORLD)
        self.came = self.went = 0
        self.rng = random.Random(world.rank)

    def forward(self, x: Tensor) -> Tensor:
        if self.worker == 0:
            self.store.set(f"gate/{self.stage}/{self.came}", b"")
            self.came += 1
        y: Tensor = self.inner(x)
        y.register_hook(self.back)
        return y

    def back(self, gradient: Tensor) -> None:
        m, within = divmod(self.went, RULE.push_every)
        self.went += 1
        if m >= HELD:
            time.sleep(self.rng.choice([0.0, 0.01, 0.05]))
        elif self.worker == 1 and within == RULE.local:
            last = (m + RULE.distance + 1) * RULE.push_every + depth(self.stage, RULE.local) - 2
            self.store.wait([f"gate/{self.stage}/{last}"], datetime.timedelta(seconds=240))


def traced(world: World, folder: str) -> tuple[list[Tensor], int]:
    inner = halves(whole())[world.rank % 2]
    stage = Gate(inner, world)
    pipe = HetPipe(
        stage,
        torch.optim.SGD(stage.parameters(), lr=0.05),
        nn.functional.cross_entropy,
        stages=STAGES,
        distance=RULE.distance,
        local=RULE.local,
        timeout=120,
    )
    with pipe, pipe.trace(Path(folder) / "{rank}.json"):
        for w in range(HELD + FREE):
            pipe.step(*wave(pipe.worker, w * RULE.push_every, RULE.push_every))
        pipe.flush()
    return values(inner), pipe.waves


@pytest.mark.full
def test_a_real_run_misses_no_more_of_another_than_s_global_and_where_one_is_late_exactly_that(
    fleet: Fleet, tmp_path: Path
) -> None:
    found = fleet.run(4, traced, str(tmp_path))
    for rank in (0, 1):
        assert all(torch.equal(a, b) for a, b in zip(found[rank][0], found[rank + 2][0], strict=True))
    missed: dict[int, list[int]] = {}
    for rank in range(4):
        stage, worker = rank % 2, rank // 2
        seen, own, missed[rank], pushes = 0, 0, [], dict[str, int]()
        for _, name, _, _, details in sorted(shown(tmp_path / f"{rank}.json"), key=lambda row: row[2]):
            what, _, which = name.partition(" ")
            if name.startswith("push "):
                pushes[which] = pushes.get(which, 0) + 1
            elif name.startswith("values of "):
                seen, own = details[f"worker {1 - worker}"], details[f"worker {worker}"]
            elif what == "computes":
                p = int(which)
                missed[rank].append(p - seen * RULE.push_every)
                # its own waves are all in that had ended by then
                assert own == max(0, p - depth(stage, RULE.local) + 1) // RULE.push_every
        assert pushes
        assert set(pushes.values()) == {HELD + FREE}, "one push a wave"
        assert len(missed[rank]) == (HELD + FREE) * RULE.push_every
    assert RULE.staleness == 4
    assert max(max(m) for m in missed.values()) == max(missed[0]) == RULE.staleness
    assert max(missed[1]) == RULE.staleness - 1  # a stage later has one fewer under way


# -- what is wrong ----------------------------------------------------------------------------------


def wrong(world: World) -> list[Any]:
    stage = halves(whole())[world.rank % 2]
    optimizer = sgd(stage)
    with pytest.raises(ValueError, match="4 ranks are no whole virtual workers of 3 stages"):
        HetPipe(stage, optimizer, stages=3)
    with pytest.raises(ValueError, match="distance must be 0 or more"):
        HetPipe(stage, optimizer, stages=2, distance=-1)
    if world.rank % 2:
        with pytest.raises(ValueError, match=rf"stage 1 .*\(rank {world.rank}\) is the last of its pipeline, and"):
            HetPipe(stage, optimizer, stages=2)
    with pytest.raises(CommlibError, match="rank 3 has 'wsp:distance=2,local=1'"):
        HetPipe(stage, optimizer, nn.functional.cross_entropy, stages=2, local=1, distance=1 + world.rank // 3)
    told: list[Any] = []
    try:
        with HetPipe(stage, optimizer, nn.functional.cross_entropy, stages=2, local=1, timeout=120) as pipe:
            if world.rank == 0:
                with pytest.raises(ValueError, match=r"stage 0 .* needs inputs of 2 minibatches a wave, got 3"):
                    pipe.step(*wave(0, 0, 3))
            if world.rank == 1:
                with pytest.raises(ValueError, match=r"stage 1 .* needs targets of 2 minibatches a wave, got none"):
                    pipe.step()
            for w in range(6):
                if w == 2 and world.rank == 3:
                    raise ZeroDivisionError
                if w == 2 and world.rank == 2:
                    pipe._carrier.timeout = 2.0
                pipe.step(*wave(pipe.worker, 2 * w, 2))
    except (PeerLost, ZeroDivisionError) as e:
        told.append(str(e))
    return [told, values(stage)]


@pytest.mark.full
def test_bad_input_is_named_and_so_is_a_lost_stage_while_the_other_virtual_worker_trains_on(fleet: Fleet) -> None:
    found = fleet.run(4, wrong)
    assert found[0][0] == found[1][0] == []
    assert found[2][0][0].startswith("stage 1 of virtual worker 1 (rank 3) no longer sends the gradient of minibatch")
    assert all(torch.isfinite(v).all() for v in found[0][1] + found[1][1])
