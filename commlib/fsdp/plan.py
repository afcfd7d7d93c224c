"""Which way the gradients of a sharded model go, and its parameters. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, cast

from commlib.codecs.base import Compressor, LayerSpec
from commlib.codecs.registry import make, make_plain
from commlib.exchange import reduce_scatter
from commlib.exchange.hierarchy import Hierarchy, refuse
from commlib.exchange.layer_task import Stripe
from commlib.exchange.reduce_scatter import ReduceScatter
from commlib.groups.world import World
from commlib.planning.plan import Plan, PlannedLayer
from commlib.planning.planner import make_plan
from commlib.planning.policy import Exact, Lossy, Policy, policy_of
from commlib.planning.route import Route, Rule, Rules

TO_OWNERS = "reduce_scatter"
HALF = "bf16:ef=off"
"""Exact for a gradient that was computed in bf16, whatever it is summed in."""


@dataclasses.dataclass(frozen=True)
class Replicas(Hierarchy):
    """HSDP as a hierarchy: a *node* is a set of ranks that share the parameters out, dense inside; routes go between.

    Of ``replicate`` every rank is a node.

    The rows that a rank exchanges are those that FSDP2 has given it.
    """

    @classmethod
    def of(cls, shard: World, replicate: World) -> Replicas:
        """Make the hierarchy of a rank's place in both dimensions of the mesh."""
        rows = range(replicate.size)
        nodes = tuple(tuple(range(r * shard.size, (r + 1) * shard.size)) for r in rows)
        return cls(nodes, replicate.rank * shard.size + shard.rank)

    def cut(self, codec: Compressor, spec: LayerSpec) -> tuple[Stripe, ...]:
        """The rows of a layer that each rank of a node owns."""
        return reduce_scatter.chunks(spec, self.local.size)

    def about(self) -> str:
        """Number of replicas and shards, in words."""
        if self.local.size == 1:
            return f"replicate: routes between {self.inter.size} ranks"
        return f"HSDP: dense over {self.local.size} shards, routes between {self.inter.size} replicas"


def plan_of(
    specs: Sequence[LayerSpec],
    rules: Rules | Policy | Plan,
    *,
    world: int,
    min_size: int | None,
    replicas: Replicas | None,
) -> Plan:
    """How gradients travel to their owners, or under HSDP between replicas: by the codecs of rules, or as they are.

    Args:
        specs: of all trained parameters, whole.
        rules: as :func:`commlib.attach` has them; Exact is dense.
        world: ranks that share the parameters out.
        min_size: layers with fewer values are not compressed.
        replicas: under HSDP.

    Raises:
        ValueError: a bad rule; a codec whose memory cannot be cut by rows; another exchange.
        TypeError: not a rule: a plan, or a policy that measures.
    """
    if isinstance(rules, Plan):
        raise TypeError("a Plan has routes of replicas: for a sharded model name a codec, or rules by layer")
    policy = policy_of(rules)
    if policy is not None:
        if not isinstance(policy, Exact):
            raise TypeError(f"{policy}: what is chosen by measurement is no plan before that: name a codec")
        rules = "none"
    named = cast(Rules, rules)  # no policy
    if replicas is None:
        made = _to_owners(specs, named, world, min_size)
    else:
        made = make_plan(specs, named, world=replicas.inter.size, min_size=min_size)
        for p in made:
            in_parts = refuse(p.route, p.spec) if replicas.local.size > 1 else None
            if why := in_parts or _rows(p):
                raise ValueError(f"{p.spec.name} by {p.route} cannot be taken between replicas of shards: {why}")
        made = made.noted(replicas.about(), local=replicas.local.size)
    return made if policy is None else made.because("exact", "as it is: nothing else is exact for these gradients")


def _rows(p: PlannedLayer) -> str:
    return "the rows of a layer's input are not caught under FSDP2" if p.route.by_rows else ""


def _to_owners(specs: Sequence[LayerSpec], rules: Rules, world: int, min_size: int | None) -> Plan:
    named = {k: _alone(r) for k, r in rules.items()} if isinstance(rules, Mapping) else _alone(rules)
    made = make_plan(specs, named, world=world, min_size=min_size)
    return Plan({p.spec.name: _carried(p) for p in made}, world)


def _alone(rule: Rule) -> Rule:
    """A rule that names a codec and perhaps the only exchange there is, by one that takes any codec."""
    if isinstance(rule, Route):
        exchange, codec = rule.exchange, rule.codec
    elif isinstance(rule, Compressor):
        exchange, codec = "", make(rule)
    else:
        text, _, exchange = rule.partition("@")
        if text == "auto":
            raise TypeError("'auto' is for a whole model, not for some layers of a sharded one: name a codec")
        codec = make("none" if text.strip() == "dense" else text)
    if exchange.strip() not in ("", TO_OWNERS):
        raise ValueError(f"{rule}: gradients of a sharded model go to their owners, by no other exchange: name a codec")
    probe = LayerSpec("any", (64, 64))
    if why := ReduceScatter().refuse(codec, probe):
        raise ValueError(f"{codec} is not for sharded models: {why}")
    return Route("gather", codec)


def _carried(p: PlannedLayer) -> PlannedLayer:
    return dataclasses.replace(p, route=Route(TO_OWNERS, p.route.codec), dense=Route(TO_OWNERS, p.dense.codec))


