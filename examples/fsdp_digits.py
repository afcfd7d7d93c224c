"""FSDP2 on scikit-learn's digits: the line with ``commlib.attach`` is all that is new.

torchrun --nproc-per-node 2 examples/fsdp_digits.py none onebit int4 int8 onebit+int8

Each word is a run: a codec for gradients, and after a plus one for the parameters. A number before them: of seeds.
"""

import statistics
import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard

import commlib

STEPS, WARM_UP = 300, 45
digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)


def run(rules: str, seed: int) -> tuple[float, float, float, float]:
    """(training loss, test loss, how many times fewer bytes of gradients, and of parameters)"""
    torch.manual_seed(seed)
    train, test = torch.randperm(len(x)).split([1437, 360])
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    fully_shard(model[2])
    fully_shard(model)
    gradients, _, parameters = rules.partition("+")
    comm = commlib.attach(model, gradients, parameters=parameters or None, dense_steps=WARM_UP)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    drawn = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    for _ in range(STEPS):
        batch = train[torch.randint(len(train), (32,), generator=drawn)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(model(x[part]), y[part]).item() for part in (train, test)]
    fewer = [s.ratio if s.wire_bytes else 1.0 for s in (comm.stats(), comm.parameter_stats())]
    comm.detach()
    return losses[0], losses[1], fewer[0], fewer[1]


def main() -> None:
    """All runs, one after another."""
    dist.init_process_group("gloo")
    words = sys.argv[1:] or ["none", "onebit"]
    seeds = int(words.pop(0)) if words[0].isdigit() else 1
    for rules in words:
        train, test, gradients, parameters = map(
            statistics.mean, zip(*(run(rules, s) for s in range(seeds)), strict=True)
        )
        if dist.get_rank() == 0:
            fewer = f"{gradients:.1f} x fewer bytes of gradients, {parameters:.1f} x of parameters"
            print(f"{rules:>12}: training loss {train:.4f}, test loss {test:.4f}; {fewer}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
