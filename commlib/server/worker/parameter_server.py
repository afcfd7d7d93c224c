"""Training with a parameter server, in a loop that stays as it is but for one line."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from commlib.errors import CommlibError
from commlib.groups.world import World
from commlib.runtime.amp import Scaled
from commlib.runtime.exit import close_at_exit, failing
from commlib.runtime.optimizers import StepGuard, by_group, groups_of, plain
from commlib.server.job.chunks import NBYTES
from commlib.server.job.consistency import Consistency
from commlib.server.job.consistency import make as make_rule
from commlib.server.job.job import GO_ON, ServerJob
from commlib.server.worker.arguments import check_background, check_groups, check_model, count, saved, world_of
from commlib.server.worker.embedded import Embedded
from commlib.server.worker.param_sync import ParamSync
from commlib.server.worker.prefetch import PrefetchCache
from commlib.server.worker.session import WorkerSession, WorkerTerms
from commlib.server.worker.sync_policy import SyncPolicy
from commlib.telemetry.recorder import Recording, Tracer

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
        optimizer: of ``torch.optim`` or :mod:`commlib.runtime.proximal`, over ``model.parameters()``; not stepped from
            now on.
        consistency: how far workers may be apart: spec, or ``BSP``, ``SSP``, … ``Topology``, as an object.
        servers: ``embedded`` starts a shard on each machine, ``embedded:2`` two; or ``HOST:PORT`` (``commlib server``).
        mean: a step counts as the mean of the workers' gradients, as with DDP; else as their sum.
        copies: shards that keep each value: with 2, one may die.
        lost: ``go on`` without a worker that is lost, or ``fail``.
        workers: how many begin. Default: the process group's, or as torchrun says.
        rank: which of these this is; by default likewise.
        process_group: whose ranks the workers are. Default: all ranks.
        late: this worker comes to a job that has begun: it has no rank, and takes the values as they are.
        shards: how many begin, of servers that meet elsewhere.
        name: of the job where members meet.
        timeout: seconds that anything waits.
        patience: seconds of silence after which a member may be given up.
        snapshots: folder, the same for all machines, in which embedded shards save their state.
        snapshot_every: steps between two.
        restore: go on from what is there (:attr:`begun_at`).
        nbytes: of a chunk, at most. Default: 2 MiB; between machines with embedded shards what their link carries in
            25 ms, if that is less. (With snapshots always 2 MiB: they fit chunks of the same size only.)
        priority: what the next forward pass needs first is sent first.
        endpoint: how members are reached, of ``commlib.endpoints``.
        push: how gradients travel: a codec's spec string (``onebit``, ``topk:ratio=0.01``), with its error feedback at
            this worker; or filters' (``significance:threshold=0.001+fixed_float+lossless``).
        pull: how values travel: the same, of the difference to those that this worker has. Between two :meth:`sync` it
            has them but for what the codec leaves out.
        cache: values are asked for only when those that are here are too old for the rule; see :meth:`step`.
        background: gradients leave the device's memory, and values come into it, while it computes, in buffers that are
            planned after the first step (GeePS). For rules that push in every step, without a scaler.
        scaler: the ``torch.amp.GradScaler`` in use: gradients leave without its scale; see :meth:`step`.

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
        process_group: Any = None,
        late: bool = False,
        shards: int = 1,
        name: str = "default",
        timeout: float = 300.0,
        patience: float = 10.0,
        snapshots: str | None = None,
        snapshot_every: int = 1000,
        restore: bool = False,
        nbytes: int | None = None,
        priority: bool = False,
        endpoint: str = "zmq",
        push: str = "none",
        pull: str = "none",
        cache: bool = False,
        background: bool = False,
        scaler: Any = None,
    ) -> None:
        check_model(model)
        self._optimizer, self._scaled = optimizer, Scaled.of(scaler, optimizer)
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        found, chosen = by_group(optimizer, dict(model.named_parameters()))
        self._made_with, self._chosen = [dict(r.options) for r in found], chosen
        self._groups = groups_of(optimizer, self._parameters)
        kind, _, each = servers.partition(":")
        folder = saved(snapshots, snapshot_every, restore, kind)
        world, mine = world_of(workers, rank, process_group)
        rule = make_rule(consistency)
        check_groups(rule, late=late, snapshots=folder is not None)  # or raises, before anybody waits
        check_background(background, SyncPolicy(rule, cache=cache), scaler)
        self._background, self._closed = background, False
        self._embedded: Embedded | None = None
        if kind == "embedded":
            own, fit, n = World(mine, world), nbytes is None and folder is None, count(each or "1", servers)
            total = None if each else rule.shards
            self._embedded = Embedded(n, endpoint, timeout, folder, own, process_group, measures=fit, total=total)
        try:
            chunk = nbytes if nbytes is not None else self._embedded.nbytes if self._embedded else NBYTES
            shapes = {n: (tuple(p.shape), str(p.dtype).removeprefix("torch.")) for n, p in self._parameters.items()}
            shards = self._embedded.shards if self._embedded else rule.shards or shards
            also = (copies, mean, lost, patience, chunk, priority, push, pull)
            job = ServerJob(shapes, tuple(found), chosen, str(rule), world, shards, *also)
            where, known_as = (self._embedded.address, self._embedded.name) if self._embedded else (servers, name)
            check = self._embedded.check if self._embedded else None
            terms = WorkerTerms(where, known_as, None if late else mine, endpoint, timeout, check)
            self._begin(model, job, terms, functools.partial(SyncPolicy, rule, cache=cache))
        except BaseException:
            if self._embedded is not None:
                self._embedded.kill()
            raise

    def _begin(self, model: nn.Module, job: ServerJob, terms: WorkerTerms, rhythm: Callable[[int], SyncPolicy]) -> None:
        self._timeout, self._worker = terms.timeout, WorkerSession(job, terms)
        own, client, chunks = rhythm(self._worker.id), self._worker.client, job.chunks_of(self._worker.id)
        on = next(iter(self._parameters.values())).device
        self._cache = PrefetchCache(client, chunks, on) if self._background else None
        self._syncer = ParamSync(model, self._parameters, chunks, client, self._options, own, self._scaled, self._cache)
        self._tracer = Tracer(model, self._worker.id, self._syncer, self._worker.client.flights)
        self._guard = StepGuard(self._optimizer)
        close_at_exit(self, functools.partial(_go_at_exit, self._worker, self._embedded, self._timeout))
        try:
            if self._worker.first:
                flat = {n: p.detach().reshape(-1) for n, p in self._parameters.items()}
                for chunk in job.chunks.values():  # those of other groups, too
                    self._worker.client.begin(chunk.key, chunk.gather(flat).cpu().clone())
            self._syncer.ask()
            self._syncer.take()
            self._begun_at = self._worker.begun_at
        except BaseException:
            self._leave(in_order=False)
            raise

    def step(self) -> None:
        """Ends a step, in place of ``optimizer.step()``: what had no gradient has none in this step.

        With ``downpour:fetch=N``, ``wsp:local=N`` or a cache there are steps after which no values are fetched: then
        this worker's own optimizer goes on with its own gradients, until those of the shards replace the result.

        With a scaler it is in place of ``scaler.step(optimizer)``, and ``scaler.update()`` comes after it. A chunk
        whose gradient has overflowed adds nothing in this step. Where every step is pushed, gradients have left before
        this: clipping after ``scaler.unscale_(optimizer)`` comes too late for them.

        Raises:
            CommlibError: the job is over, or this worker was given up; why. Or ``scaler.update()`` is missing.
        """
        self._check_open()
        if self._syncer.end_step():
            self._guard.step()

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
        """Waits until all workers have come as far as this one, and takes the values with all of it in, bit for bit.

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
    def nbytes(self) -> int:
        """Bytes of a chunk, at most: as given, or as it fits the link."""
        return self._worker.job.nbytes

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

    def trace(self, path: str | os.PathLike[str]) -> Recording:
        """Record what this rank does from now on, as :meth:`commlib.HookState.trace`.

        Raises:
            TraceFailed: the file cannot be written. Nothing is recorded then.
            ValueError: a recording runs already.
        """
        return self._tracer.start(path)

    def close(self) -> None:
        """:meth:`sync`, and goes, even if that raises: nobody waits for this worker from now on. Again: nothing."""
        if self._closed:
            return
        try:
            self._syncer.flush()
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
        if self._cache is not None:
            if not in_order:
                client.fail(CommlibError("this worker has left after an error"))  # its threads wait for nothing more
            self._cache.close()
        try:
            _go(self._worker, self._embedded, self._timeout, wait=in_order)
        finally:
            self._tracer.end()

    def _check_open(self) -> None:
        if self._closed:
            raise CommlibError("this worker has left the parameter server: make a new ParameterServer")

    def _options(self, name: str) -> Mapping[str, Any]:
        """Options of the optimizer, where they are others than it was made with."""
        made, group = self._made_with[self._chosen[name]], self._groups[name]
        return {k: plain(group[k]) for k, v in made.items() if plain(group[k]) != v}


def _go(worker: WorkerSession, embedded: Embedded | None, timeout: float, *, wait: bool) -> None:
    """Leaves the job, and ends what of its servers is here; a second call does nothing.

    Args:
        worker, embedded: of one ParameterServer.
        timeout: seconds to wait for the other workers.
        wait: in order; not after an error, which nothing may hold up.
    """
    if worker.closed:
        return
    try:
        worker.close(flush=wait)
    finally:
        if embedded is not None and embedded.keeps and not wait:
            embedded.kill()  # nothing of the job is left without it
        elif embedded is not None:
            if embedded.keeps and not worker.await_end(timeout):
                _log.warning("not all workers have gone for %g s; the meeting place closes", timeout)
            embedded.close()


def _go_at_exit(worker: WorkerSession, embedded: Embedded | None, timeout: float, *, wait: bool) -> None:
    """Leaves as :func:`_go`, but not in order where the process ends by an error."""
    _go(worker, embedded, timeout, wait=wait and not failing())
