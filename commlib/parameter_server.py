"""Training with a parameter server, in a loop that stays as it is but for one line."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from commlib.consistency import Consistency
from commlib.consistency import make as make_rule
from commlib.errors import CommlibError
from commlib.server.chunks import NBYTES
from commlib.server.embedded import Embedded
from commlib.server.job import GO_ON, Job
from commlib.server.recipe import by_group, groups_of, plain
from commlib.server.saver import Snapshots
from commlib.server.syncer import Syncer
from commlib.server.worker import Terms, Worker

_log = logging.getLogger("commlib")


class ParameterServer:
    """Shards keep the parameters and update them; this worker pushes gradients and pulls values, as it goes::

        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        with commlib.ParameterServer(model, optimizer, consistency="ssp:3") as server:
            for x, y in batches:
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()   # each gradient leaves as soon as it is there
                server.step()                     # instead of optimizer.step()

    The model's parameters become those of the first worker. Each shard updates what it keeps with an optimizer like
    this one, whose options (a scheduler's ``lr``) go along with the gradients; its state lives at the shards. When
    the block ends, every worker has the values of all steps. Buffers (batch norm's) stay each worker's own.

    After Poseidon (USENIX ATC 2017), the parameter server of Li et al. (OSDI 2014) and SSP (Ho et al., NIPS 2013).

    Args:
        model: not wrapped in DDP; all its gradients go to the servers.
        optimizer: of ``torch.optim``, over ``model.parameters()``; not stepped from now on.
        consistency: how far workers may run apart: a spec, or one of ``BSP``, ``ASP``, ``SSP``, ``DTSSP``, ``WSP``,
            ``Downpour``.
        servers: ``embedded`` starts a shard on each machine, ``embedded:2`` two; or ``HOST:PORT`` where members meet
            (``commlib server``).
        mean: a step counts as the mean of the workers' gradients, as with DDP; else as their sum.
        copies: shards that keep each value: with 2, one may die.
        lost: ``go on`` without a worker that is lost, or ``fail``.
        workers: how many begin. Default: the process group's, or ``$WORLD_SIZE``, or 1.
        rank: which of these this is. Default: the process group's, or ``$RANK``, or 0.
        late: this worker comes to a job that has begun: it has no rank, and takes the values as they are.
        shards: how many begin, of servers that meet elsewhere.
        name: of the job where members meet.
        timeout: seconds that anything waits.
        patience: seconds of silence after which a member may be given up.
        snapshots: folder, the same for all machines, in which embedded shards save their state.
        snapshot_every: steps between two.
        restore: go on from what is there (:attr:`begun_at`).
        nbytes: of a chunk, at most.
        priority: what the next forward pass needs first is sent first.
        endpoint: how members are reached, an entry point of ``commlib.endpoints``.

    Raises:
        ValueError, TypeError: a bad argument; an optimizer that lacks a parameter, or is not of ``torch.optim``.
        PlanMismatch: the workers' models, optimizers or rules differ; what differs.
        PeerLost: not all come in time; who.
        AuthenticationError: beyond this machine, and there are no keys.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        consistency: str | Consistency = "ssp:3",
        servers: str = "embedded",
        *,
        mean: bool = True,
        copies: int = 1,
        lost: str = GO_ON,
        workers: int | None = None,
        rank: int | None = None,
        late: bool = False,
        shards: int = 1,
        name: str = "default",
        timeout: float = 300.0,
        patience: float = 10.0,
        snapshots: str | None = None,
        snapshot_every: int = 1000,
        restore: bool = False,
        nbytes: int = NBYTES,
        priority: bool = False,
        endpoint: str = "zmq",
    ) -> None:
        _check(model)
        self._optimizer = optimizer
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        found, chosen = by_group(optimizer, dict(model.named_parameters()))
        self._made_with, self._chosen = [dict(r.options) for r in found], chosen
        self._groups = groups_of(optimizer, self._parameters)
        kind, _, each = servers.partition(":")
        saved = _saved(snapshots, snapshot_every, restore, kind)
        self._embedded = (
            Embedded(_count(each or "1", servers), endpoint, timeout, saved) if kind == "embedded" else None
        )
        world, mine = _world(workers, rank)
        self._closed = False
        try:
            job = Job(
                {n: (tuple(p.shape), str(p.dtype).removeprefix("torch.")) for n, p in self._parameters.items()},
                tuple(found),
                chosen,
                str(make_rule(consistency)),
                world,
                self._embedded.shards if self._embedded else shards,
                copies,
                mean,
                lost,
                patience,
                nbytes,
                priority,
            )
            where, known_as = (self._embedded.address, self._embedded.name) if self._embedded else (servers, name)
            check = self._embedded.check if self._embedded else None
            terms = Terms(where, known_as, None if late else mine, endpoint, timeout, check)
            self._begin(model, job, terms)
        except BaseException:
            if self._embedded is not None:
                self._embedded.kill()
            raise

    def _begin(self, model: nn.Module, job: Job, terms: Terms) -> None:
        chunks, self._timeout, self._worker = list(job.chunks.values()), terms.timeout, Worker(job, terms)
        self._syncer = Syncer(model, self._parameters, chunks, self._worker.client, self._options)
        self._guard = self._optimizer.register_step_pre_hook(_not_here)
        try:
            if self._worker.first:
                flat = {n: p.detach().reshape(-1) for n, p in self._parameters.items()}
                for chunk in chunks:
                    self._worker.client.begin(chunk.key, chunk.gather(flat).cpu().clone())
            self._syncer.ask()
            self._syncer.take()
            self._begun_at = self._worker.begun_at
        except BaseException:
            self._leave(in_order=False)
            raise

    def step(self) -> None:
        """Ends a step, in place of ``optimizer.step()``: what had no gradient has none in this step.

        Raises:
            CommlibError: the job is over, or this worker was given up; why.
        """
        self._check_open()
        self._syncer.end_step()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients are accumulated, and pushed with the next that come outside: as DDP's."""
        before, self._syncer.syncing = self._syncer.syncing, False
        try:
            yield
        finally:
            self._syncer.syncing = before

    def wait(self) -> None:
        """Takes all values that were asked for, before they are needed: for code that looks at parameters itself."""
        self._check_open()
        self._syncer.take()

    def sync(self) -> None:
        """Waits until all workers have come as far as this one, and takes the values with all of it in.

        Raises:
            PeerLost: one does not come so far in time; which.
            CommlibError: as :meth:`step`.
        """
        self._check_open()
        self._syncer.ask(within=0)
        self._syncer.take()

    def observe(self, metric: float) -> None:
        """Tells the servers what an evaluation gave: accuracy, or loss, as :class:`DTSSP` wants it; one worker does.

        Raises:
            CommlibError: as :meth:`step`.
        """
        self._check_open()
        self._worker.client.observe(metric)

    @property
    def begun_at(self) -> int:
        """Steps that were done before, of a job that goes on from snapshots; else 0."""
        return self._begun_at

    @property
    def sent(self) -> int:
        """Bytes of this worker's messages so far."""
        return self._traffic[0] if self._closed else self._worker.client.sent

    @property
    def received(self) -> int:
        """Bytes of the servers' messages to this worker so far."""
        return self._traffic[1] if self._closed else self._worker.client.received

    @property
    def refused(self) -> int:
        """Pushes of this worker that were not finite, and are in no value; one for each chunk."""
        return self._worker.client.refused

    def close(self) -> None:
        """:meth:`sync`, and goes, even if that raises: nobody waits for this worker from now on. Again: nothing."""
        if self._closed:
            return
        try:
            self.sync()
        finally:
            self._leave()

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            self._leave(in_order=False)

    def _leave(self, *, in_order: bool = True) -> None:
        """``in_order``: not after an error, which nothing may hold up; others learn of it soon enough."""
        client = self._worker.client
        self._closed, self._traffic = True, (client.sent, client.received)
        self._syncer.remove()
        self._guard.remove()
        try:
            self._worker.close(flush=in_order)
        finally:
            self._end_servers(in_order)

    def _end_servers(self, in_order: bool) -> None:
        if self._embedded is None:
            return
        if self._embedded.keeps and not in_order:
            self._embedded.kill()  # nothing of the job is left without it
            return
        if self._embedded.keeps and not self._worker.await_end(self._timeout):
            _log.warning("not all workers have gone for %g s; the meeting place closes", self._timeout)
        self._embedded.close()

    def _check_open(self) -> None:
        if self._closed:
            raise CommlibError("this worker has left the parameter server: make a new ParameterServer")

    def _options(self, name: str) -> Mapping[str, Any]:
        """Of the optimizer, where they are others than it was made with."""
        made, group = self._made_with[self._chosen[name]], self._groups[name]
        return {k: plain(group[k]) for k, v in made.items() if plain(group[k]) != v}


def _check(model: nn.Module) -> None:
    if isinstance(model, DistributedDataParallel):
        raise TypeError("the model is wrapped in DDP, which would average gradients too: give the module that it wraps")


def _count(given: str, servers: str) -> int:
    if not given.isdigit() or int(given) < 1:
        raise ValueError(f"servers is 'embedded', 'embedded:N' or 'HOST:PORT', got {servers!r}")
    return int(given)


def _saved(folder: str | None, every: int, restore: bool, kind: str) -> Snapshots | None:
    if restore and folder is None:
        raise ValueError("restore=True needs snapshots: the folder that they are in")
    if folder is not None and kind != "embedded":
        raise ValueError("snapshots are the shards' to save, and these are elsewhere: commlib server run --snapshots")
    return Snapshots(folder, every, restore) if folder is not None else None


def _world(workers: int | None, rank: int | None) -> tuple[int, int]:
    grouped = dist.is_available() and dist.is_initialized()
    size = workers or (dist.get_world_size() if grouped else int(os.environ.get("WORLD_SIZE", "1")))
    mine = rank if rank is not None else dist.get_rank() if grouped else int(os.environ.get("RANK", "0"))
    if not 0 <= mine < size:
        raise ValueError(f"this is worker {mine} of {size}: ranks are 0 to {size - 1}")
    return size, mine


def _not_here(optimizer: Optimizer, *_: Any) -> None:
    raise CommlibError("the parameter server's shards update the parameters: call server.step(), not optimizer.step()")
