"""Policies: what the bandwidth manager may choose among."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from commlib.planning.route import Route, Rule, resolve


@dataclasses.dataclass(frozen=True)
class Exact:
    """Routes that lose nothing: all-reduce, or the rows that a linear layer's gradient is made of. The default.

    The first steps are all dense, while the manager measures; then it changes layers only where that makes steps
    shorter, and takes it back if it does not.
    """

    def routes(self, world: int) -> tuple[Route, ...]:
        """The compressed routes it may choose, between so many ranks."""
        return ()

    def __str__(self) -> str:
        return "exact routes, chosen by measurement"


@dataclasses.dataclass(frozen=True)
class Lossy:
    """Exact routes, and codecs for those layers whose exchange would make steps longer all the same.

    A layer whose transfer hides behind the backward pass stays exact: accuracy is spent only where it buys time.

    Args:
        codecs: what it may choose among: spec strings, Compressors or Routes; one alone need not be in a list.

    Raises:
        ValueError: none is given. (What is wrong with a spec is said when a model is attached.)
        TypeError: not such things.
    """

    codecs: Rule | Sequence[Rule]

    def __post_init__(self) -> None:
        rules = self.rules
        if not rules:
            raise ValueError("Lossy([]) would be Exact(): name a codec, as in Lossy(['onebit', 'fp16'])")
        for rule in rules:
            if not isinstance(rule, Rule):
                raise TypeError(f"Lossy takes spec strings, Compressors and Routes, got {rule!r}")

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The codecs as they were given."""
        if isinstance(self.codecs, Rule):
            return (self.codecs,)
        return tuple(self.codecs)

    def routes(self, world: int) -> tuple[Route, ...]:
        """The compressed routes it may choose, between so many ranks.

        Raises:
            ValueError: an unknown codec, or one that is not for choosing.
        """
        found = [resolve(rule, world) for rule in self.rules]
        for rule, route in zip(self.rules, found, strict=True):
            if route.codec.lossless:
                raise ValueError(
                    f"{rule} loses nothing, and exact routes are chosen in any case: give Lossy other codecs"
                )
            if route.codec.dense_form() is not None:
                raise ValueError(
                    f"{rule} keeps the optimizer's momentum, so it must carry a layer from the first step on: give it "
                    "as a rule, not for choosing"
                )
        return tuple(found)

    def __str__(self) -> str:
        return f"exact routes and {', '.join(map(str, self.rules))}, chosen by measurement"


Policy = Exact | Lossy


def policy_of(what: object) -> Policy | None:
    """The policy that a user names: one; the text ``auto``; or ``lossy:onebit+fp16``. None if it is none.

    Raises:
        ValueError: ``lossy`` without codecs.
    """
    if isinstance(what, Policy):
        return what
    text = what.strip() if isinstance(what, str) else ""
    if text == "auto":
        return Exact()
    if text.partition(":")[0] != "lossy":
        return None
    codecs = [spec.strip() for spec in text.partition(":")[2].split("+")]
    if not all(codecs):
        raise ValueError(f"{text!r} names no codec, or an empty one: write lossy:onebit+fp16")
    return Lossy(codecs)
