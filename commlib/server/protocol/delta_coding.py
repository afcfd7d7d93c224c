"""Delta coding: what workers have of a shard's values, where these travel as differences. Each side keeps the same
copy.

A worker that asks says which answer it had last. If the shard gave it that one last, too, it sends the difference to
it, coded, and both add what that stands for: so the two copies are equal, and the next difference has what this one
lost. Else (a first question, another owner, an answer that never came) it sends the values as they are.
"""

from __future__ import annotations

import dataclasses
import itertools

import torch
from torch import Tensor

from commlib.codecs.base import Compressor, LayerSpec, Seeds
from commlib.codecs.filter import Chain, Content, Receiving, Sending
from commlib.codecs.memory_store import MemoryStore
from commlib.errors import ProtocolError
from commlib.runtime.amp import finite
from commlib.server.protocol.value_coding import Row, Way, add, decompress, seed_of


@dataclasses.dataclass
class _Copy:
    """Values that one worker has, or several who were told the same: they never change, but ``filters`` do."""

    serial: int
    values: Tensor
    filters: tuple[Sending, Receiving] | None = None
    later: tuple[int, Row, _Copy] | None = None  # number of updates, what was sent then, what they have since


class DeltaCoding:
    """Coding of one key's values as differences, at its owner.

    Args:
        way: by which its values travel.
        layer: what codecs are told of it.
    """

    def __init__(self, way: Way, layer: LayerSpec | None) -> None:
        self._way, self._layer = way, layer
        self._of: dict[int, _Copy] = {}
        self._whole: tuple[int, _Copy] | None = None
        self._serials = itertools.count(1)
        self._store = MemoryStore()

    def answer(self, worker: int, have: int | None, values: Tensor, number: int) -> tuple[Row, int]:
        """Values as a worker is sent them, and the number of this answer.

        Args:
            worker: who asks.
            have: number of the last answer that it had; None: it wants the values as they are.
            values: (n,), that it shall have; they do not change any more.
            number: of updates that are in them.
        """
        if self._way is None:
            return values, 0
        known, going_on = self._of.pop(worker, None), None
        if not finite(values):
            return values, 0
        if known is not None and known.serial == have:
            going_on = self._go_on(known, values, number)
        row, copy = going_on or (values, self._begin(values, number))
        self._of[worker] = copy
        return row, copy.serial

    def _begin(self, values: Tensor, number: int) -> _Copy:
        if isinstance(self._way, Chain):  # its filters remember what one peer has been told
            assert self._layer is not None
            size, seed = self._layer.numel, seed_of(self._layer, number)  # the same for all who begin at the same time
            return _Copy(next(self._serials), values, (self._way.sender(size, seed), self._way.receiver(size)))
        if self._whole is None or self._whole[0] != number:
            self._whole = number, _Copy(next(self._serials), values)
        return self._whole[1]

    def _go_on(self, known: _Copy, values: Tensor, number: int) -> tuple[Row, _Copy] | None:
        """Difference for those who have this copy, and the copy they have then; None if it overflows in the codec."""
        if known.later is None or known.later[0] != number:
            known.later = (number, *self._coded(known, values))
        _, row, copy = known.later
        return (row, copy) if finite(copy.values) else None

    def _coded(self, known: _Copy, values: Tensor) -> tuple[Row, _Copy]:
        serial, copy = next(self._serials), known.values.clone()
        if known.filters is not None:
            sending, receiving = known.filters
            difference = values - copy
            owed = sending.residual()  # it adds that itself
            row = sending.encode(Content(None, difference if owed is None else difference - owed))
            add(copy, receiving.decode(row))
            return row, _Copy(serial, copy, known.filters)
        assert isinstance(self._way, Compressor)
        assert self._layer is not None
        row = _encode(self._way, values - copy, self._layer, self._store, serial)
        decompress(self._way, row, copy, self._layer, _seed(self._way, self._layer, serial))
        return row, _Copy(serial, copy)


class DeltaCopy:
    """Copy of one key's values at a worker; arguments as of :class:`DeltaCoding`."""

    def __init__(self, way: Way, layer: LayerSpec | None) -> None:
        self._way, self._layer = way, layer
        self._values = torch.empty(0, dtype=torch.float32)
        self._filters: Receiving | None = None
        self.have: int | None = None
        """The number of the last answer."""

    def take(self, row: Row, serial: int) -> Tensor:
        """The values, (n,), of an answer; they do not change any more.

        Raises:
            ProtocolError: it is none.
        """
        if self._way is None and isinstance(row, Tensor):
            return row
        if self._layer is None or (isinstance(row, Content) and self.have is None):
            raise ProtocolError("the difference to values that are not here")
        if isinstance(row, Tensor):
            self._filters = self._way.receiver(self._layer.numel) if isinstance(self._way, Chain) else None
            values = row
        else:
            values = self._values.clone()
            if self._filters is not None:
                add(values, self._filters.decode(row))
            else:
                assert isinstance(self._way, Compressor)
                decompress(self._way, row, values, self._layer, _seed(self._way, self._layer, serial))
        self._values, self.have = values, serial
        return values


def _encode(codec: Compressor, difference: Tensor, layer: LayerSpec, store: MemoryStore, serial: int) -> Content:
    payload = torch.empty(codec.nbytes(layer), dtype=torch.uint8)
    memory = store.memory(layer, codec.slots(layer))
    codec.compress(difference.view(layer.shape), payload, memory=memory, seed=_seed(codec, layer, serial))
    store.commit()
    store.step += 1
    return Content(None, payload)


def _seed(codec: Compressor, layer: LayerSpec, serial: int) -> int:
    return Seeds(0, serial, layer.name).of(codec, -1)
