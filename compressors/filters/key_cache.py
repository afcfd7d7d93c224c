"""``key_cache``: keys that were sent before are not sent again."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import OrderedDict

import torch
from torch import Tensor

from commlib.codecs.filter import Content, Filter, MissingKeys, Receiving, Sending, keys_fault
from commlib.errors import ProtocolError

_LENGTH, _DIGEST = 8, 16  # bytes of a signature: how many keys, little-endian; then their BLAKE2b


@dataclasses.dataclass(frozen=True)
class KeyCache(Filter):
    """A list of keys that the peer has seen is replaced by its signature of 24 bytes, the note.

    Both sides keep the last ``entries`` lists, at most 8·entries·size bytes, and forget the one used longest ago, so
    that they know the same ones as long as every message comes, in order. Else decoding may raise ``MissingKeys``, and
    the receiver asks; if the sender has forgotten them too, ``keys_of`` gives None, and what the message said must be
    said anew. Keys that are None pass.

    Key caching of Li et al. (OSDI 2014). Their released code hashes the first 2048 bytes only, so that of two lists of
    one length with the same beginning one is taken for the other; here all of them count, and keys that come with a
    signature are held against it.

    Args:
        entries: lists of keys kept for each peer and direction, at least 1.
    """

    entries: int = 64

    name = "key_cache"
    reads = frozenset({"keys"})
    codes = frozenset({"keys"})
    lossless = True

    def __post_init__(self) -> None:
        if self.entries < 1:
            raise ValueError(f"key_cache: entries must be at least 1, got {self.entries}")

    def sender(self, size: int, seed: int) -> Sending:
        return _Sender(_Lists(self.entries))

    def receiver(self, size: int) -> Receiving:
        return _Receiver(_Lists(self.entries), size)


class _Lists:
    """Signature → keys, the last used ones."""

    def __init__(self, entries: int) -> None:
        self._entries = entries
        self._keys: OrderedDict[bytes, Tensor] = OrderedDict()

    def use(self, signature: bytes) -> Tensor | None:
        if signature in self._keys:
            self._keys.move_to_end(signature)
        return self._keys.get(signature)

    def add(self, signature: bytes, keys: Tensor) -> None:
        """As the last used, copied: what was given may lie in a buffer that is written to again."""
        if self.use(signature) is None:
            self._keys[signature] = keys.clone()
            if len(self._keys) > self._entries:
                self._keys.popitem(last=False)


class _Sender(Sending):
    def __init__(self, lists: _Lists) -> None:
        self._lists = lists

    def encode(self, content: Content) -> Content:
        if content.keys is None:
            return content.push(None)
        signature = signature_of(content.keys)
        if self._lists.use(signature) is not None:
            return dataclasses.replace(content, keys=torch.empty(0, dtype=torch.uint8)).push(signature)
        self._lists.add(signature, content.keys)
        return content.push(signature)

    def keys_of(self, signature: bytes) -> Tensor | None:
        return self._lists.use(signature)


class _Receiver(Receiving):
    def __init__(self, lists: _Lists, size: int) -> None:
        self._lists, self._size = lists, size

    def decode(self, content: Content) -> Content:
        signature, content = content.pop()
        if signature is None and content.keys is None:
            return content
        if signature is None or content.keys is None:
            raise ProtocolError("key_cache: keys without a signature, or a signature without keys")
        if not isinstance(signature, bytes) or len(signature) != _LENGTH + _DIGEST:
            raise ProtocolError(f"key_cache: the signature is not {_LENGTH + _DIGEST} bytes")
        if content.keys.dtype == torch.int64:
            self.learn(signature, content.keys)
            return content
        return dataclasses.replace(content, keys=self._known(signature, content.keys))

    def _known(self, signature: bytes, instead: Tensor) -> Tensor:
        length = int.from_bytes(signature[:_LENGTH], "little")
        if instead.numel() or length > self._size:
            raise ProtocolError(f"key_cache: {instead.numel()} bytes instead of {length} keys out of {self._size}")
        keys = self._lists.use(signature)
        if keys is None:
            raise MissingKeys(signature)
        return keys

    def learn(self, signature: bytes, keys: Tensor) -> bool:
        wrong = keys_fault(keys, self._size)
        if wrong or signature_of(keys) != signature:
            raise ProtocolError(f"key_cache: {wrong or 'keys are not those of their signature'}")
        self._lists.add(signature, keys)
        return True


def signature_of(keys: Tensor) -> bytes:
    """Signature of keys, int64 (n,): n and a hash of all of them, 24 bytes."""
    digest = hashlib.blake2b(keys.contiguous().numpy().data, digest_size=_DIGEST).digest()
    return keys.numel().to_bytes(_LENGTH, "little") + digest
