"""Virtual workers that are pipelines, kept together by a parameter server.

A module's forward pass with the weights of now, whatever becomes of them before its backward pass.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from commlib.errors import CommlibError
from commlib.groups.handshake import agree, meeting_place
from commlib.groups.process_groups import group_of, sibling
from commlib.groups.world import World
from commlib.pipeline.activations import ActivationCarrier
from commlib.pipeline.schedule import depth, passes, place
from commlib.server.job.consistency import WSP
from commlib.server.worker.parameter_server import ParameterServer
from commlib.telemetry.recorder import TRACK, Recording, Tracer


def stashed(module: nn.Module, *inputs: Any) -> Any:
    """``module(*inputs)``, whose backward pass may come after later updates of the parameters in place.

    It computes with copies of the parameters (HetPipe, USENIX ATC 2020, section 4: each minibatch has its own), which
    autograd keeps as long as it needs them; gradients go through the copies to the parameters, added to ``.grad`` as
    always. Buffers are the module's own.
    """
    copies: dict[str, Tensor] = {name: p.clone() for name, p in module.named_parameters() if p.requires_grad}
    return functional_call(module, copies, inputs)


def output_of(stage: str, found: Any) -> Tensor:
    """Output of a stage, if it can be trained.

    Raises:
        TypeError: not one tensor.
        ValueError: it needs no gradient.
    """
    if not isinstance(found, Tensor):
        raise TypeError(f"{stage} makes {type(found).__name__}: between stages, and as a loss, goes one tensor")
    if not (found.requires_grad and torch.is_grad_enabled()):
        raise ValueError(f"what {stage} makes needs no gradient: train it with gradients, and a parameter that has one")
    return found


Loss = Callable[[Tensor, Any], Tensor]


class HetPipe:
    """Pipelines train side by side, each of several ranks, under wave synchronous parallelism::

        stage = [front, back][rank % 2]  # ranks 0 and 1 are virtual worker 0, ranks 2 and 3 are 1, …
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.05)
        with commlib.HetPipe(stage, optimizer, loss_fn, stages=2, distance=1, local=3) as pipe:
            for inputs, targets in waves:  # 4 minibatches of each
                losses = pipe.step(inputs, targets)

    A virtual worker has ``local`` + 1 minibatches under way, and takes a local step by each; a minibatch is computed,
    forward and backward, with one copy of a stage's weights, which have all local steps but those of the ``local``
    minibatches before it. A wave is ``local`` + 1 minibatches: its gradients leave as one sum, and no virtual worker is
    more than ``distance`` waves ahead of another. So a minibatch misses at most
    s_global = (D + 1)(s_local + 1) + s_local − 1 of another's. Each stage has a parameter server of its own, whose
    workers are that stage's ranks; that of one stage knows nothing of another's, so each stage is bounded by itself.

    After HetPipe (Park et al., USENIX ATC 2020). Nothing here places stages on unequal devices.

    Args:
        stage: this rank's part of the model: takes and gives one tensor, of any shape. The same at the same stage of
            all virtual workers. ``torch.distributed.pipelining``'s ``pipeline(…).get_stage_module(i)`` gives one.
        optimizer: of ``torch.optim``, over its parameters; not stepped by the caller.
        loss: (output, target) → loss, one value; the last stage must have it.
        stages: of a virtual worker; neighbouring ranks are its stages, in order.
        distance: D, waves that virtual workers may be apart; 0: every wave is the same for all.
        local: s_local; for a full pipeline at least ``stages`` − 1.
        servers: where each stage's parameter server is. ``HOST:PORT``: stage i's job is called ``NAME-stage-I``.
        process_group: of all ranks; by default all.
        name: of the jobs.
        timeout: seconds that anything waits.
        options: others of :class:`ParameterServer`.

    Raises:
        ValueError, TypeError: ranks that are no whole virtual workers, a last stage without a loss, a bad option.
        PlanMismatch: ranks were told different things, or have different models at one stage.
        PeerLost: a rank did not come in time; which.
    """

    def __init__(
        self,
        stage: nn.Module,
        optimizer: Optimizer,
        loss: Loss | None = None,
        *,
        stages: int,
        distance: int = 1,
        local: int = 3,
        servers: str = "embedded",
        process_group: Any = None,
        name: str = "hetpipe",
        timeout: float = 300.0,
        **options: Any,
    ) -> None:
        rule, group = WSP(distance, local), group_of(stage, process_group)
        self._world = World(group.rank(), group.size())
        self._place = at = place(self._world.rank, self._world.size, stages)
        if at.last and loss is None:
            raise ValueError(f"{at.name(at.stage)} is the last of its pipeline, and needs loss=")
        self._stage, self._optimizer, self._loss, self.rule = stage, optimizer, loss, rule
        terms = {"stages": str(stages), "rule": str(rule)}
        agree(group, f"{meeting_place(group, self._world)}/hetpipe", terms, self._world, timeout)
        device = next((p.device for p in stage.parameters()), torch.device("cpu"))
        # Every rank makes first its pipeline's group, then its stage's: each group's ranks come to it in one order.
        pipeline = sibling(group, device, at.pipeline) if stages > 1 else None
        peers = sibling(group, device, at.peers)
        ranks = torch.distributed.get_process_group_ranks(group)
        self._carrier = ActivationCarrier(pipeline, at, ranks, device, rule.depth + 2, timeout)
        self._server = ParameterServer(
            stage,
            optimizer,
            rule,
            servers,
            process_group=peers,
            name=f"{name}-stage-{at.stage}",
            timeout=timeout,
            **options,
        )
        self._depth = depth(at.stage, local)
        self._under_way: collections.deque[tuple[int, Tensor, Tensor]] = collections.deque()
        self._next, self._closed = 0, False
        # passes are recorded here: they are interleaved
        self._tracer = Tracer(None, self._world.rank, *self._server._tracer.sources)

    @property
    def stage(self) -> int:
        """Which this rank is."""
        return self._place.stage

    @property
    def worker(self) -> int:
        """The virtual worker that this rank is of."""
        return self._place.worker

    @property
    def waves(self) -> int:
        """That have gone forward; of the newest, minibatches may still be under way."""
        return self._next // self.rule.push_every

    def step(self, inputs: Sequence[Tensor] | None = None, targets: Sequence[Any] | None = None) -> list[Tensor]:
        """A wave goes forward, and what room that needs in the pipeline comes back: no minibatch of the last waits.

        Args:
            inputs: ``local`` + 1 minibatches, at the first stage; elsewhere they are not looked at.
            targets: as many, at the last stage.

        Returns:
            The loss of each minibatch at the last stage; nothing elsewhere.

        Raises:
            ValueError: another number of minibatches; this rank has done nothing then.
            PeerLost: a neighbour in the pipeline is gone, or values do not come; who. There is no going on.
            CommlibError: as :meth:`ParameterServer.step`.
        """
        self._check_open()
        given = self._given("inputs", inputs, self._place.first), self._given("targets", targets, self._place.last)
        first, losses = self._next, list[Tensor]()
        for kind, p in passes(first, self.rule.push_every, len(self._under_way), self._depth):
            with self._tracer.trace.measure(TRACK, f"{kind} {p}"):
                if kind == "backward":
                    self._backward()
                else:
                    losses += self._forward(p, *(g[p - first] for g in given))
        return losses

    def flush(self) -> None:
        """Empties the pipeline: every minibatch's backward pass is done, and every wave is on its way.

        All stages of a virtual worker do it after the same wave.

        Raises:
            PeerLost, CommlibError: as :meth:`step`.
        """
        self._check_open()
        while self._under_way:
            with self._tracer.trace.measure(TRACK, f"backward {self._under_way[0][0]}"):
                self._backward()
        self._carrier.drain()

    def trace(self, path: str | os.PathLike[str]) -> Recording:
        """Record what this rank does from now on, as :meth:`commlib.HookState.trace`.

        Raises:
            TraceFailed: the file cannot be written. Nothing is recorded then.
            ValueError: a recording runs already.
        """
        return self._tracer.start(path)

    def close(self) -> None:
        """:meth:`flush`, waits for the waves of all, takes the values with all of them in, and goes. Again: nothing.

        Raises:
            PeerLost, CommlibError: as :meth:`step`.
        """
        if self._closed:
            return
        try:
            self.flush()
        except BaseException as e:
            self._leave(e)
            raise
        self._leave(None)

    def __enter__(self) -> HetPipe:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            self._leave(error)

    # -- passes ---------------------------------------------------------------------------------

    def _forward(self, p: int, given: Tensor, target: Any) -> list[Tensor]:
        """The loss, at the last stage."""
        x = given if self._place.first else self._carrier.input(p)
        self._server.wait()  # values of a wave's end come before the copy of them is made
        self._tracer.trace.instant(TRACK, f"computes {p}")
        run = stashed if self._depth > 1 else nn.Module.__call__  # nothing changes between its two passes
        y = output_of(self._place.name(self.stage), run(self._stage, x))
        if self._loss is not None and self._place.last:
            y = output_of(f"the loss of {self._place.name(self.stage)}", self._loss(y, target))
        else:
            self._carrier.forward(y.detach(), p)
        self._under_way.append((p, x, y))
        self._next = p + 1
        return [y.detach()] if self._place.last else []

    def _backward(self) -> None:
        """Run the backward pass of the oldest minibatch under way, and this stage's local step."""
        p, x, y = self._under_way.popleft()
        gradient = None if self._place.last else self._carrier.gradient(y, p)
        torch.autograd.backward(y, gradient)
        if not self._place.first:
            self._carrier.backward(x.grad if x.grad is not None else torch.zeros_like(x), p)
        self._server.step()  # the last of a wave: its sum leaves, and values are asked for
        self._optimizer.zero_grad()

    def _given(self, what: str, values: Sequence[Any] | None, needed: bool) -> Sequence[Any]:
        """As many as a wave has; where nobody looks at them, as many of nothing."""
        count = self.rule.push_every
        if not needed:
            return [None] * count
        if values is None or len(values) != count:
            found = "none" if values is None else len(values)
            raise ValueError(f"{self._place.name(self.stage)} needs {what} of {count} minibatches a wave, got {found}")
        return values

    def _check_open(self) -> None:
        if self._closed:
            raise CommlibError("this pipeline has been closed: make a new HetPipe")

    def _leave(self, error: BaseException | None) -> None:
        self._closed = True
        self._under_way.clear()
        try:
            self._server.__exit__(type(error), error, None)
        finally:
            self._tracer.end()
