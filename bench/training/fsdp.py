"""Configurations under FSDP2: plain FSDP2, and commlib's codecs for gradients and parameters."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

import commlib
from commlib.codecs.base import LayerSpec
from commlib.exchange.registry import BY_ROWS, BY_SERVERS
from commlib.fsdp.plan import choice_of
from commlib.planning.policy import policy_of

from .configurations import PLACED, Configuration, pick
from .workloads import Workload

if TYPE_CHECKING:
    from commlib.fsdp.state import ShardedState  # not when running: FSDP2 takes a while to import

BASELINE = "fsdp2"
COMMLIB = ("none", "int8", "int8+int8", "int4+int8", "onebit", "onebit+int8", "topk:ratio=0.01")
QUICK = (BASELINE, "none", "int8", "int8+int8", "onebit+int8")

_PLUS = re.compile(r"\+(?=\s*[A-Za-z_])")  # before the name of a codec; that of 1e+3 stands before a digit
_POLICY = re.compile(r"\+(?=\s*lossy\b)")  # a policy has pluses of its own
_ANY = LayerSpec("any", (64, 64))


@dataclasses.dataclass(frozen=True)
class Sharded(Configuration):
    """Way for gradients and parameters to travel under FSDP2.

    Args:
        name: ``fsdp2``; or ``GRADIENTS`` or ``GRADIENTS+PARAMETERS``, specs of commlib's codecs, or policies.
        by: ``pytorch`` or ``commlib``.
        exact: whether gradients and parameters are what FSDP2 would have.
    """

    @property
    def managed(self) -> bool:
        """Whether codecs are chosen by measurement."""
        return self.by == "commlib" and any(policy_of(spec) for spec in split(self.name))

    def wrap(
        self, course: Workload, group: Any, timeout: float, options: Mapping[str, Any] | None = None
    ) -> tuple[nn.Module, ShardedState | None]:
        """As :meth:`Configuration.wrap`; there are no buckets, so no options of them.

        Raises:
            CommlibError: this PyTorch's FSDP2 cannot be given a communication.
        """
        course.shard(group)
        if self.by != "commlib":
            return course.module, None
        gradients, parameters = split(self.name)
        return course.module, commlib.attach(course.module, gradients, parameters=parameters, timeout=timeout)


def split(spec: str) -> tuple[str, str | None]:
    """The specs of gradients and of parameters (None: as they are).

    Raises:
        ValueError: one of them is missing, or there are more.

    >>> split("topk:ratio=0.1,values=int8+bf16")
    ('topk:ratio=0.1,values=int8', 'bf16')
    >>> split("lossy:int8+onebit+lossy:int8")
    ('lossy:int8+onebit', 'lossy:int8')
    """
    gradients, *policy = _POLICY.split(spec.strip(), maxsplit=1)
    parts = [gradients] if _is_lossy(gradients) else _PLUS.split(gradients)
    parts = [part.strip() for part in (*parts, *policy)]
    if len(parts) > 2 or not all(parts) or parts[-1].endswith("+"):
        raise ValueError(
            f"--comm {spec!r}: with --fsdp2 it is GRADIENTS or GRADIENTS+PARAMETERS, a codec each, as int8+int8; "
            "none+int8 leaves the gradients as they are"
        )
    return parts[0], parts[1] if len(parts) > 1 else None


def choose(comm: Sequence[str], only: Sequence[str], world_size: int, *, quick: bool = False) -> list[Configuration]:
    """The contenders under FSDP2, the baseline first.

    Args:
        comm: commlib's, instead of :data:`COMMLIB`.
        only: names of those that shall race; the baseline does in any case. Empty: all, or :data:`QUICK`.
        world_size: ranks that share the parameters out.
        quick: without ``comm`` and ``only``, only those of :data:`QUICK`.

    Raises:
        ValueError: a name or a spec that is not known or not for FSDP2, or one given twice.
    """
    for name in only:
        if name.startswith("torch-") or name == "ddp":
            raise ValueError(f"--only {name}: it is DDP's, and there is no DDP with --fsdp2: leave one of them out")
    ours = [Sharded(c, "commlib", _exact(c, world_size)) for c in comm or COMMLIB]
    return pick([Sharded(BASELINE, "pytorch", True), *ours], only, QUICK if quick and not comm else ())


def check_options(
    *, backward_s: float | None, limit: str | None, hierarchy: bool, buckets: Mapping[str, float | bool | None]
) -> None:
    """Raises ValueError if an option was given that FSDP2 has nothing for.

    Args:
        backward_s: seconds of a simulated backward pass; None: the model is real.
        limit, hierarchy: as the command has them.
        buckets: options of DDP's buckets, as DDP names them; None or False: not given.
    """
    found = {
        "--compute simulated": (backward_s is not None, "prepared gradients have no passes that parameters come for"),
        "--limit": (limit is not None, "commlib's limit of what is sent is of DDP only"),
        "--hierarchy": (hierarchy, "commlib's sums inside nodes are of DDP only (under FSDP2 a mesh does it: HSDP)"),
    }
    for name, value in buckets.items():
        given = value is not None and value is not False
        found[f"--{name.replace('_', '-')}"] = given, "buckets are DDP's; FSDP2 sends what was sharded together"
    for option, (given, why) in found.items():
        if given:
            raise ValueError(f"{option} does not go with --fsdp2: {why}; leave one of them out")


def _exact(spec: str, world_size: int) -> bool:
    """Whether gradients and parameters stay as they are; raises ValueError if it is no spec for FSDP2."""
    head = spec.partition("@")[0].partition(":")[0].strip()
    for heads, why in _OF_DDP:
        if head in heads or (head.startswith("torch-") and "torch-" in heads):
            raise ValueError(f"--comm {spec!r} is not for --fsdp2: {why}; name a codec, as int8 or int8+int8")
    gradients, parameters = split(spec)
    given: dict[str, Any] = {"world": world_size, "min_size": 0, "replicas": None, "halves": ()}
    try:
        choice = choice_of([_ANY], [_ANY], gradients, parameters, **given)
    except (TypeError, ValueError) as e:
        raise ValueError(f"--comm {spec!r} with --fsdp2: {e}") from e
    return not choice.any and not choice.kept and all(p.route.codec.lossless for p in choice.plain)


def _is_lossy(spec: str) -> bool:
    return spec.partition(":")[0].strip() == "lossy"


_OF_DDP = (
    ((PLACED,), "layers are placed under DDP only"),
    (tuple(BY_ROWS), "the rows of a layer's input are not caught under FSDP2"),
    (tuple(BY_SERVERS), "parameter servers are of DDP only"),
    (("torch-", "ddp"), "it is DDP's"),
    ((BASELINE,), "it is the baseline, and races in any case"),
)
