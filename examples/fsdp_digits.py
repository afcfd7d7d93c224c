"""FSDP2 on scikit-learn's digits: the line with ``commlib.attach`` is all that is new.

torchrun --nproc-per-node 2 examples/fsdp_digits.py none onebit int4 int8 onebit+int8

Each word is a run: a codec for gradients, and after a plus one for the parameters.
"""

import argparse
import statistics

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard

import commlib

digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)


def run(rules: str, seed: int, steps: int, warm_up: int, constant: bool) -> tuple[float, float, float, float]:
    """(training loss, test loss, how many times fewer bytes of gradients, and of parameters)"""
    torch.manual_seed(seed)
    train, test = torch.randperm(len(x)).split([1437, 360])
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    fully_shard(model[2])
    fully_shard(model)
    gradients, _, parameters = rules.partition("+")
    comm = commlib.attach(model, gradients, parameters=parameters or None, dense_steps=warm_up)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=0.05 if constant else 0.0)
    drawn = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    for _ in range(steps):
        batch = train[torch.randint(len(train), (32,), generator=drawn)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(model(x[part]), y[part]).item() for part in (train, test)]
    fewer = [s.ratio if s.wire_bytes else 1.0 for s in (comm.stats(), comm.parameter_stats())]
    comm.detach()
    return losses[0], losses[1], fewer[0], fewer[1]


def main() -> None:
    """All runs, one after another."""
    parser = argparse.ArgumentParser()
    parser.add_argument("rules", nargs="*", default=["none", "onebit"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warm-up", type=int, default=0, help="uncompressed steps in the beginning")
    parser.add_argument("--constant", action="store_true", help="a learning rate that does not fall")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    for rules in given.rules:
        runs = [run(rules, seed, given.steps, given.warm_up, given.constant) for seed in range(given.seeds)]
        train, test, gradients, parameters = map(statistics.mean, zip(*runs, strict=True))
        if dist.get_rank() == 0:
            fewer = f"{gradients:.1f} x fewer bytes of gradients, {parameters:.1f} x of parameters"
            print(f"{rules:>12}: training loss {train:.4f}, test loss {test:.4f}; {fewer}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
