"""Planner, from a user's rules to a plan: which route each of a model's layers gets, and why."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from commlib.planning.plan import Plan, PlannedLayer
from commlib.planning.route import Route, Rules, resolve
from commlib.runtime.layers import LayerSpec


def make_plan(specs: Sequence[LayerSpec], rules: Rules, *, world: int, min_size: int | None) -> Plan:
    """The plan for a model's layers. The first rule whose pattern matches a layer's name decides.

    A layer stays dense if no rule matches it, if it has fewer than ``min_size`` values (None: the codec's own), if the
    codec refuses it (a vector for powersgd), or if its payload would be no smaller than the gradient.

    Raises:
        ValueError, TypeError: a bad rule, or a pattern that matches no layer.
    """
    if isinstance(rules, Mapping):
        patterns: list[object] = list(rules)
        bad = [p for p in patterns if not isinstance(p, str)]
        if bad:
            raise TypeError(f"a rule's pattern is a text that parameter names match, not {bad[0]!r}")
        table = [(pattern, resolve(rule, world)) for pattern, rule in rules.items()]
        _check_patterns(table, specs)
    else:
        table = [("*", resolve(rules, world))]
    layers = {}
    for spec in specs:
        match = next(((p, r) for p, r in table if fnmatchcase(spec.name, p)), None)
        layers[spec.name] = _plan_layer(spec, match, world, min_size)
    for spec in specs:
        if spec.layer is not None and spec.kind != "linear.weight":
            weight = layers[f"{spec.layer}.weight" if spec.layer else "weight"]
            layers[spec.name] = _with_weight(layers[spec.name], weight)
    return Plan(layers, world)


def _with_weight(bias: PlannedLayer, weight: PlannedLayer) -> PlannedLayer:
    """A bias comes out of its weight's rows; where these are not sent it cannot, and where they are it must."""
    if weight.route.by_rows:
        return dataclasses.replace(bias, route=weight.route, reason="comes with its weight's rows")
    if bias.route.by_rows:
        return dataclasses.replace(bias, route=bias.dense, reason="its weight's rows are not sent")
    return bias


def _plan_layer(spec: LayerSpec, match: tuple[str, Route] | None, world: int, min_size: int | None) -> PlannedLayer:
    plain = resolve("none", world)
    if spec.sparse:
        return _plan_sparse(spec, match, min_size)
    if match is None:
        return PlannedLayer(spec, plain, plain, "no rule matches")
    pattern, route = match
    form = route.codec.dense_form()
    dense = plain if form is None else Route("dense", form)
    if route.exchange == "dense" and route.codec.lossless:
        return PlannedLayer(spec, route, route, f"rule {pattern!r}")
    least = route.codec.min_size if min_size is None else min_size
    if spec.numel < least:
        return PlannedLayer(spec, dense, dense, f"{spec.numel} values < min_size={least}")
    reason = route.codec.refuse(spec) or route.refuse(spec)
    if reason is None and not route.codec.lossless and route.codec.nbytes(spec) >= spec.nbytes:
        reason = f"its payload of {route.codec.nbytes(spec)} bytes would be no smaller than {spec.nbytes}"
    if reason:
        return PlannedLayer(spec, dense, dense, reason)
    return PlannedLayer(spec, route, dense, f"rule {pattern!r}")


def _plan_sparse(spec: LayerSpec, match: tuple[str, Route] | None, min_size: int | None) -> PlannedLayer:
    """Rows and values, whatever the rule; but its codec is taken, if it may be.

    Raises:
        ValueError: the rule names this layer, and its codec cannot be.
    """
    exact, why = resolve("none@sparse", 1), "its gradient is sparse: rows and values"
    if match is None or match[1].codec.lossless:
        return PlannedLayer(spec, exact, exact, why)
    pattern, route = match[0], Route("sparse", match[1].codec)
    reason = route.refuse(spec)
    if reason and pattern == spec.name:
        raise ValueError(f"rule {pattern!r}: {route.codec} cannot carry a sparse gradient: {reason}")
    least = route.codec.min_size if min_size is None else min_size
    if spec.numel < least:
        reason = f"{spec.numel} values < min_size={least}"
    if reason:
        return PlannedLayer(spec, exact, exact, f"{why}; not by {route.codec}: {reason}")
    return PlannedLayer(spec, route, exact, f"{why}; rule {pattern!r}")


def _check_patterns(table: Sequence[tuple[str, Route]], specs: Sequence[LayerSpec]) -> None:
    names = [s.name for s in specs]
    for pattern, _ in table:
        if pattern != "*" and not any(fnmatchcase(n, pattern) for n in names):
            near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            some = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
            raise ValueError(f"rule {pattern!r} matches no trained parameter (there are: {some}{hint})")
