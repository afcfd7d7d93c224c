"""A model's gradients on their way as soon as they are there, and its values back before they are needed.

Wait-free backpropagation (Poseidon, USENIX ATC 2017, section 3.1), with SINGA's wait: a module waits for its own
parameters only, right before it computes.

Ordering: all is done in the thread that trains (and autograd's own, while that one waits for it): hooks after a
gradient is there, hooks before a module computes. A chunk is pushed once a step, when the last of its gradients is
there, or at the end of the step; what is pushed is asked for at once. Values are put into parameters only before a
module computes, when no gradient of theirs is under way. No gradient leaves that was computed with older values.

Between two fetches a worker goes on by itself, and between two pushes gradients add up
(:mod:`commlib.server.worker.sync_policy`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from commlib.errors import CommlibError
from commlib.runtime.amp import Scaled, finite
from commlib.server.job.chunks import Chunk
from commlib.server.job.consistency import BSP
from commlib.server.worker.prefetch import PrefetchCache
from commlib.server.worker.sync_policy import SyncPolicy
from commlib.telemetry.recorder import TRACK
from commlib.telemetry.trace import NONE, Trace

_log = logging.getLogger("commlib")


class PushPullClient(Protocol):
    """Client that pushes and pulls (:class:`~commlib.server.worker.client.ClientNode`)."""

    def push(
        self,
        key: str,
        gradient: Tensor | None,
        options: Mapping[str, Any] | None = ...,
        absent: frozenset[int] = ...,
        *,
        pull: bool = ...,
    ) -> None: ...

    def pull(self, key: str, within: int | None = None, *, exact: bool = False) -> None: ...

    def values(self, key: str) -> tuple[Tensor, Mapping[int, int]]: ...

    def clock(self, key: str) -> int: ...


class ParamSync:
    """Synchronization of one model's parameters with the servers, until :meth:`remove`.

    Args:
        model: whose parameters are synced; they all need a gradient.
        parameters: name → parameter, those that are.
        chunks: of the parameters.
        client: of this worker.
        options: name → options of its optimizer that are others than it was made with.
        rhythm: when it pushes and fetches. Default: in every step.
        scaled: what the loss is scaled by. Default: it is not.
        cache: moves gradients and values in the background, where every step pushes. Default: nothing does.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        chunks: Sequence[Chunk],
        client: PushPullClient,
        options: Callable[[str], Mapping[str, Any]],
        rhythm: SyncPolicy | None = None,
        scaled: Scaled | None = None,
        cache: PrefetchCache | None = None,
    ) -> None:
        self._rhythm, self._scaled, self._cache = rhythm or SyncPolicy(BSP()), scaled, cache
        self._sums: dict[str, Tensor] = {}  # of gradients since the last push
        self._had: set[str] = set()  # parameters that are in them
        self._parameters, self._client, self._options = parameters, client, options
        self._chunks = {c.key: c for c in chunks}
        self._of = {name: [c for c in chunks if name in c.names] for name in parameters}
        self._names = {id(p): name for name, p in parameters.items()}
        self._flat: dict[str, Tensor] = {}  # of parameters that do not lie in one row
        self._asked: set[str] = set()  # chunks whose values have not been put where they belong
        self._there: set[str] = set()  # parameters whose gradient is there
        self._pushed: set[str] = set()  # chunks of this step
        self._met: set[str] = set()  # parameters for which a module has ever waited; for others the whole model does
        self.syncing = True
        """False: gradients are accumulated, and stay here."""
        self.trace: Trace = NONE
        """Where it is recorded what the thread that trains does for this."""
        hooked: Sequence[Any] = list(parameters.values())
        self._handles: list[Any] = [p.register_post_accumulate_grad_hook(self._ready) for p in hooked]
        for module in model.modules():
            own = [self._names[id(p)] for p in module._parameters.values() if id(p) in self._names]
            if own or module is model:
                self._handles.append(module.register_forward_pre_hook(self._before(own, root=module is model)))

    def ask(self, within: int | None = None) -> None:
        """Asks for all values, as the shards have them."""
        if self._cache is not None:
            self._cache.settle()
        for key in self._chunks:
            self._client.pull(key, within, exact=True)
            self._expect(key)

    def take(self) -> None:
        """Waits for all values that were asked for, and puts them where they belong."""
        self._take(self._parameters)

    def end_step(self) -> bool:
        """Push the parameters of this step that have not been: those without a gradient add nothing.

        Returns:
            Whether this worker takes a step by itself, too: its gradients are finite, and there is a need.
        """
        if self._scaled:
            self._scaled.settle()
        fit = not self._rhythm.alone or self._fit()
        if self._rhythm.accrues and fit:
            self._accrue()
        for chunk in self._chunks.values():
            if self._rhythm.pushes and chunk.key not in self._pushed:
                self._push(chunk)
            elif not self._rhythm.pushes:
                self._fetch(chunk.key)
        if self._rhythm.pushes:
            self._had.clear()
        self._pushed.clear()
        self._there.clear()
        self._rhythm.end_step()
        if self._cache is not None:
            self._cache.end_step()
        if self._scaled:
            self._scaled.end_step()
        self.trace.instant(TRACK, "step")
        return fit and self._rhythm.alone

    def flush(self) -> None:
        """Pushes what has added up since the last push."""
        for key in list(self._sums):
            self._push(self._chunks[key])

    def remove(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # -- hooks ----------------------------------------------------------------------------------

    def _before(self, names: Sequence[str], *, root: bool) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            self._met.update(names)
            self._take([n for n in self._parameters if n in names or n not in self._met] if root else names)

        return hook

    def _ready(self, parameter: nn.Parameter) -> None:
        if not self.syncing:
            return
        name = self._names[id(parameter)]
        if name in self._there:
            raise CommlibError(
                f"{name} has a second gradient in one step: after each backward pass comes step(); what several passes "
                "add up is of no_sync(), all but the last, and checkpoint() needs use_reentrant=False"
            )
        if any(chunk.key in self._asked for chunk in self._of[name]):
            raise CommlibError(
                f"{name} was used without its module's forward(), with the values of a step before: call wait() before "
                "the forward pass"
            )
        self._there.add(name)
        for chunk in self._of[name] if not self._rhythm.accrues else ():
            if all(n in self._there for n in chunk.names):
                self._push(chunk)

    def _fit(self) -> bool:
        """Whether all gradients are finite; else the step is left out, for they would stay in sums and momenta."""
        bad = [n for n in self._parameters if n in self._there and not finite(self._row(n))]
        if bad:
            level = logging.DEBUG if self._scaled else logging.WARNING  # scalers try how far they can go
            _log.log(level, "the gradient of %s is not finite: this worker leaves its step out", bad[0])
        return not bad

    @torch.no_grad()
    def _accrue(self) -> None:
        for key, chunk in self._chunks.items():
            row = self._gradient(chunk)
            if row is not None:
                self._had |= self._there.intersection(chunk.names)
                self._sums[key] = self._sums[key].add_(row) if key in self._sums else row

    # -- chunks ---------------------------------------------------------------------------------

    @torch.no_grad()
    def _push(self, chunk: Chunk) -> None:
        ready = self.trace.now()
        self._pushed.add(chunk.key)
        had = self._had if self._rhythm.accrues else self._there
        there = [name in had for name in chunk.names]
        if self._cache is not None:
            self._cache.settle(chunk.key)  # its push of the step before: the clock tells
        fetches = self._rhythm.fetches(chunk.key, self._client.clock(chunk.key) + 1)
        options = self._options(chunk.pieces[0].name)

        def send(gradient: Tensor | None) -> None:
            absent = frozenset(i for i, so in enumerate(there) if not so and gradient is not None)
            self._client.push(chunk.key, gradient, options, absent, pull=fetches)

        if self._cache is not None and any(there):
            parts = [self._row(p.name)[p.begin : p.end] for p in chunk.pieces]
            self._cache.push(chunk.key, parts, send)
        else:
            send(self._sums.pop(chunk.key, None) if self._rhythm.accrues else self._gradient(chunk))
        if fetches:
            self._expect(chunk.key)
        self.trace.span(TRACK, f"push {chunk.key}", ready, self.trace.now())

    def _fetch(self, key: str) -> None:
        if self._rhythm.fetches(key, self._client.clock(key)):
            self._client.pull(key)
            self._expect(key)

    def _expect(self, key: str) -> None:
        """Note that a key's values have been asked for."""
        self._asked.add(key)
        if self._cache is not None:
            self._cache.asked(key)

    def _gradient(self, chunk: Chunk) -> Tensor | None:
        """Copy of a chunk's gradient, kept until it is acknowledged; None: there is none, or it has overflowed."""
        if not any(name in self._there for name in chunk.names):
            return None
        row = chunk.gather({name: self._row(name) for name in chunk.names})
        row = row.cpu() if row.device.type != "cpu" else row.clone() if len(chunk.pieces) == 1 else row
        return self._scaled.unscale(row) if self._scaled else row

    def _row(self, name: str) -> Tensor:
        p = self._parameters[name]
        if name not in self._there or p.grad is None:
            return torch.zeros_like(p).reshape(-1)
        grad = p.grad.to_dense() if p.grad.is_sparse else p.grad
        return grad.detach().reshape(-1)

    @torch.no_grad()
    def _take(self, names: Any) -> None:
        wanted = {c.key: c for name in names for c in self._of[name] if c.key in self._asked}
        for key, chunk in wanted.items():
            with self.trace.measure(TRACK, f"wait for {key}"):
                values, included = (self._cache or self._client).values(key)
            if self.trace.enabled:  # worker → pushes of its that are in them
                self.trace.instant(TRACK, f"values of {key}", **{f"worker {w}": n for w, n in included.items()})
            self._rhythm.took(key, included)
            chunk.scatter(values, {name: self._place(name) for name in chunk.names})
            self._asked.discard(key)
        for name in {n for c in wanted.values() for n in c.names} & self._flat.keys():
            p = self._parameters[name]
            p.copy_(self._flat[name].view(p.shape))

    def _place(self, name: str) -> Tensor:
        """Where a parameter's values go, in one row."""
        p = self._parameters[name].detach()
        if p.is_contiguous():
            return p.view(-1)
        if name not in self._flat:  # channels_last, say
            self._flat[name] = p.reshape(-1).clone()
        return self._flat[name]
