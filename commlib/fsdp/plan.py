"""Which way the gradients of a sharded model go, and its parameters. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import cast

from commlib.codecs.base import Compressor, LayerSpec
from commlib.codecs.registry import make, make_plain
from commlib.exchange import reduce_scatter
from commlib.exchange.hierarchy import Hierarchy, refuse
from commlib.exchange.layer_task import Stripe
from commlib.exchange.reduce_scatter import ReduceScatter
from commlib.groups.world import World
from commlib.planning.plan import Plan, PlannedLayer
from commlib.planning.planner import make_plan
from commlib.planning.policy import Exact, Policy, policy_of
from commlib.planning.route import Route, Rule, Rules

TO_OWNERS = "reduce_scatter"


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
    specs: Sequence[LayerSpec], rules: Rules | Policy | Plan, *, world: int, min_size: int, replicas: Replicas | None
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
            raise TypeError(f"{policy} chooses by measurement, which is not done for FSDP2: name a codec")
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
    return made if policy is None else made.because("exact", "nothing is measured for FSDP2 yet: as it is")


def _rows(p: PlannedLayer) -> str:
    return "the rows of a layer's input are not caught under FSDP2" if p.route.by_rows else ""


def _to_owners(specs: Sequence[LayerSpec], rules: Rules, world: int, min_size: int) -> Plan:
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
            raise TypeError("'auto' chooses by measurement, which is not done for FSDP2: name a codec")
        codec = make("none" if text.strip() == "dense" else text)
    if exchange.strip() not in ("", TO_OWNERS):
        raise ValueError(f"{rule}: gradients of a sharded model go to their owners, by no other exchange: name a codec")
    probe = LayerSpec("any", (64, 64))
    if why := ReduceScatter().refuse(codec, probe):
        raise ValueError(f"{codec} is not for sharded models: {why}")
    return Route("gather", codec)


def _carried(p: PlannedLayer) -> PlannedLayer:
    return dataclasses.replace(p, route=Route(TO_OWNERS, p.route.codec), dense=Route(TO_OWNERS, p.dense.codec))


def codecs_of(specs: Sequence[LayerSpec], rules: Rules | None, min_size: int) -> dict[str, Compressor]:
    """Parameter → the codec by which its values come from their owners; those that come as they are are not there.

    Args:
        specs: this rank's chunks, of floating-point parameters.
        rules: a codec, or a mapping from name patterns to codecs; None: as they are.
        min_size: chunks with fewer values come as they are.

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
    found = {}
    for spec in specs:
        codec = next((codec for pattern, codec in named if fnmatchcase(spec.name, pattern)), None)
        if codec is None or codec.lossless or spec.numel < min_size or not spec.dtype.is_floating_point:
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
