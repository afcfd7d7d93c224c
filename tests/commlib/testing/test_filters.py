"""The contract suite for filters: ours keep every promise, and whoever breaks one is caught."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from commlib.codecs.filter import Content, Filter, Receiving, Sending
from commlib.compressors.filters.significance import Significance
from commlib.testing.filters import check_filter


@pytest.mark.parametrize(
    "spec",
    [
        *("fixed_float", "fixed_float:nbytes=1", "fixed_float:nbytes=4", "lossless", "key_cache:entries=2"),
        *(
            "random_skip",
            "random_skip:keep=0.1,ef=on",
            "significance:threshold=0.5",
            "significance:threshold=2,decay=on",
            "kkt:l1=1",
        ),
    ],
)
def test_every_filter_of_ours_keeps_every_promise(spec: str) -> None:
    check_filter(spec)


@dataclasses.dataclass(frozen=True)
class Broken(Filter):
    """Passes contents, but for what is wrong with it."""

    how: str = ""

    name = "broken"
    lossless = True

    def sender(self, size: int, seed: int) -> Sending:
        return BrokenSending(self.how, size)

    def receiver(self, size: int) -> Receiving:
        return BrokenReceiving(self.how)


class BrokenSending(Sending):
    shared = 0

    def __init__(self, how: str, size: int) -> None:
        self.how, self.size = how, size

    def encode(self, content: Content) -> Content:
        BrokenSending.shared += 1
        match self.how:
            case "no note":
                return content
            case "tuple":
                return content.push((1, 2))
            case "forgets keys":
                return dataclasses.replace(content, keys=None, values=torch.zeros(self.size)).push(None)
            case "rounds":
                return dataclasses.replace(content, values=content.values.half().float()).push(None)
            case "draws":
                return dataclasses.replace(content, values=torch.rand_like(content.values)).push(None)
            case "writes":
                content.values.mul_(2)
            case "mixes":
                return content.push(BrokenSending.shared)
            case "halves":
                return dataclasses.replace(content, values=content.values / 2).push(None)
        return content.push(None)

    def residual(self) -> Tensor | None:
        return torch.zeros(self.size) if self.how == "halves" else None


class BrokenReceiving(Receiving):
    def __init__(self, how: str) -> None:
        self.how, self.decoded = how, 0.0

    def decode(self, content: Content) -> Content:
        note, content = content.pop()
        match self.how:
            case "counts":
                self.decoded += 1
                return dataclasses.replace(content, values=content.values + self.decoded)
            case "believes":
                assert note is None
            case "takes more":
                return dataclasses.replace(content, notes=())
        return content


@pytest.mark.parametrize(
    ("how", "lossless", "message"),
    [
        ("no note", True, "leaves the notes"),
        ("tuple", True, r"its note \(1, 2\) becomes \[1, 2\]"),
        ("takes more", True, r"decoding leaves the notes \(\)"),
        ("forgets keys", True, "decodes keys that were not given|comes as another"),
        ("rounds", True, "is lossless, but content"),
        ("draws", False, "the same seed and contents gave different bytes"),
        ("writes", False, "writes to a content"),
        ("mixes", True, "the same seed and contents gave different bytes|changes with what another was sent"),
        ("counts", False, "decoded"),
        ("halves", False, r"decoded \+ residual is not what was given"),
        ("believes", True, "raises AssertionError, not ProtocolError"),
    ],
)
def test_a_broken_filter_is_caught(how: str, lossless: bool, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Broken, "lossless", lossless)
    with pytest.raises(AssertionError, match=message):
        check_filter(Broken(how))


def test_a_biased_filter_that_calls_itself_unbiased_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Significance, "unbiased", True)
    with pytest.raises(AssertionError, match="is unbiased, but the mean error is"):
        check_filter(Significance(0.5))


def test_a_sound_filter_is_not_blamed() -> None:
    check_filter(Broken())
