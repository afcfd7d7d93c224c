"""How rows of values travel in the parameter server's messages: as they are, by a codec, or through filters. Pure.

::

    worker    gradient → Sender  ─────→  Receiver → gradient     shard
    worker    values   ← Copy    ←─────  Copies   ← values       shard

A gradient's error feedback is a residual at its worker. Of values a shard sends the difference to what a worker has,
which it follows (:class:`Copies`): so what was not sent of them is in the next difference, and nothing is lost either.

What is not finite is not coded, nor are other dtypes than float32: a :class:`Row` may always be the tensor itself.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from commlib.codecs.base import Compressor, LayerSpec, Seeds
from commlib.codecs.error_feedback import ErrorFeedback
from commlib.codecs.filter import Chain, Content, chain, filters
from commlib.codecs.memory_store import MemoryStore
from commlib.codecs.registry import compressors, make
from commlib.errors import ProtocolError, unknown
from commlib.runtime.amp import finite

Row = Tensor | Content
"""Values, (n,), or what stands for them; a codec's payload is content without keys and notes."""
Way = Compressor | Chain | None


def way(spec: str) -> Way:
    """Read how values travel: a codec's spec string, or filters' joined by ``+``; ``none``: as they are.

    Raises:
        ValueError, MissingDependency, TypeError: there is none such; see :func:`~commlib.codecs.registry.make` and
            :func:`~commlib.codecs.filter.chain`.
    """
    name = re.split(r"[:+\s]", spec.strip())[0]
    if name == "none" and spec.strip() == "none":
        return None
    if name in filters():
        return chain(spec)
    if name not in compressors():
        raise ValueError(unknown("codec or filter", name, [*compressors(), *filters()]))
    return make(spec)


def way_of_values(spec: str) -> Way:
    """The same for values, where a difference has the part of a residual.

    Raises:
        ValueError: as :func:`way`, or a codec that keeps what it has not sent itself, or a filter of gradients alone.
    """
    found = way(spec)
    if isinstance(found, Chain) and found.sees:
        names = ", ".join(f.name for f in found.filters if f.sees)
        raise ValueError(f"{names} cannot code values: it filters gradients, by the values that they are of")
    if isinstance(found, ErrorFeedback):
        return found.inner
    if isinstance(found, Compressor):
        kept = [k for k, slot in found.slots(LayerSpec("probe", (8, 8))).items() if slot.role != "replicated"]
        if kept:
            raise ValueError(
                f"{found} cannot code values: its {kept[0]} is of gradients; what a worker lacks of the values is sent "
                "in the next difference anyway"
            )
    return found


@dataclasses.dataclass(frozen=True)
class ValueCoding:
    """Coding of all gradients and values of one job.

    Args:
        push: of gradients.
        pull: of values.
        layers: key → what codecs are told of it.
    """

    push: Way = None
    pull: Way = None
    layers: Mapping[str, LayerSpec] = dataclasses.field(default_factory=lambda: MappingProxyType({}))

    def sender(self, key: str, worker: int) -> ValueEncoder:
        """Encoder of a worker's gradients."""
        return ValueEncoder(*self._of(self.push, key), worker)

    def receiver(self, key: str, worker: int) -> ValueDecoder:
        """Decoder of a worker's gradients, at the shard."""
        return ValueDecoder(*self._of(self.push, key), worker)

    def of_values(self, key: str) -> tuple[Way, LayerSpec | None]:
        """How a key's values travel, and what codecs are told of it."""
        return self._of(self.pull, key)

    def warm(self) -> None:
        """Codecs load their kernels with the first tensor, for a second or more in which all others would wait."""
        layer = LayerSpec("warm", (64, 64))
        for chosen in (_suited(way, layer) for way in (self.push, self.pull)):
            if isinstance(chosen, Compressor):
                sent = ValueEncoder(chosen, layer, 0).encode(torch.ones(layer.numel, dtype=torch.float32), 0)
                ValueDecoder(chosen, layer, 0).decode(sent, 0)

    def _of(self, chosen: Way, key: str) -> tuple[Way, LayerSpec | None]:
        layer = self.layers.get(key)
        return _suited(chosen, layer), layer


def _suited(chosen: Way, layer: LayerSpec | None) -> Way:
    """Codec that carries a layer: the chosen one may refuse it, or make nothing smaller."""
    if chosen is None or layer is None or layer.dtype != torch.float32:
        return None
    if isinstance(chosen, Compressor):
        smaller = chosen.lossless or chosen.nbytes(layer) < layer.nbytes
        return chosen if smaller and not chosen.refuse(layer) else chosen.dense_form()
    return chosen


