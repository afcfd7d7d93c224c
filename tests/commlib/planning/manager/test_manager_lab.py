"""The manager on links that are really slow, and change while it runs."""

from __future__ import annotations

import gc
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.bench.lab import Lab
from commlib.bench.launch.child import tell
from commlib.bench.launch.processes import run_ranks
from commlib.groups.world import World
from commlib.transports.process_group.stream_ordered import NAME, device
from tests.support.tiny_ddp import same_everywhere, step

pytestmark = pytest.mark.alone

Step = dict[str, Any]
_LATER, _MOST = 12, 70  # steps after the change was noticed; of a stretch, in which nothing was


def noticed(stretch: list[Step]) -> int | None:
    """The step in which the log first said that the link has another rate."""
    return next((i for i, step in enumerate(stretch) if any("the link has" in text for text in step["said"])), None)


def through(stretches: list[list[Step]]) -> bool:
    """Whether enough was seen at the rate of now."""
    if len(stretches[-1]) == _MOST:
        return True
    heard = noticed(stretches[-1])
    return (
        stretches[-1][-1]["settled"]
        if len(stretches) == 1
        else heard is not None and (len(stretches[-1]) > heard + _LATER)
    )


def train_while_the_rate_changes(rates: list[float]) -> list[list[Step]]:
    """Steps between the changes, which the parent is asked for; of rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("commlib").addHandler(handler)
    logging.getLogger("commlib").setLevel(logging.INFO)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 512)))
    comm = commlib.attach(ddp)
    beside: Any = dist.new_group()
    x = torch.randn(100, 256)  # rows: three ranks' are half of the bytes of the gradient
    stretches: list[list[Step]] = [[]]
    going = torch.ones(1)
    while going:
        start = time.perf_counter()
        ddp.zero_grad()
        ddp(x).square().mean().backward()
        seconds = time.perf_counter() - start
        if dist.get_rank() == 0:
            routes = [str(p.route) for p in comm.plan]
            predicted = comm.predicted_s
            seen = {"seconds": seconds, "settled": comm.settled, "routes": routes, "predicted": predicted}
            stretches[-1].append({**seen, "said": list(said)})
            said.clear()
            if through(stretches) and not rates:
                going.zero_()
            elif through(stretches):
                tell(rates.pop(0))
                stretches.append([])
        dist.broadcast(going, 0, group=beside)
    comm.close()
    del ddp
    gc.collect()
    dist.destroy_process_group()
    return stretches


def train_until_settled(backend: str) -> dict[str, Any]:
    """On a device whose process group is of this backend: the plan, and how far gradients are from plain DDP's."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = World(dist.get_rank(), dist.get_world_size())
    x = torch.randn(48, 256, generator=torch.Generator().manual_seed(world.rank))
    plain = DistributedDataParallel(layers(), init_sync=False)
    going = torch.ones(1)
    with device(backend) as (gpu, group):
        ddp = DistributedDataParallel(layers(), process_group=group, init_sync=False, gradient_as_bucket_view=True)
        comm = commlib.attach(ddp)
        for _ in range(_MOST):
            gpu.wait(torch.device("cpu"))
            with torch._C._DisableTorchDispatch():
                plain.load_state_dict(ddp.state_dict())
                going.fill_(float(not comm.settled))
                dist.broadcast(going, 0)
            step(ddp, x)
            if not going:
                break
        gpu.wait(torch.device("cpu"))
        with torch._C._DisableTorchDispatch():
            plain(x).square().mean().backward()
            pairs = [(p.grad, q.grad) for p, q in zip(ddp.parameters(), plain.parameters(), strict=True)]
            off = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs if a is not None and b is not None)
            equal = all(same_everywhere(world, a) for a, _ in pairs if a is not None)
        found = {
            "routes": [str(p.route) for p in comm.plan],
            "settled": comm.settled,
            "off": off,
            "equal": equal,
        }
        comm.close()
    dist.destroy_process_group()
    return found


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 512))


@pytest.mark.parametrize("backend", ["gloo", NAME])
def test_by_nccls_rules_rows_are_chosen_as_over_gloo(lab: Callable[..., Lab], backend: str) -> None:
    made = lab(2, 60e6)
    port = made.start()
    found = run_ranks(train_until_settled, 2, (backend,), env=lambda r: made.environment(r, port), prefix=made.prefix)
    for each in found:
        assert each["settled"]
        assert "none@factors" in each["routes"]
        assert each["off"] < 2e-6
        assert each["equal"]


def test_when_the_rate_is_halved_and_doubled_the_plan_follows_within_fifty_steps_and_the_log_says_so(
    lab: Callable[..., Lab],
) -> None:
    made = lab(3, 60e6)
    port = made.start()
    before, slow, fast = run_ranks(
        train_while_the_rate_changes,
        3,
        ([30e6, 60e6],),
        env=lambda r: made.environment(r, port),
        prefix=made.prefix,
        on_message=lambda rank, rate: made.set_rate(rate),
    )[0]
    assert before[-1]["settled"]
    assert "none@factors" in before[-1]["routes"]
    for stretch in (slow, fast):
        heard = noticed(stretch)
        assert heard is not None, stretch
        assert heard <= 50
        assert "instead of" in next(text for text in stretch[heard]["said"] if "the link has" in text)
        later = [step["seconds"] for step in stretch[heard + 3 :]]
        # The bound for a busy machine; what a quiet one does is in docs/manager.md.
        assert stretch[-1]["predicted"] == pytest.approx(statistics.median(later), rel=0.5)
    assert slow[-1]["predicted"] > 1.4 * before[-1]["predicted"]
    assert fast[-1]["predicted"] < 0.8 * slow[-1]["predicted"]
