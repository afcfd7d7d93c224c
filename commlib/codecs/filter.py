"""The contract of a filter: what makes a parameter server's messages smaller, between the caller and the network.

::

    worker    content → kkt → significance → key_cache → fixed_float → lossless → network
    server    content ←  ·  ←      ·       ← key_cache ← fixed_float ← lossless ← network

A :class:`Filter` is an immutable configuration; what it must remember of a peer is in the :class:`Sending` and the
:class:`Receiving` that it makes, one for each peer and direction. Callers use a :class:`Chain`, also for one filter: it
checks that the order makes sense, what goes in and what comes from the network. No network is here, and no threads.

After the user-defined filters of Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI
2014). Filters are found through the entry-point group ``commlib.filters``; :func:`chain` reads their spec strings.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import Any, cast

import torch
from torch import Tensor

from commlib.codecs.base import format_option
from commlib.errors import ProtocolError
from commlib.runtime.plugins import build, fetch, installed, split

GROUP = "commlib.filters"


@dataclasses.dataclass(frozen=True, eq=False)
class Content:
    """Keys and values of one message on their way through filters. Nobody writes to its tensors.

    Args:
        keys: int64 (n,), ascending, each once and in [0, size); None: all of 0 … size-1, in order; uint8 (m,) once
            a filter has made bytes of them.
        values: float32 (n,); uint8 (m,) once a filter has made bytes of them. CPU, like keys.
        notes: what filters leave for decoding, the last one's last: None, bool, int, float, str, bytes or lists of
            these, so that msgpack can carry them.
    """

    keys: Tensor | None
    values: Tensor
    notes: tuple[object, ...] = ()

    def push(self, note: object) -> Content:
        """Content with one more note."""
        return dataclasses.replace(self, notes=(*self.notes, note))

    def pop(self) -> tuple[object, Content]:
        """The last note, and the same without it; a chain has seen that there is one."""
        return self.notes[-1], dataclasses.replace(self, notes=self.notes[:-1])

    def only(self, sent: Tensor) -> Content:
        """Entries where ``sent``, bool (n,), is true; keys and values must not be bytes yet."""
        if bool(sent.all()):
            return self  # None stays None: 8 bytes a value less
        keys = sent.nonzero().view(-1) if self.keys is None else self.keys[sent]
        return dataclasses.replace(self, keys=keys, values=self.values[sent])


class MissingKeys(ProtocolError):
    """A message has a signature (bytes) instead of keys, and the receiver does not know them (any more).

    Ask the peer for ``Sending.keys_of(signature)``, hand them to ``Receiving.learn``, decode the message again.
    """

    def __init__(self, signature: bytes) -> None:
        super().__init__(f"the keys of signature {signature.hex()} are not known: ask for them")
        self.signature = signature


class Sending(ABC):
    """A filter on the way to one peer, with what it remembers."""

    def see(self, values: Tensor, number: int) -> None:  # noqa: B027  # most filters need not look
        """Takes note of the values that the next content is a gradient of; nothing, unless the filter ``sees``.

        Args:
            values: float32 (size,), of all keys, as this worker was last told them; for reading, now and later.
            number: of that gradient: the how-manieth of these keys, from 0, and the same at all workers.
        """

    @abstractmethod
    def encode(self, content: Content) -> Content:
        """The content with one more note, its parts changed or not.

        Its tensors may be those that were given, so send them before they change; what a filter keeps it copies.

        Raises:
            ValueError: the content is none, or has values that the filter cannot take; nothing has changed then.
        """

    def keys_of(self, signature: bytes) -> Tensor | None:
        """Keys, int64 (n,), sent under a signature; None if they are not known, or not any more."""
        return None

    def residual(self) -> Tensor | None:
        """Values that were given and not sent yet, float32 (size,), for reading; None for a filter that owes
        nothing."""
        return None


class Receiving(ABC):
    """A filter on the way from one peer, with what it remembers."""

    @abstractmethod
    def decode(self, content: Content) -> Content:
        """The content with the last note taken off and what it stands for undone. Decoding twice gives the same.

        It comes from the network: dtypes and dimensions are those of :class:`Content`, anything else may be wrong. A
        filter checks what it reads itself, and allocates no more than the message or ``size`` justifies; that keys and
        values are sound when all is undone is the chain's to check.

        Raises:
            ProtocolError: it is not what the other side sends; MissingKeys if its keys have to be asked for.
        """

    def learn(self, signature: bytes, keys: Tensor) -> bool:
        """Take the keys that were asked for; false if this filter keeps none.

        Raises:
            ProtocolError: they are no keys, int64 (n,), or not those of the signature.
        """
        return False


class Filter(ABC):
    """Base of all filters: a way of sending less, as a frozen dataclass whose fields are the spec string's options.

    Options are validated in ``__post_init__`` with ``ValueError``. What it promises besides the contract of
    :class:`Sending` and :class:`Receiving` is tested by :func:`commlib.testing.filters.check_filter`.

    Attributes:
        name: what the spec string calls it.
        reads: of "keys" and "values", those it must find as numbers, not bytes: it comes before who makes bytes.
        codes: of "keys" and "values", those of which it may make bytes.
        lossless: what is decoded is what was given, bit for bit.
        unbiased: E[decoded] = given over seeds, where entries not sent count as zero.
        sees: its senders go by :meth:`Sending.see`: it is for gradients, and not for values themselves.
    """

    name: str
    reads: frozenset[str] = frozenset()
    codes: frozenset[str] = frozenset()
    lossless: bool = False
    unbiased: bool = False
    sees: bool = False

    @abstractmethod
    def sender(self, size: int, seed: int) -> Sending:
        """Sender to one peer whose keys are 0 … size-1; what it draws at random follows from the seed."""

    @abstractmethod
    def receiver(self, size: int) -> Receiving:
        """The other side of a sender with the same options and size."""

    def __str__(self) -> str:
        fields = [f for f in dataclasses.fields(cast(Any, self)) if f.init and getattr(self, f.name) != f.default]
        options = ",".join(f"{f.name}={format_option(getattr(self, f.name))}" for f in fields)
        return f"{self.name}:{options}" if options else self.name


@dataclasses.dataclass(frozen=True)
class Chain:
    """Filters one after another: encoded in their order, decoded in reverse.

    Raises:
        ValueError: one stands twice, or after another one that has made bytes of what it reads.
    """

    filters: Sequence[Filter] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "filters", tuple(self.filters))
        coded: dict[str, str] = {}
        for i, f in enumerate(self.filters):
            if f.name in (g.name for g in self.filters[:i]):
                raise ValueError(f"{f.name} stands twice in {self}")
            for part in sorted(f.reads & coded.keys()):
                raise ValueError(f"{f.name} must come before {coded[part]}, which codes the {part} it reads")
            coded |= dict.fromkeys(f.codes, f.name)

    @property
    def sees(self) -> bool:
        """Whether one of them goes by the values that gradients are of."""
        return any(f.sees for f in self.filters)

    def sender(self, size: int, seed: int) -> Sending:
        """Towards one peer whose keys are 0 … size-1. It checks what it is given."""
        # each draws from a seed of its own: the same numbers for dropping and rounding would be a bias
        hashes = [hashlib.blake2b(f"{seed} {f.name}".encode(), digest_size=8).digest() for f in self.filters]
        seeds = [int.from_bytes(h, "little") >> 1 for h in hashes]
        return _ChainSending(size, [f.sender(size, s) for f, s in zip(self.filters, seeds, strict=True)])

    def receiver(self, size: int) -> Receiving:
        """Receiver from one peer: whatever comes, it gives sound content with the notes it had before, or
        ProtocolError."""
        return _ChainReceiving(size, [f.receiver(size) for f in self.filters], str(self))

    def __str__(self) -> str:
        return "+".join(map(str, self.filters)) or "none"


class _ChainSending(Sending):
    def __init__(self, size: int, filters: Sequence[Sending]) -> None:
        self._size, self._filters = size, filters

    def see(self, values: Tensor, number: int) -> None:
        for f in self._filters:
            f.see(values, number)

    def encode(self, content: Content) -> Content:
        wrong = "it has notes already" if content.notes else content_fault(content, self._size)
        if wrong:
            raise ValueError(f"not content for {self._size} keys: {wrong}")
        for f in self._filters:
            content = f.encode(content)
        return content

    def keys_of(self, signature: bytes) -> Tensor | None:
        known = (f.keys_of(signature) for f in self._filters)
        return next((keys for keys in known if keys is not None), None)

    def residual(self) -> Tensor | None:
        owed = [r for f in self._filters if (r := f.residual()) is not None]
        return torch.stack(owed).sum(0) if owed else None


class _ChainReceiving(Receiving):
    def __init__(self, size: int, filters: Sequence[Receiving], name: str) -> None:
        self._size, self._filters, self._name = size, filters, name

    def decode(self, content: Content) -> Content:
        if len(content.notes) != len(self._filters):
            raise ProtocolError(f"a message has {len(content.notes)} notes, {self._name} leaves {len(self._filters)}")
        for tensor, number in ((content.keys, torch.int64), (content.values, torch.float32)):
            if tensor is not None and (tensor.dim() != 1 or tensor.dtype not in (number, torch.uint8)):
                raise ProtocolError(f"a part of a message is {_form(tensor)}, not one row of {number} or bytes")
        for f in reversed(self._filters):
            content = f.decode(content)
        wrong = content_fault(content, self._size)
        if wrong:
            raise ProtocolError(f"a message for {self._size} keys: {wrong}")
        return content

    def learn(self, signature: bytes, keys: Tensor) -> bool:
        return any(f.learn(signature, keys) for f in self._filters)


def content_fault(content: Content, size: int) -> str | None:
    """Fault of content without bytes, in words; None if there is none."""
    values, keys = content.values, content.keys
    n = values.numel()
    if values.dtype != torch.float32 or values.dim() != 1:
        return f"values are {_form(values)}, not one row of float32"
    if keys is None:
        return f"{n} values without keys, {size} are due" if n != size else None
    return keys_fault(keys, size) or (f"{len(keys)} keys for {n} values" if len(keys) != n else None)


def keys_fault(keys: Tensor, size: int) -> str | None:
    """Fault of keys, in words; None if they are int64 (n,), ascending, each once and in [0, size)."""
    if keys.dtype != torch.int64 or keys.dim() != 1:
        return f"keys are {_form(keys)}, not one row of int64"
    if not bool((keys[1:] > keys[:-1]).all()):
        return "keys are not ascending"
    outside = [k for k in (*keys[:1].tolist(), *keys[-1:].tolist()) if not 0 <= k < size]
    return f"key {outside[0]} is not in [0, {size})" if outside else None


@functools.cache
def filters() -> Mapping[str, EntryPoint]:
    """Name → entry point of every installed filter, read-only; ValueError if two have the same name."""
    return installed(GROUP, "filters")


def make_filter(spec: str) -> Filter:
    """Make a filter from its spec string, ``name[:option=value[,option=value…]]``.

    Raises:
        ValueError: unknown filter or option, an option that is missing, or a value out of range.
        MissingDependency: the filter's module needs a package that is not installed.
        TypeError: the entry point is no Filter.
    """
    name, options = split("filter", spec)
    cls = fetch("filter", name, filters(), extra="filters")
    if not (isinstance(cls, type) and issubclass(cls, Filter)):
        raise TypeError(f"entry point {filters()[name].value} of filter {name!r} is not a commlib.codecs.filter.Filter")
    required = [f.name for f in dataclasses.fields(cast(Any, cls)) if f.init and f.default is dataclasses.MISSING]
    for missing in [r for r in required if r not in options]:
        raise ValueError(f"filter {name!r} needs {missing}: write {name}:{missing}=…")
    return build(cls, name, options)


def chain(spec: str) -> Chain:
    """Filters from their spec strings joined by ``+``; ``none`` is a chain of none.

    >>> str(chain("significance:threshold=1e+3 + lossless:level=3"))
    'significance:threshold=1000+lossless'

    Raises:
        ValueError, MissingDependency, TypeError: as :func:`make_filter`, or their order makes no sense.
    """
    if spec.strip() == "none":
        return Chain()
    return Chain([make_filter(one) for one in re.split(r"\+(?=\s*[A-Za-z_])", spec)])  # not at the + of 1e+3


def _form(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype}"
