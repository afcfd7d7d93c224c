"""``significance``: values too small to matter wait until they have added up."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod

import torch
from torch import Tensor

from commlib.codecs.filter import Content, Filter, Receiving, Sending
from commlib.errors import ProtocolError


@dataclasses.dataclass(frozen=True)
class Significance(Filter):
    """A key is sent once its value, with what was not sent of it before, is at least the threshold in magnitude.

    Nothing is lost: Σ sent + residual = Σ given, but for float32's rounding. What waits for a key is below the
    threshold that its last message was held against. Keys that were None become int64 where some are left out.

    Significantly modified filter of Li et al. (OSDI 2014), whose proof of convergence wants a threshold that falls like
    1/t (``decay``); that what is not sent waits in a residual is our own.

    Args:
        threshold: ≥ 0, in units of the values.
        decay: the t-th message to a peer, from 1, is held against threshold / t.
    """

    threshold: float
    decay: bool = False

    name = "significance"
    reads = frozenset({"keys", "values"})

    def __post_init__(self) -> None:
        if not 0 <= self.threshold < math.inf:
            raise ValueError(f"significance: threshold must be in [0, inf), got {self.threshold!r}")

    def sender(self, size: int, seed: int) -> Sending:
        return _Significant(self, size)

    def receiver(self, size: int) -> Receiving:
        return Nothing(self.name)


class Dropping(Sending):
    """Sends some values as they are, keeps the others and adds them to what is given next for their keys."""

    def __init__(self, name: str, size: int) -> None:
        self._name = name
        self._residual = torch.zeros(size, dtype=torch.float32)

    @abstractmethod
    def choose(self, values: Tensor) -> Tensor:
        """Which of the values, float32 (n,), are sent: bool (n,)."""

    def encode(self, content: Content) -> Content:
        places = slice(None) if content.keys is None else content.keys
        values = content.values + self._residual[places]
        check_finite(self._name, values)  # a residual would keep them for ever
        sent = self.choose(values)
        self._residual[places] = values.masked_fill(sent, 0.0)
        return dataclasses.replace(content, values=values).only(sent).push(None)

    def residual(self) -> Tensor | None:
        return self._residual


class _Significant(Dropping):
    def __init__(self, options: Significance, size: int) -> None:
        super().__init__(options.name, size)
        self._options, self._messages = options, 0

    def choose(self, values: Tensor) -> Tensor:
        self._messages += 1
        return values.abs() >= self._options.threshold / (self._messages if self._options.decay else 1)


class Nothing(Receiving):
    """The other side of a filter that leaves entries out: there is nothing to undo."""

    def __init__(self, name: str) -> None:
        self._name = name

    def decode(self, content: Content) -> Content:
        note, content = content.pop()
        if note is not None:
            raise ProtocolError(f"{self._name} leaves None as its note, this is a {type(note).__name__}")
        return content


def check_finite(name: str, values: Tensor) -> None:
    """Raises ValueError, naming the filter, if a value is not finite."""
    if not bool(values.isfinite().all()):
        raise ValueError(f"{name}: a value is not finite, or becomes so with what was not sent before")
