"""What ``fully_shard`` is called on before the root: what communicates together under FSDP2."""

from __future__ import annotations

from typing import Any

from torch import nn

LEAST = 10_000  # values: a smaller member of a sequence is left to the root, one message for each would cost more


def units(module: nn.Module) -> list[str]:
    """Names of the modules to shard by themselves: the large members of the outermost sequences, blocks or layers.

    What lies inside of one belongs to it; everything else (embeddings, norms, small layers) is the root's.
    """
    found = []
    for name, child in module.named_children():
        if isinstance(module, nn.Sequential | nn.ModuleList) and sum(p.numel() for p in child.parameters()) >= LEAST:
            found.append(name)
        else:
            found += [f"{name}.{inner}" for inner in units(child)]
    return found


def shard(module: nn.Module, group: Any) -> None:
    """``fully_shard`` on every unit, then on the root, over a process group. Collective.

    The parameters are others afterwards (DTensors): an optimizer has to be made anew.

    Args:
        module: the same on all ranks, with equal weights.
        group: whose ranks share the parameters out.

    Raises:
        ImportError: this PyTorch has no FSDP2.
    """
    from torch.distributed.device_mesh import DeviceMesh  # not before: FSDP2 takes a while to import
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, next(module.parameters()).device.type)
    for name in units(module):
        fully_shard(module.get_submodule(name), mesh=mesh)
    fully_shard(module, mesh=mesh)