class ValueEncoder:
    """A worker's gradients of one key on their way.

    Args:
        way: by which.
        layer: of the key; None where there is no way.
        worker: its number, for what is drawn at random.
    """

    def __init__(self, way: Way, layer: LayerSpec | None, worker: int) -> None:
        self._way, self._layer, self._worker = way, layer, worker
        self._store = MemoryStore()
        self._filters = way.sender(layer.numel, seed_of(layer, worker)) if isinstance(way, Chain) and layer else None
        self._sees, self._values = isinstance(way, Chain) and way.sees, torch.empty(0, dtype=torch.float32)

    def see(self, values: Tensor) -> None:
        """Takes note of the key's values, (n,), as they are now; they do not change any more."""
        if self._sees:
            self._values = values

    def encode(self, gradient: Tensor, stamp: int) -> Row:
        """Gradient, (n,), as it is pushed, the how-manieth it is; itself if it is not finite.

        Nor is one coded of which something would remain that is not: what overflows float16, say.
        """
        if self._way is None or not finite(gradient):
            return gradient
        if self._filters is not None:
            if self._sees and self._values.numel():
                self._filters.see(self._values, stamp)
            try:
                return self._filters.encode(Content(None, gradient))
            except ValueError:  # with what was held back it becomes so; nothing has changed
                return gradient
        assert isinstance(self._way, Compressor)
        return self._encode(self._way.at(stamp), gradient, stamp)

    def keys_of(self, signature: bytes) -> Tensor | None:
        """Keys, int64 (n,), sent under a signature; None if they are not known any more."""
        return self._filters.keys_of(signature) if self._filters else None

    def _encode(self, codec: Compressor, gradient: Tensor, stamp: int) -> Row:
        assert self._layer is not None
        memory = self._store.memory(self._layer, codec.slots(self._layer))
        payload = torch.empty(codec.nbytes(self._layer), dtype=torch.uint8)
        seed = Seeds(0, stamp, self._layer.name).of(codec, self._worker)
        codec.compress(gradient.view(self._layer.shape), payload, memory=memory, seed=seed)
        if not all(finite(v) for v in memory.new.values()):
            self._store.discard()
            return gradient
        self._store.commit()
        self._store.step += 1
        return Content(None, payload)


class ValueDecoder:
    """The other side of a :class:`ValueEncoder` with the same arguments."""

    def __init__(self, way: Way, layer: LayerSpec | None, worker: int) -> None:
        self._way, self._layer, self._worker = way, layer, worker
        self._filters = way.receiver(layer.numel) if isinstance(way, Chain) and layer else None

    def decode(self, row: Row, stamp: int) -> Tensor:
        """The gradient, (n,).

        Raises:
            ProtocolError: it is none; MissingKeys if its keys have to be asked for.
        """
        if isinstance(row, Tensor):
            return row
        if self._way is None or self._layer is None:
            raise ProtocolError("coded values, where they travel as they are")
        out = torch.zeros(self._layer.numel, dtype=torch.float32)
        if self._filters is not None:
            add(out, self._filters.decode(row))
        else:
            assert isinstance(self._way, Compressor)
            codec = self._way.at(stamp)
            decompress(codec, row, out, self._layer, Seeds(0, stamp, self._layer.name).of(codec, self._worker))
        return out

    def learn(self, signature: bytes, keys: Tensor) -> None:
        """Takes keys that were asked for.

        Raises:
            ProtocolError: they are none, or not those of the signature.
        """
        if self._filters is None or not self._filters.learn(signature, keys):
            raise ProtocolError("keys that nobody has asked for")


def add(out: Tensor, content: Content) -> None:
    """Adds decoded content to values, (n,)."""
    if content.keys is None:
        out.add_(content.values)
    else:
        out.index_add_(0, content.keys, content.values)


def decompress(codec: Compressor, row: Content, out: Tensor, layer: LayerSpec, seed: int) -> None:
    """Adds what a payload stands for to values, (n,).

    Raises:
        ProtocolError: it is no payload of this codec's.
    """
    if row.keys is not None or row.notes or row.values.dtype != torch.uint8:
        raise ProtocolError(f"no payload of {codec}")
    payload = row.values if row.values.data_ptr() % 8 == 0 else row.values.clone()
    try:
        codec.decompress(payload, out.view(layer.shape), add=True, seed=seed)
    except (ValueError, TypeError, RuntimeError, IndexError) as e:  # what comes may be anything
        raise ProtocolError(f"no payload of {codec}: {e}") from None


def seed_of(layer: LayerSpec, number: int) -> int:
    """Seed of filters: 63 bits of a layer and a number."""
    return int.from_bytes(hashlib.blake2b(f"{number}/{layer.name}".encode(), digest_size=8).digest(), "little") >> 1
