"""A model's gradients on their way as soon as they are there, and its values back before they are needed.

Wait-free backpropagation (Poseidon, USENIX ATC 2017, section 3.1), with SINGA's wait: a module waits for its own
parameters only, right before it computes.

Ordering: all is done in the thread that trains (and autograd's own, while that one waits for it): hooks after a
gradient is there, hooks before a module computes. A chunk is pushed once a step, when the last of its gradients is
there, or at the end of the step; what is pushed is asked for at once. Values are put into parameters only before a
module computes, when no gradient of theirs is under way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from commlib.errors import CommlibError
from commlib.server.chunks import Chunk

_log = logging.getLogger("commlib")


class Client(Protocol):
    """What pushes and pulls (:class:`~commlib.server.client_node.ClientNode`)."""

    def push(
        self, key: str, gradient: Tensor | None, options: Mapping[str, Any] | None = ..., absent: frozenset[int] = ...
    ) -> None: ...

    def pull(self, key: str, within: int | None = None) -> None: ...

    def values(self, key: str) -> tuple[Tensor, Mapping[int, int]]: ...


class Syncer:
    """Of one model, until :meth:`remove`.

    Args:
        model: whose parameters are synced; they all need a gradient.
        parameters: name → parameter, those that are.
        chunks: of the parameters.
        client: of this worker.
        options: name → options of its optimizer that are others than it was made with.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        chunks: Sequence[Chunk],
        client: Client,
        options: Callable[[str], Mapping[str, Any]],
    ) -> None:
        self._parameters, self._client, self._options = parameters, client, options
        self._chunks = {c.key: c for c in chunks}
        self._of = {name: [c for c in chunks if name in c.names] for name in parameters}
        self._names = {id(p): name for name, p in parameters.items()}
        self._flat: dict[str, Tensor] = {}  # of parameters that do not lie in one row
        self._asked: set[str] = set()  # chunks whose values have not been put where they belong
        self._there: set[str] = set()  # parameters whose gradient is there
        self._pushed: set[str] = set()  # chunks of this step
        self._met: set[str] = set()  # parameters that a module has waited for in this step
        self._at_once: set[str] = set()  # parameters that are used without their module's forward()
        self.syncing = True
        """False: gradients are accumulated, and stay here."""
        hooked: Sequence[Any] = list(parameters.values())
        self._handles: list[Any] = [p.register_post_accumulate_grad_hook(self._ready) for p in hooked]
        for module in model.modules():
            own = [self._names[id(p)] for p in module._parameters.values() if id(p) in self._names]
            if own or module is model:
                self._handles.append(module.register_forward_pre_hook(self._before(own, root=module is model)))

    def ask(self, within: int | None = None) -> None:
        """Asks for all values."""
        for key in self._chunks:
            self._client.pull(key, within)
            self._asked.add(key)

    def take(self) -> None:
        """Waits for all values that were asked for, and puts them where they belong."""
        self._take(self._parameters)

    def end_step(self) -> None:
        """What has not been pushed of this step is: parameters without a gradient add nothing."""
        for chunk in self._chunks.values():
            if chunk.key not in self._pushed:
                self._push(chunk)
        self._pushed.clear()
        self._there.clear()
        self._met.clear()

    def remove(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # -- hooks ----------------------------------------------------------------------------------

    def _before(self, names: Sequence[str], *, root: bool) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            self._met.update(names)
            self._take([*names, *self._at_once] if root else names)

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
        self._there.add(name)
        if name not in self._met and name not in self._at_once:
            self._at_once.add(name)  # its first values are new, so nothing was wrong yet
        for chunk in self._of[name]:
            if all(n in self._there for n in chunk.names):
                self._push(chunk)

    # -- chunks ---------------------------------------------------------------------------------

    @torch.no_grad()
    def _push(self, chunk: Chunk) -> None:
        self._pushed.add(chunk.key)
        gradient, first = self._gradient(chunk), chunk.pieces[0].name
        absent = frozenset(i for i, n in enumerate(chunk.names) if n not in self._there) if gradient is not None else ()
        self._client.push(chunk.key, gradient, self._options(first), frozenset(absent))
        self._client.pull(chunk.key)
        self._asked.add(chunk.key)

    def _gradient(self, chunk: Chunk) -> Tensor | None:
        """Its own copy, for it stays until it is acknowledged."""
        if not any(name in self._there for name in chunk.names):
            return None
        row = chunk.gather({name: self._row(name) for name in chunk.names})
        return row.cpu() if row.device.type != "cpu" else row.clone() if len(chunk.pieces) == 1 else row

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
            values, _ = self._client.values(key)
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
