"""An optimizer's step that is shared out, in a loop that stays as it is but for one line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from commlib.checkpoint.state_dict import StateDict, from_state, to_state
from commlib.codecs.registry import warm
from commlib.errors import CommlibError, check_numbers
from commlib.groups.handshake import agree, meeting_place, publish_failure, share
from commlib.groups.process_groups import begin_alike, group_of
from commlib.groups.world import World
from commlib.planning.plan import Plan
from commlib.planning.route import Rules
from commlib.runtime.amp import Scale
from commlib.runtime.layers import (
    all_parameters,
    layer_specs,
    one_device,
    refuse_complex,
    refuse_sparse,
    trained_parameters,
)
from commlib.runtime.optimizers import StepGuard, by_group
from commlib.telemetry.stats import Stats
from commlib.zero import bucket_order, checkpoint
from commlib.zero.bucket_order import BucketOrder, StepVerdict, hook_of
from commlib.zero.communicator import ZeroCommunicator
from commlib.zero.partition import NBYTES, OwnedSlices, buckets_of, check_optimizer, flat, plan_of


class ShardedStep:
    """Every rank updates the part of the parameters that it owns, with the mean gradient of all::

        optimizer = torch.optim.AdamW(model.parameters())
        sharded = commlib.ShardedStep(model, optimizer)
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()   # each bucket's gradients leave as soon as they are there
            sharded.step()                    # instead of optimizer.step()

    Gradients go to their owners (reduce-scatter), an optimizer like the user's updates what this rank owns, and the
    values come back (all-gather): the bytes of an all-reduce, and 1/P of the optimizer's state and of its work. All
    ranks begin with the first one's parameters and buffers, and after every step have the same parameters, bit for bit.
    A step whose mean gradient is not finite changes nothing anywhere (:attr:`refused`).

    CaffeOnSpark's split, in the terms of today ZeRO's first stage (Rajbhandari et al., SC 2020). Making one is
    collective, and so are :meth:`step`, :meth:`clip_grad_norm_` and :meth:`state_dict`.

    Args:
        model: not wrapped in DDP. Buffers (batch norm's) stay each rank's own.
        optimizer: of ``torch.optim``, one that treats every value by itself; its groups' options hold at every step, so
            schedulers work on it. It is not stepped itself; state that it has is taken over and shared out.
        compressor: how gradients travel to owners: a spec string, a Compressor, or rules by layer, with error feedback
            as elsewhere. Values come back as they are.
        process_group: of the ranks; by default all.
        scaler: the ``torch.amp.GradScaler`` in use; after :meth:`step` comes ``scaler.update()``.
        min_size: layers with fewer values are not compressed; None: as in :class:`commlib.HookState`.
        seed: of random codecs.
        timeout: seconds to wait for the other ranks here.
        nbytes: of gradients that leave together, about.

    Raises:
        ValueError, TypeError: a bad option, rule, model or optimizer.
        PlanMismatch: another rank has another model, optimizer or rule; every rank raises it.
        PeerLost: a rank did not come in time.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        compressor: Rules = "none",
        *,
        process_group: Any = None,
        scaler: Any = None,
        min_size: int | None = None,
        seed: int = 0,
        timeout: float = 300.0,
        nbytes: int = NBYTES,
    ) -> None:
        group = group_of(model, process_group)
        world = self.world = World(dist.get_rank(group), dist.get_world_size(group))
        key = meeting_place(group, world)
        try:
            if isinstance(model, DistributedDataParallel):
                raise TypeError("the model is wrapped in DDP, which exchanges gradients: give the module that it wraps")
            check_numbers(timeout, min_size=0 if min_size is None else min_size, seed=seed, nbytes=nbytes)
            self._parameters = trained_parameters(model)
            by_group(optimizer, all_parameters(model))  # or raises: a parameter is missing, or a stranger
            check_optimizer(optimizer, self._parameters)
            refuse_sparse(model, "ShardedStep")
            refuse_complex(model, "ShardedStep")
            specs = layer_specs(model)
            self._plan = plan_of(specs, compressor, world=world.size, min_size=min_size)
            self._scale = Scale(scaler, optimizer, model)
            warm([layer.route.codec for layer in self._plan], one_device(specs))
        except Exception as e:
            publish_failure(group, key, world, e)
            raise
        terms = {
            "optimizer": type(optimizer).__name__,
            "groups": str([len(g["params"]) for g in optimizer.param_groups]),
        }
        terms |= {"seed": str(seed), "nbytes": str(nbytes), "scaler": str(scaler is not None)}
        agree(group, key, {**terms, **self._plan.describe()}, world, timeout)
        begin_alike(model, group)
        buckets = buckets_of(self._plan, nbytes)
        self._names = [cut.spec.name for cuts in buckets for cut in cuts]
        self._optimizer, self._group, self._key, self._timeout = optimizer, group, key, timeout
        self._parts = [OwnedSlices(optimizer, self._parameters, cuts, world) for cuts in buckets]
        self._take_over({id(p): n for n, p in self._parameters.items()})
        self._traffic = ZeroCommunicator(group, key, world, buckets, seed, one_device(specs))
        self._arrivals = BucketOrder([[cut.spec.name for cut in cuts] for cuts in buckets])
        self._guard = StepGuard(optimizer, "ranks update their parts of the parameters: call step() of the ShardedStep")
        self._verdict: StepVerdict | None = None
        self._used: dict[tuple[bool, ...], torch.Tensor] = {}
        self._closed, self._syncing, self._saved = False, True, 0
        self.steps = self.refused = 0
        hooked: Mapping[str, Any] = self._parameters
        self._handles = [p.register_post_accumulate_grad_hook(hook_of(self, n)) for n, p in hooked.items()]

    # -- a step ---------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> bool:
        """Ends a step, in place of ``optimizer.step()``; whether it counted. Parameters are new when it returns.

        A parameter of which no rank had a gradient stays as it is, as with ``optimizer.step()``; if some had one, it is
        zero on the others.

        Raises:
            PeerLost: a rank did not come.
        """
        found = self._settle()
        self._scale.tell(found.finite, self._traffic.device)
        self._verdict = None
        self._arrivals.reset()
        if found.finite:
            self._traffic.store.commit()
            used = dict(zip(self._names, found.used, strict=True))
            for i, parts in enumerate(self._parts):  # one bucket's values travel while the next one's are made
                parts.step(used)
                self._traffic.values(i, [flat(part.whole) for part in parts.by_name.values()], "values")
            self._traffic.settle()
        else:
            self._traffic.store.discard()
        self.steps += found.finite
        self.refused += not found.finite
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # or a scheduler warns that it was never stepped
        return found.finite

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scales the mean gradients of this step down to a norm, as ``torch.nn.utils.clip_grad_norm_``: before step().

        That of PyTorch sees one rank's gradients, which have left by then.

        Returns:
            The norm of all of them as it was.

        Raises:
            ValueError: the norm is no number above 0.
            PeerLost: a rank did not come.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm must be a number > 0, got {max_norm!r}")
        norm = self._settle().norm
        if (by := max_norm / (norm + 1e-6)) < 1:
            for parts in self._parts:
                for part in parts.by_name.values():
                    part.mean.mul_(by)
        return norm

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients are accumulated, and leave with the next that come outside: as DDP's."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    @property
    def plan(self) -> Plan:
        """Layer by layer, how gradients travel to their owners."""
        return self._plan

    @property
    def stats(self) -> Stats:
        """Bytes and seconds."""
        routes = {p.spec.name: (str(p.route.codec), p.spec.numel) for p in self._plan}
        traffic = self._traffic
        return Stats.of(self.steps, self.refused, traffic.sent, routes, traffic.meters, memory=traffic.memory)

    # -- checkpoints ----------------------------------------------------------------------------

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The whole optimizer's state, on every rank: what ``optimizer.state_dict()`` would be. Collective.

        It loads into such an optimizer anywhere, and into a ShardedStep of any number of ranks.

        Raises:
            PeerLost: a rank did not come.
        """
        self._check_open()
        self._saved += 1
        own = {n: checkpoint.described(parts.state(n)) for parts in self._parts for n in parts.by_name}
        said = share(self._group, f"{self._key}/saved/{self._saved}", own, self.world, self._timeout)
        states = checkpoint.collected(self._parts, said, self._traffic.values, self._traffic.settle)
        return checkpoint.whole(self._optimizer, {id(p): n for n, p in self._parameters.items()}, states)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over an optimizer's whole state: every rank its part. The model's is the model's own affair.

        Raises:
            CheckpointMismatch: of another model or optimizer.
        """
        self._check_open()
        names = {id(p): n for n, p in self._parameters.items()}
        self._restore(checkpoint.by_name(self._optimizer, names, state))

    def residuals(self) -> StateDict:
        """Residuals of this rank's codecs, and the count of steps: without a codec there is no need of them.

        Every rank has its own; :func:`commlib.merge_state_dicts` makes one of all."""
        return to_state(self._plan, self._traffic.store, self.world, self.steps)

    def load_residuals(self, state: StateDict) -> None:
        """Takes over :meth:`residuals`: this rank's own, or merged ones of any number of ranks.

        Raises:
            CheckpointMismatch: of another model, or ranks are missing.
        """
        self.steps = from_state(state, self._plan, self._traffic.store, self.world, drop_residuals=False)
        self._traffic.peers.why = "has loaded residuals"

    def close(self) -> None:
        """Gives the optimizer back, without state (which is in :meth:`state_dict`), and ends. Again: nothing."""
        if not self._closed:
            self._closed = True
            self._guard.remove()
            for handle in self._handles:
                handle.remove()
            self._traffic.close()

    # -- inside ---------------------------------------------------------------------------------

    def arrived(self, name: str) -> None:
        """A gradient is there. (Called by a hook on the parameter.)"""
        if self._syncing:
            for bucket in self._arrivals.came(name):
                self._send(bucket)

    @torch.no_grad()
    def _send(self, bucket: int) -> None:
        if bucket == 0:
            self._traffic.store.rescale(self._scale.now())
        means = [part.mean for part in self._parts[bucket].by_name.values()]
        self._traffic.gradients(bucket, self._parameters, means, self.steps)

    def _settle(self) -> StepVerdict:
        """All gradients of the step are with their owners, without a loss scale, and all know what came of it."""
        self._check_open()
        if self._verdict is None:
            for bucket in self._arrivals.rest():
                self._send(bucket)
            self._traffic.settle()
            means = [part.mean for parts in self._parts for part in parts.by_name.values()]
            if (scale := self._scale.now()) != 1.0:
                torch._foreach_mul_(means, 1 / scale)
            used = tuple(self._parameters[name].grad is not None for name in self._names)
            if used not in self._used:  # most steps are like the one before: nothing is copied to the device then
                self._used = {used: torch.tensor(used, dtype=torch.uint8, device=self._traffic.device)}
            mine = bucket_order.said(means, self._used[used])
            self._verdict = bucket_order.heard(self._traffic.from_all(mine, f"the verdict on step {self.steps}"))
        return self._verdict

    def _take_over(self, names: Mapping[int, str]) -> None:
        """State that the user's optimizer has; it keeps none."""
        self._restore({names[id(p)]: dict(s) for p, s in self._optimizer.state.items() if id(p) in names})
        self._optimizer.state.clear()

    def _restore(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        for parts in self._parts:
            for name in parts.by_name:
                parts.restore(name, states.get(name, {}))

    def _check_open(self) -> None:
        if self._closed:
            raise CommlibError("this has been closed: make a new ShardedStep")
