"""commlib: communication compression for torch.distributed.

One line on a DDP training loop::

    ddp = DistributedDataParallel(model)
    comm = commlib.attach(ddp, "onebit")
"""

import importlib
import typing

from commlib.__version__ import __version__ as __version__
from commlib.groups import process_groups

if typing.TYPE_CHECKING:
    from commlib._attach import attach
    from commlib.checkpoint.dcp import read_state
    from commlib.checkpoint.state_dict import merge_state_dicts
    from commlib.codecs.base import Compressor, LayerSpec, Memory, Slot
    from commlib.codecs.cooperative import LowRank
    from commlib.codecs.error_feedback import ErrorFeedback
    from commlib.codecs.registry import make
    from commlib.ddp.state import HookState, hook
    from commlib.errors import (
        CheckpointMismatch,
        CommlibError,
        MissingDependency,
        PeerLost,
        PlanMismatch,
        ReplicasDiverged,
        WrongGradient,
    )
    from commlib.exchange.rate_limit import RateLimit
    from commlib.local_sgd.elastic import ElasticAveraging
    from commlib.local_sgd.local_steps import LocalSteps
    from commlib.monitoring.replica_check import check_replicas
    from commlib.pipeline.hetpipe import HetPipe
    from commlib.placement.place import place
    from commlib.planning.plan import Plan
    from commlib.planning.policy import Exact, Lossy
    from commlib.planning.route import Route
    from commlib.server.job.consistency import ASP, BSP, DTSSP, SSP, WSP, Consistency, Downpour
    from commlib.server.job.worker_groups import Topology
    from commlib.server.worker.parameter_server import ParameterServer
    from commlib.server.worker.push_pull import Servers
    from commlib.telemetry.stats import HeldBytes, LayerStats, Stats
    from commlib.zero.step import ShardedStep

process_groups.register()  # `init_process_group("zmq")` knows it once commlib is imported

_HOME = {
    "ASP": "commlib.server.job.consistency",
    "BSP": "commlib.server.job.consistency",
    "DTSSP": "commlib.server.job.consistency",
    "SSP": "commlib.server.job.consistency",
    "WSP": "commlib.server.job.consistency",
    "CheckpointMismatch": "commlib.errors",
    "CommlibError": "commlib.errors",
    "Compressor": "commlib.codecs.base",
    "Consistency": "commlib.server.job.consistency",
    "Downpour": "commlib.server.job.consistency",
    "ElasticAveraging": "commlib.local_sgd.elastic",
    "ErrorFeedback": "commlib.codecs.error_feedback",
    "Exact": "commlib.planning.policy",
    "HeldBytes": "commlib.telemetry.stats",
    "HetPipe": "commlib.pipeline.hetpipe",
    "HookState": "commlib.ddp.state",
    "LayerSpec": "commlib.codecs.base",
    "LayerStats": "commlib.telemetry.stats",
    "LocalSteps": "commlib.local_sgd.local_steps",
    "Lossy": "commlib.planning.policy",
    "LowRank": "commlib.codecs.cooperative",
    "Memory": "commlib.codecs.base",
    "MissingDependency": "commlib.errors",
    "ParameterServer": "commlib.server.worker.parameter_server",
    "PeerLost": "commlib.errors",
    "Plan": "commlib.planning.plan",
    "PlanMismatch": "commlib.errors",
    "RateLimit": "commlib.exchange.rate_limit",
    "ReplicasDiverged": "commlib.errors",
    "Route": "commlib.planning.route",
    "Servers": "commlib.server.worker.push_pull",
    "ShardedStep": "commlib.zero.step",
    "Slot": "commlib.codecs.base",
    "Stats": "commlib.telemetry.stats",
    "Topology": "commlib.server.job.worker_groups",
    "WrongGradient": "commlib.errors",
    "attach": "commlib._attach",
    "check_replicas": "commlib.monitoring.replica_check",
    "hook": "commlib.ddp.state",
    "make": "commlib.codecs.registry",
    "merge_state_dicts": "commlib.checkpoint.state_dict",
    "place": "commlib.placement.place",
    "read_state": "commlib.checkpoint.dcp",
}
"""Public name → the module that has it, which is imported when the name is first asked for (PEP 562)."""

__all__ = [
    "ASP",
    "BSP",
    "DTSSP",
    "SSP",
    "WSP",
    "CheckpointMismatch",
    "CommlibError",
    "Compressor",
    "Consistency",
    "Downpour",
    "ElasticAveraging",
    "ErrorFeedback",
    "Exact",
    "HeldBytes",
    "HetPipe",
    "HookState",
    "LayerSpec",
    "LayerStats",
    "LocalSteps",
    "Lossy",
    "LowRank",
    "Memory",
    "MissingDependency",
    "ParameterServer",
    "PeerLost",
    "Plan",
    "PlanMismatch",
    "RateLimit",
    "ReplicasDiverged",
    "Route",
    "Servers",
    "ShardedStep",
    "Slot",
    "Stats",
    "Topology",
    "WrongGradient",
    "attach",
    "check_replicas",
    "hook",
    "make",
    "merge_state_dicts",
    "place",
    "read_state",
]


if not typing.TYPE_CHECKING:  # type checkers would take any name then

    def __getattr__(name: str) -> typing.Any:
        """A public name, which from then on is an ordinary attribute."""
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
        return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
