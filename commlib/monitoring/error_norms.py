"""How much of a gradient was not sent: what a codec has held back, beside what there was to send.

There was the gradient and what was held back before, x + r; the residual is what is left of it when the step has come
through, r′. So ‖r′‖ / ‖x + r‖ is the relative error of compression: 0 where all was sent, 1 where nothing was.

x is overwritten by the mean over ranks, so the norm is taken before, in the thread of the hook, of the steps that are
asked about only (:attr:`Gauge.on`). Nothing is read back to the host before :meth:`ErrorNorms.read`: the steps between
cost one look at a flag a layer, and no device is waited for. Both are called in a backward pass of this model, the
second at its end, when no hook of it runs: there is no more than one thread at a time here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from commlib.codecs.base import Compressor, Memory
from commlib.codecs.error_feedback import ErrorFeedback
from commlib.codecs.memory_store import MemoryStore
from commlib.codecs.residuals import widen
from commlib.codecs.slots import OWNER


class LayerNorms(NamedTuple):
    """Norms of one layer's gradient, compression error and residual.

    Attributes:
        residual: the norm of what this rank holds back, without the loss scale.
        owed: of what it holds back of the mean as the owner of a stripe (scatter_gather). 0 where it owns none.
        error: relative, of this step; None where it is not to be said.
        there: ‖x + r‖, without the loss scale, where the error is known.
    """

    residual: float
    owed: float = 0.0
    error: float | None = None
    there: float = 0.0


class ErrorNorms:
    """Norms of what a rank's codecs lose, layer by layer.

    Args:
        store: what codecs remember.

    Attributes:
        on: whether the step under way is asked about; to be changed between two steps.
    """

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._there: dict[str, Tensor] = {}
        self._step = -1
        self.on = False

    def note(self, name: str, codec: Compressor, grad: Tensor, memory: Memory, step: int) -> None:
        """A layer is about to be compressed.

        Not of codecs with a momentum of their own (``dgc``), which adds to what there is; nor of what a node's ranks
        have summed first, whose sum is not here. Of these, only residuals are known.

        Args:
            name: of the layer.
            codec: in force.
            grad: local, with all that is to be drained into it.
            memory: of the codec.
            step: how many came before it.
        """
        if step != self._step:  # whatever is here is of a step that broke off
            self._there, self._step = {}, step
        old = memory.old.get("residual")
        if old is None or "momentum" in memory.old or len(held := widen(old).view(-1)) != grad.numel():
            return
        decay = codec.decay if isinstance(codec, ErrorFeedback) else 1.0
        x = torch.add(grad.view(-1), held, alpha=decay)  # float32, whatever the gradient is
        self._there[name] = torch.linalg.vector_norm(x)

    def read(self, count: int) -> dict[str, LayerNorms]:
        """Norms of all layers that hold something back, once the step is settled. On CUDA waits for it.

        Args:
            count: of steps by now. A step that did not count has no errors: its residuals are those of before.
        """
        there = self._there if count == self._step + 1 else {}
        found = [
            (name, key, torch.linalg.vector_norm(values, dtype=torch.float32))
            for name, key, values in self._store.held()
        ]
        norms = torch.stack([norm for *_, norm in found] + [there[n] for n in there]).tolist() if found else []
        before = dict(zip(there, norms[len(found) :], strict=True)) if norms else {}
        unit, layers = self._store.unit, dict.fromkeys((name for name, *_ in found), LayerNorms(0.0))
        for (name, key, _), norm in zip(found, norms, strict=False):
            held = layers[name]
            if key.startswith(OWNER):
                held = held._replace(owed=norm / unit)
            elif key == "residual" and name in before:
                error = norm / before[name] if before[name] else 0.0
                held = held._replace(residual=norm / unit, error=error, there=before[name] / unit)
            else:  # of this route, or of one before it that is not drained yet
                held = held._replace(residual=(held.residual**2 + (norm / unit) ** 2) ** 0.5)
            layers[name] = held
        self._there = {}
        return layers


def total(layers: dict[str, LayerNorms]) -> float | None:
    """The relative error of all layers together whose own is known; None if no layer's is."""
    known = [held for held in layers.values() if held.error is not None]
    there = sum(held.there**2 for held in known) ** 0.5
    if not known:
        return None
    return sum(held.residual**2 for held in known) ** 0.5 / there if there else 0.0
