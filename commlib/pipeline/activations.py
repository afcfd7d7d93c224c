"""Activations to the next stage, and their gradients back, between the ranks of one virtual worker.

Ordering: all is called by the thread that trains, in the order of :mod:`commlib.pipeline.schedule`. Between two ranks
messages of one direction arrive in the order in which they were sent, and forward and backward never share a direction;
so the n-th that is received is the n-th that was sent. Sends wait for nobody; what is sent is held until it has left.
"""

from __future__ import annotations

import collections
import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commlib.errors import PeerLost, ProtocolError
from commlib.pipeline.schedule import StagePlace

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_MOST = 8  # dimensions of an activation


class ActivationCarrier:
    """Carrier of the activations and gradients of one stage.

    Args:
        group: process group of the virtual worker's ranks, by stage; None: there is one stage, and nothing to send.
        place: this rank.
        ranks: the default group's, of places' numbers.
        device: where activations are.
        held: minibatches after which what was sent of one has long been taken, as its answer is here.
        timeout: seconds that a message may be waited for.
    """

    def __init__(
        self, group: Any, place: StagePlace, ranks: Sequence[int], device: torch.device, held: int, timeout: float
    ) -> None:
        self._group, self._place, self._device = group, place, device
        self._ranks = [ranks[r] for r in place.pipeline]
        self._held = 3 * held  # messages: two of a minibatch go forward, one back
        self.timeout = timeout
        """Seconds that a message may be waited for."""
        self._sent: collections.deque[tuple[str, int, Any, Tensor]] = collections.deque()

    def forward(self, activation: Tensor, p: int) -> None:
        """Sends what minibatch p has become, of any shape, to the next stage.

        Raises:
            TypeError: a dtype that has no gradient, or is not known.
            ValueError: of more than 8 dimensions.
            PeerLost: the next stage takes nothing any more; who.
        """
        if activation.dtype not in _DTYPES:
            known = ", ".join(str(t).removeprefix("torch.") for t in _DTYPES)
            raise TypeError(f"a stage's output is one tensor of {known}; this one is {activation.dtype}")
        if activation.dim() > _MOST:
            raise ValueError(f"a stage's output has {_MOST} dimensions at most, this one {activation.dim()}")
        head = [_DTYPES.index(activation.dtype), activation.dim(), *activation.shape]
        head += [0] * (2 + _MOST - len(head))
        to, what = self._place.stage + 1, f"the output of minibatch {p}"
        self._send(torch.tensor(head, dtype=torch.int64, device=self._device), to, what)
        self._send(activation, to, what)

    def input(self, p: int) -> Tensor:
        """Minibatch p as it left the stage before; a leaf that needs a gradient.

        Raises:
            PeerLost: it does not come in time; whose it is.
            ProtocolError: it is no message of ours.
        """
        source, what = self._place.stage - 1, f"the output of minibatch {p}"
        head = torch.empty(2 + _MOST, dtype=torch.int64, device=self._device)
        self._receive(head, source, what)
        kind, dims, *shape = head.tolist()
        if not (0 <= kind < len(_DTYPES) and 0 <= dims <= _MOST and all(n >= 0 for n in shape)):
            raise ProtocolError(f"{self._place.name(source)} sent no header of an activation: {head.tolist()}")
        activation = torch.empty(shape[:dims], dtype=_DTYPES[kind], device=self._device)
        self._receive(activation, source, what)
        return activation.requires_grad_()

    def backward(self, gradient: Tensor, p: int) -> None:
        """Sends the gradient by what :meth:`input` gave, of the same shape and dtype, back.

        Raises:
            PeerLost: as :meth:`forward`.
        """
        self._send(gradient, self._place.stage - 1, f"the gradient of minibatch {p}")

    def gradient(self, like: Tensor, p: int) -> Tensor:
        """The gradient by what :meth:`forward` sent, ``like`` that.

        Raises:
            PeerLost: as :meth:`input`.
        """
        found = torch.empty_like(like, requires_grad=False, memory_format=torch.contiguous_format)
        self._receive(found, self._place.stage + 1, f"the gradient of minibatch {p}")
        return found

    def drain(self) -> None:
        """Waits until all that was sent has left.

        Raises:
            PeerLost: it does not in time; who does not take it.
        """
        while self._sent:
            self._settle()

    # -- one message ----------------------------------------------------------------------------

    def _send(self, tensor: Tensor, stage: int, what: str) -> None:
        tensor = tensor.contiguous()
        try:
            work = dist.isend(tensor, self._ranks[stage], group=self._group)
        except RuntimeError as e:
            raise self._lost(stage, f"takes {what}", e) from e
        self._sent.append((what, stage, work, tensor))
        while len(self._sent) > self._held:
            self._settle()

    def _settle(self) -> None:
        what, stage, work, _ = self._sent.popleft()
        try:
            work.wait(datetime.timedelta(seconds=self.timeout))
        except RuntimeError as e:
            raise self._lost(stage, f"takes {what}", e) from e

    def _receive(self, into: Tensor, stage: int, what: str) -> None:
        try:
            work: Any = dist.irecv(into, self._ranks[stage], group=self._group)
            work.wait(datetime.timedelta(seconds=self.timeout))
        except RuntimeError as e:
            raise self._lost(stage, f"sends {what}", e) from e

    def _lost(self, stage: int, does: str, error: RuntimeError) -> PeerLost:
        mine = self._place.name(self._place.stage)
        return PeerLost(
            f"{self._place.name(stage)} no longer {does}, for which {mine} waits {self.timeout:g} s at most: it is "
            f"gone, or waits for another stage itself ({error})"
        )
