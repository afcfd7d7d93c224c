"""A program of somebody who has installed the wheel, as type checkers see it (tests/repository/test_typed.py); it is
never run.

Every result is annotated or asserted, so a type lost on the way is an error here. A line marked ``expect-error``
must be one: that a checker says nothing there would mean that it sees no types at all.
"""

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import assert_type

import commlib
from commlib.checkpoint import StateDict
from commlib.codecs.base import store
from commlib.errors import CommlibError
from commlib.fsdp.state import ShardedState
from commlib.monitoring.log import Log
from commlib.testing import check_compressor


@dataclasses.dataclass(frozen=True)
class Halves(commlib.Compressor):
    """Payload: values as float16."""

    floor: float = 0.0
    name = "halves"

    def nbytes(self, spec: commlib.LayerSpec) -> int:
        return 2 * spec.numel

    def encode(self, x: torch.Tensor, payload: torch.Tensor, *, memory: commlib.Memory, seed: int) -> None:
        payload.view(torch.float16).copy_(x.view(-1))

    def decode(self, payload: torch.Tensor, out: torch.Tensor, *, add: bool, scale: float, seed: int) -> None:
        store(payload.view(torch.float16).float(), out, add=add, scale=scale)

    def slots(self, spec: commlib.LayerSpec) -> dict[str, commlib.Slot]:
        return {}

    def refuse(self, spec: commlib.LayerSpec) -> str | None:
        return None if spec.numel else "nothing to send"


class Wordy(commlib.Compressor):
    def nbytes(self, spec: commlib.LayerSpec) -> str:  # expect-error: it is a number
        return ""


def train(ddp: DistributedDataParallel) -> None:
    comm = commlib.attach(ddp, "onebit", min_size=512)
    assert_type(comm, commlib.HookState)
    assert_type(commlib.attach(ddp), commlib.HookState)
    plan: commlib.Plan = comm.plan
    routes: dict[str, str] = {each.spec.name: str(each.route) for each in plan}
    stats = comm.stats()
    assert_type(stats, commlib.Stats)
    saved: float = stats.dense_bytes - stats.wire_bytes
    layers: list[commlib.LayerStats] = list(stats.layers.values())
    settled: bool = comm.settled
    predicted: float | None = comm.predicted_s
    print(routes, saved, layers, settled, predicted)
    comm.swap(commlib.Lossy(["onebit", Halves()]))
    comm.swap({"head.*": "none", "*": commlib.make("topk:ratio=0.01")})
    comm.swap(commlib.Exact())
    with comm.log_to("run.jsonl", every=100) as log:
        assert_type(log, Log)
    comm.discard_step()
    assert_type(comm.detach(), None)

    commlib.attach(ddp, 3)  # expect-error: no rule
    print(comm.stats().wire_kilobytes)  # expect-error: no such attribute
    comm.swap(None)  # expect-error: no rule
    words: str = comm.settled  # expect-error: a bool
    count: int = comm.plan  # expect-error: a Plan
    comm.parameter_stats()  # expect-error: of a ShardedState only
    commlib.atach(ddp)  # expect-error: no such function
    print(words, count)


def checkpoints(comm: commlib.HookState, others: list[StateDict]) -> None:
    state = comm.state_dict()
    assert_type(state, StateDict)
    whole: dict[str, Any] = commlib.merge_state_dicts([state, *others])
    comm.load_state_dict(whole, drop_residuals=True)
    comm.load_state_dict(commlib.read_state("checkpoint", comm, key="comm"))

    comm.load_state_dict("checkpoint")  # expect-error: a path is no state
    commlib.merge_state_dicts(3)  # expect-error: not states
    commlib.read_state("checkpoint", nn.Linear(2, 2))  # expect-error: nothing that is attached


def codecs() -> None:
    codec = commlib.make("int8")
    assert_type(codec, commlib.Compressor)
    length: int = codec.nbytes(commlib.LayerSpec("layer", (4, 3)))
    codec.compress(torch.ones(4, 3), torch.empty(length, dtype=torch.uint8), seed=1)
    fed = commlib.ErrorFeedback(Halves(floor=0.5))
    inner: commlib.Compressor = fed.inner
    check_compressor(inner)
    check_compressor("halves")
    route: commlib.Route = commlib.Route("gather", codec)
    try:
        print(route)
    except commlib.PeerLost as e:
        error: CommlibError = e
        print(error)

    commlib.make(8)  # expect-error: no spec string
    codec.nbytes("layer")  # expect-error: a string is no LayerSpec
    Halves(floor="low")  # expect-error: a number
    Halves(celing=1.0)  # expect-error: no such option
    commlib.Lossy(8)  # expect-error: no codec
    commlib.Compressor()  # expect-error: it is abstract


def sharded(model: nn.Module) -> None:
    state = commlib.attach(model, "onebit", parameters="int8")
    assert_type(state, ShardedState)
    both: tuple[commlib.Stats, commlib.Stats] = (state.stats(), state.parameter_stats())
    state.load_state_dict(state.state_dict())
    state.detach()
    print(both)

    hooked: commlib.HookState = state  # expect-error: of DDP
    print(hooked)


def other_ways(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with commlib.ParameterServer(model, optimizer, consistency="ssp:3", push="onebit") as server:
        assert_type(server, commlib.ParameterServer)
        assert_type(server.step(), None)
        bytes_sent: int = server.sent
    with commlib.LocalSteps(model, "diloco", tau=100, optimizer=optimizer) as local:
        assert_type(local, commlib.LocalSteps)
        met: bool = local.step()
        with local.shared():
            pass
        apart: list[commlib.Stats] = local.stats
    step = commlib.ShardedStep(model, optimizer, "int8")
    stepped: bool = step.step()
    norm: float = step.clip_grad_norm_(1.0)
    with step.no_sync():
        pass
    step.close()
    rule = commlib.SSP(3)
    relaxed: commlib.Consistency = rule
    print(bytes_sent, met, apart, stepped, norm, relaxed)

    commlib.ParameterServer(model, consistency="ssp:3")  # expect-error: without an optimizer
    commlib.LocalSteps(model, tau=[1])  # expect-error: no number
    commlib.ShardedStep(model, optimizer, compresor="int8")  # expect-error: misspelt
    step.clip_grad_norm_("one")  # expect-error: no number
