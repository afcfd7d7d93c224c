"""commlib: communication compression for torch.distributed.

One line on a DDP training loop::

    ddp = DistributedDataParallel(model)
    comm = commlib.attach(ddp, "onebit")
"""

from commlib.__version__ import __version__ as __version__
from commlib._attach import attach
from commlib.checkpoint.dcp import read_state
from commlib.checkpoint.state_dict import merge_state_dicts
from commlib.codecs.base import Compressor, LayerSpec, Memory, Slot
from commlib.codecs.cooperative import LowRank
from commlib.codecs.error_feedback import ErrorFeedback
from commlib.codecs.registry import make
from commlib.ddp.state import HookState, hook
from commlib.errors import CheckpointMismatch, CommlibError, MissingDependency, PeerLost, PlanMismatch, ReplicasDiverged
from commlib.exchange.rate_limit import RateLimit
from commlib.groups import process_groups
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
from commlib.telemetry.stats import LayerStats, Stats
from commlib.zero.step import ShardedStep

process_groups.register()

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
    "attach",
    "check_replicas",
    "hook",
    "make",
    "merge_state_dicts",
    "place",
    "read_state",
]