def codecs_of(specs: Sequence[LayerSpec], rules: Rules | None, min_size: int | None) -> dict[str, Compressor]:
    """Parameter → the codec by which its values come from their owners; those that come as they are are not there.

    Args:
        specs: this rank's chunks, of floating-point parameters.
        rules: a codec, or a mapping from name patterns to codecs; None: as they are.
        min_size: chunks with fewer values come as they are; None: 1,024.

    Raises:
        ValueError: a bad rule, or a codec that remembers or draws something: then the values of a forward pass and of
            its backward pass would differ.
        TypeError: not a rule.
    """
    if rules is None:
        return {}
    table = rules if isinstance(rules, Mapping) else {"*": rules}
    named = [(pattern, _of_values(rule)) for pattern, rule in table.items()]
    names = [spec.name for spec in specs]
    for pattern, _ in named:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"parameters: rule {pattern!r} matches no parameter (there are: {', '.join(names[:8])}, …)"
            )
    found, least = {}, Compressor.min_size if min_size is None else min_size
    for spec in specs:
        codec = next((codec for pattern, codec in named if fnmatchcase(spec.name, pattern)), None)
        if codec is None or codec.lossless or spec.numel < least or not spec.dtype.is_floating_point:
            continue
        if codec.refuse(spec) is None and codec.nbytes(spec) < spec.nbytes:
            found[spec.name] = codec
    return found


def _of_values(rule: Rule) -> Compressor:
    if isinstance(rule, Route):
        raise TypeError(f"parameters: {rule} is a route: values come by an all-gather, name a codec alone")
    if isinstance(rule, str) and "@" in rule:
        raise ValueError(f"parameters: {rule!r} names an exchange: values come by an all-gather, name a codec alone")
    # Without feedback: there is nothing to feed back, for the owner keeps the values as they are.
    codec = make_plain(rule) if isinstance(rule, str) else getattr(rule, "inner", rule)
    kept = sorted(codec.slots(LayerSpec("any", (64, 64))))
    if kept or codec.random:
        why = f"keeps its {', '.join(kept)}" if kept else "draws at random"
        raise ValueError(
            f"parameters: {codec} {why}, and a forward pass and its backward pass must see the same values: "
            "take bf16, fp16 or int8"
        )
    return codec


@dataclasses.dataclass(frozen=True)
class Choice:
    """Codecs that may be chosen for a sharded model.

    Attributes:
        policy: in words.
        plain: the plan with which others are compared: every layer goes as it is, or as it was named if only codecs of
            parameters are chosen.
        gradients: codec → the plan in which every layer goes by it that can.
        values: codec → parameter → that codec, where it can carry its values.
        kept: values that go by a codec whatever is chosen.
        exact: the codec that loses nothing of gradients that were computed in fewer bits than they are summed in, and
            the units of which that is so.
    """

    policy: str
    plain: Plan
    gradients: Mapping[str, Plan]
    values: Mapping[str, Mapping[str, Compressor]]
    kept: Mapping[str, Compressor]
    exact: tuple[str, frozenset[str]] = ("", frozenset())

    def units(self, parameters: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
        """Codec → the units of which it would carry anything; those that would carry nothing are not there.

        Args:
            parameters: unit → names of those that are trained.
        """
        exact, of = self.exact
        found = {}
        for codec, plan in self.gradients.items():
            carried = [u for u, names in parameters.items() if any(not plan.layers[n].route.plain for n in names)]
            found[codec] = [u for u in carried if codec != exact or u in of]
        return {codec: units for codec, units in found.items() if units}

    def codecs(self) -> list[Compressor]:
        """All that may be used."""
        routes = [p.route.codec for plan in (self.plain, *self.gradients.values()) for p in plan]
        return [*routes, *self.kept.values(), *(c for by in self.values.values() for c in by.values())]

    @property
    def any(self) -> bool:
        """Whether there is anything to choose between."""
        return bool(self.gradients or self.values)


def choice_of(
    specs: Sequence[LayerSpec],
    chunks: Sequence[LayerSpec],
    gradients: Rules | Policy | Plan,
    parameters: Rules | Policy | None,
    *,
    world: int,
    min_size: int | None,
    replicas: Replicas | None,
    halves: Collection[str],
) -> Choice:
    """Make the choice that a user leaves to measurement; of what is named there is none.

    Args:
        specs: of all trained parameters, whole.
        chunks: this rank's, of floating-point parameters.
        gradients: as :func:`commlib.attach` has them.
        parameters: a codec, rules, or a policy; None: as they are.
        world, min_size, replicas: as :func:`plan_of`.
        halves: units whose gradients were computed in bf16, and are summed in float32.

    Raises:
        ValueError, TypeError: as :func:`plan_of` and :func:`codecs_of`.
    """
    given: dict[str, Any] = {"world": world, "min_size": min_size, "replicas": replicas}
    policy, of_values = policy_of(gradients), policy_of(parameters)
    plans: dict[str, Plan] = {}
    if policy is not None and (world > 1 or replicas is not None):
        policy.routes(world)  # says what is wrong with a codec's being chosen
        rules = policy.rules if isinstance(policy, Lossy) else ()
        plans = {str(rule): plan_of(specs, rule, **given) for rule in rules}
    exact: tuple[str, frozenset[str]] = "", frozenset()
    if policy is not None and replicas is None and world > 1 and halves and HALF not in plans:
        exact = HALF, frozenset(halves)
        plans = {HALF: plan_of(specs, HALF, **given)} | plans
    values = of_values.rules if isinstance(of_values, Lossy) else ()
    coded = {str(rule): codecs_of(chunks, rule, min_size) for rule in values}
    return Choice(
        "; for parameters ".join(filter(None, ["" if policy is None else str(policy), _only_codecs(of_values)])),
        plan_of(specs, gradients if policy is None else Exact(), **given),
        plans,
        {name: found for name, found in coded.items() if found},
        {} if of_values is not None else codecs_of(chunks, cast("Rules | None", parameters), min_size),
        exact,
    )


def _only_codecs(policy: Policy | None) -> str:
    return f"as they are or {', '.join(map(str, policy.rules))}" if isinstance(policy, Lossy) else ""
