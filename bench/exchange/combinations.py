"""Which exchange goes with which codec. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from commlib.bench.models.shapes import Layers
from commlib.codecs.base import Compressor, LayerSpec
from commlib.codecs.registry import compressors, make
from commlib.errors import MissingDependency, unknown
from commlib.exchange.registry import BY_SERVERS, EXCHANGES
from commlib.planning.planner import make_plan
from commlib.planning.route import Route

DEFAULT = ("none", "fp16", "int8", "onebit", "topk:ratio=0.01", "powersgd:rank=4")
QUICK = ("int8", "onebit", "powersgd:rank=4@low_rank")
_ANY = LayerSpec("any", (64, 64))


@dataclasses.dataclass(frozen=True)
class Pair:
    """A codec's spec string, as the user wrote it, and the exchange that carries it."""

    codec: str
    exchange: str

    def __str__(self) -> str:
        return f"{self.codec}@{self.exchange}"


BASELINE = Pair("none", "dense")


@dataclasses.dataclass(frozen=True)
class PairChoice:
    """The pairs to measure, the baseline first, and why others are not among them."""

    pairs: list[Pair]
    left_out: list[str]


def choose(codecs: Sequence[str], exchanges: Sequence[str] = ()) -> PairChoice:
    """Every codec with every exchange that can carry it.

    Args:
        codecs: spec strings; with ``@exchange`` for one exchange alone; ``all`` is every installed codec.
        exchanges: the only ones wanted; empty: all.

    Raises:
        ValueError: an unknown codec, option or exchange, or a codec asked for that goes over none of the exchanges.
        MissingDependency: a codec asked for by name needs a package.
    """
    for exchange in exchanges:
        if exchange not in EXCHANGES:
            raise ValueError(unknown("exchange", exchange, EXCHANGES))
    pairs, left_out = [BASELINE], []
    for spec in codecs:
        for name in compressors() if spec == "all" else [spec]:
            try:
                found, refused = _pairs_of(name, exchanges)
            except MissingDependency as e:
                if spec != "all":
                    raise
                left_out.append(f"{name}: {e}")
                continue
            if not found and spec != "all":
                raise ValueError("; ".join(refused))
            pairs += found
            left_out += refused if exchanges else []  # else nobody asked for them
    return PairChoice(list(dict.fromkeys(pairs)), left_out)


def cheapest_first(pairs: Sequence[Pair], layers: Layers, world: int, min_size: int | None) -> list[Pair]:
    """The baseline, then the others by the bytes they will send: what time runs out for is what few would choose."""
    specs = [LayerSpec(name, shape) for name, shape in layers]

    def sent(pair: Pair) -> float:
        plan = make_plan(specs, str(pair), world=world, min_size=min_size)
        return sum(p.route.carrier().wire_bytes(p.route.codec, p.spec, world) for p in plan)

    return sorted(pairs, key=lambda pair: (pair != BASELINE, sent(pair)))


def _pairs_of(name: str, exchanges: Sequence[str]) -> tuple[list[Pair], list[str]]:
    """The pairs of a codec, and sentences about those that cannot be."""
    text, at, only = (part.strip() for part in name.partition("@"))
    if at and only not in EXCHANGES:
        raise ValueError(unknown("exchange", only, EXCHANGES))
    codec: Compressor = make("none" if text == "dense" else text)
    text = "none" if text == "dense" else text
    found, refused = [], []
    for exchange in [only] if at else exchanges or EXCHANGES:
        reason = "here are no servers" if exchange in BY_SERVERS else Route(exchange, codec).refuse(_ANY)
        if reason is None:
            found.append(Pair(text, exchange))
        else:
            refused.append(f"{text} cannot go over {exchange}: {reason}")
    return found, refused
