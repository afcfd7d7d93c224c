"""Elastic averaging without meetings: workers and a centre at servers pull at each other, each in its own time."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from commlib.errors import CommlibError
from commlib.local_sgd.outer_optimizers import Elastic
from commlib.runtime.amp import finite, mend
from commlib.runtime.layers import trained_parameters
from commlib.server.worker.arguments import check_model, world_of
from commlib.server.worker.parameter_server import ParameterServer

_log = logging.getLogger("commlib")


class Centre(nn.Module):
    """x̃ as this worker knows it: a copy of a model's trained parameters, in one module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for name, p in trained_parameters(model).items():
            self.register_parameter(name.replace(".", "/"), nn.Parameter(p.detach().clone()))


class ElasticAveraging:
    """Asynchronous EASGD (Zhang, Choromanska and LeCun, NIPS 2015, section 3), over the parameter server::

        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with commlib.ElasticAveraging(model, tau=10) as elastic:
            for x, y in batches:
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                optimizer.step()
                elastic.step()
        # the model is the centre now

    After every τ steps of its own a worker takes δ = α(x − x̃), goes back by it, and sends it; shards add δ to the
    centre x̃ as it comes, and nobody waits for another worker. With ``SGD(momentum=…, nesterov=True)`` it is EAMSGD.

    Of the paper it differs in this: the pull comes after a local step, at the values that it has reached; and x̃ is what
    it was when this worker's last δ had been added, for it travels while the worker goes on. What the paper conserves
    is conserved: the sum of all workers' values and the centre changes by local steps only.

    Buffers and optimizers stay each worker's own. Values that are not finite go back to the centre, and are in no δ.

    Args:
        model: not wrapped in DDP. It begins with the centre's values: the first worker's, as far as nobody has moved
            them by then.
        tau: τ, steps between two pulls.
        alpha: α, of a worker's distance to the centre that a pull takes away; by default 0.9/P.
        servers: as :class:`commlib.ParameterServer` takes it.
        optimizer: of this worker; what is not finite in its state is set to zero when its values are not.
        options: further ones of :class:`commlib.ParameterServer`: ``push="onebit"``, ``copies=2``, ``timeout=…``.

    Raises:
        ValueError, TypeError: a bad argument; α(P + 1) is 2 or more, which swings ever further.
        PlanMismatch, PeerLost, AuthenticationError: as :class:`commlib.ParameterServer`.
    """

    def __init__(
        self,
        model: nn.Module,
        tau: int = 10,
        alpha: float | None = None,
        servers: str = "embedded",
        *,
        optimizer: Optimizer | None = None,
        **options: Any,
    ) -> None:
        check_model(model)
        if tau < 1:
            raise ValueError(f"tau is 1 step or more, got {tau}")
        taken = sorted(options.keys() & {"consistency", "mean", "scaler", "cache"})
        if taken:
            raise TypeError(f"{', '.join(taken)}: elastic averaging decides that itself")
        ranks, _ = world_of(options.get("workers"), options.get("rank"))
        rule = Elastic(alpha)
        rule.check(ranks)
        self.tau, self.alpha, self._optimizer = tau, 0.9 / ranks if alpha is None else alpha, optimizer
        self._centre = Centre(model)
        own = list(trained_parameters(model).values())
        self._pairs = list(zip(own, self._centre.parameters(), strict=True))
        # a pushed gradient of −δ, and a rate of 1: the shards add δ
        adding = SGD(self._centre.parameters(), lr=1.0)
        self._server = ParameterServer(self._centre, adding, "asp", servers, mean=False, **options)
        self.steps = self.pulls = self.refused = 0
        self._open = True
        self.take_shared()

    def step(self) -> bool:
        """Count a local step; whether there was a pull.

        Raises:
            CommlibError: the job is over, or this worker was given up; why.
        """
        if not self._open:
            raise CommlibError("this has been closed: make a new ElasticAveraging")
        self.steps += 1
        if self.steps % self.tau:
            return False
        self.pull()
        return True

    def pull(self) -> None:
        """Towards the centre now, and the centre towards this worker.

        Raises:
            CommlibError: as :meth:`step`.
        """
        self._server.wait()
        moves = self._moves()
        for _, centre in self._pairs:
            centre.grad = None
        # leaves with a gradient given: as a backward pass would, it lets what is ready go
        torch.autograd.backward([centre for _, centre in self._pairs], [move.neg_() for move in moves])
        self._server.step()
        self.pulls += 1

    @torch.no_grad()
    def take_shared(self) -> None:
        """Gives this worker's model the centre, for good."""
        self._server.wait()
        for p, centre in self._pairs:
            p.copy_(centre)

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Inside, this worker's model is the centre, to evaluate it; afterwards it has its own values again."""
        own = [p.detach().clone() for p, _ in self._pairs]
        self.take_shared()
        try:
            yield
        finally:
            with torch.no_grad():
                for (p, _), kept in zip(self._pairs, own, strict=True):
                    p.copy_(kept)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this worker has sent."""
        return self._server.sent

    def close(self) -> None:
        """Waits for all workers' last pulls; the model is the centre then. Again: nothing.

        Raises:
            PeerLost: a worker does not come so far in time.
        """
        if not self._open:
            return
        self._open = False
        self._server.close()
        with torch.no_grad():
            for p, centre in self._pairs:
                p.copy_(centre)

    def __enter__(self) -> ElasticAveraging:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self._open = False
            self._server.__exit__(type(error), error, trace)

    @torch.no_grad()
    def _moves(self) -> list[Tensor]:
        """δ of each parameter, by which this worker has gone back."""
        moves = [(p.detach() - centre.detach()).mul_(self.alpha) for p, centre in self._pairs]
        if finite(*moves):
            for (p, _), move in zip(self._pairs, moves, strict=True):
                p.sub_(move)
            return moves
        self.refused += 1
        _log.warning("step %d: values are not finite: they go back to the centre", self.steps)
        for p, centre in self._pairs:
            p.copy_(centre)
        mend(self._optimizer)
        return [torch.zeros_like(move) for move in moves]
