"""commlib: communication compression for torch.distributed.

One line on a DDP training loop::

    ddp = DistributedDataParallel(model)
    comm = commlib.attach(ddp, "onebit")
"""

from commlib import backends
from commlib.__version__ import __version__ as __version__
from commlib.attach import attach
from commlib.checkpoint import merge_state_dicts
from commlib.compressor import Compressor, LayerSpec, Memory, Slot
from commlib.consistency import ASP, BSP, DTSSP, SSP, WSP, Consistency, Downpour
from commlib.dcp import read_state
from commlib.drift import check_replicas
from commlib.errors import CheckpointMismatch, CommlibError, MissingDependency, PeerLost, PlanMismatch, ReplicasDiverged
from commlib.feedback import ErrorFeedback
from commlib.hook import HookState, hook
from commlib.local.elastic import ElasticAveraging
from commlib.local.steps import LocalSteps
from commlib.pace import RateLimit
from commlib.parameter_server import ParameterServer
from commlib.pipeline.hetpipe import HetPipe
from commlib.placement.place import place
from commlib.plan_file import Plan
from commlib.policy import Exact, Lossy
from commlib.registry import make
from commlib.route import Route
from commlib.servers import Servers
from commlib.sharded.step import ShardedStep
from commlib.stats import LayerStats, Stats
from commlib.stepwise import LowRank
from commlib.topology.topology import Topology

backends.register()

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
