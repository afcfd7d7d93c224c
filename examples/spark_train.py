"""Training inside Spark: SparkNet's loop, and DDP with compressed gradients, beside one process with the same data.

make spark                                      # sets up what it takes (Java is yours to install), and runs its test
build/spark/bin/python examples/spark_train.py  # on this machine; with --master elsewhere, or by spark-submit

The data is a DataFrame, written as Parquet in as many partitions as there are ranks. TorchDistributor starts a barrier
stage, of which each task is a rank: it reads its own partition, and sees no other's rows. Elsewhere than on one machine
--folder is on a disk that all see. Rows go round by round, so that every partition has all classes.

SparkNet (Moritz et al., ICLR 2016): ranks train by themselves, and after every --tau steps all go on from the mean of
their values. Momentum stays each one's own.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pyarrow.parquet import read_table
from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commlib

BATCH = 32  # of a rank


def write(spark: SparkSession, folder: Path, ranks: int) -> None:
    """The digits: ``train`` in as many partitions as there are ranks, and ``test``."""
    digits = load_digits()
    rows = [(x.tolist(), int(y)) for x, y in zip(digits.data, digits.target, strict=True)]
    train, test = spark.createDataFrame(rows, "pixels array<float>, label int").randomSplit([0.8, 0.2], seed=0)
    train.repartition(ranks).write.mode("overwrite").parquet(str(folder / "train"))
    test.coalesce(1).write.mode("overwrite").parquet(str(folder / "test"))


def read(folder: Path, part: slice = slice(None)) -> tuple[Tensor, Tensor]:
    """Pixels (rows, 64) and labels (rows,) of these partitions."""
    files = sorted(folder.glob("part-*.parquet"))
    if not files[part]:
        raise FileNotFoundError(
            f"{folder} has {len(files)} partitions, and none for {part}: all ranks must see the folder"
        )
    tables = [read_table(file) for file in files[part]]
    x = [row for table in tables for row in table["pixels"].to_pylist()]
    return torch.tensor(x) / 16, torch.tensor([label for table in tables for label in table["label"].to_pylist()])


def network() -> nn.Module:
    """The same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def fit(model: nn.Module, data: tuple[Tensor, Tensor], steps: int, batch: int, seed: int, after: Any = None) -> None:
    """A plain loop over shuffled rows; ``after`` each step something may be done."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    drawn, (x, y) = torch.Generator().manual_seed(seed), data
    order = torch.empty(0, dtype=torch.int64)
    for _ in range(steps):
        if len(order) < batch:
            order = torch.randperm(len(x), generator=drawn)
        mine, order = order[:batch], order[batch:]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
        optimizer.step()
        if after is not None:
            after()


@torch.no_grad()
def judge(model: nn.Module, folder: Path) -> dict[str, Any]:
    """Loss and accuracy on the test set."""
    x, y = read(folder / "test")
    found = model(x)
    accuracy = (found.argmax(1) == y).float().mean().item()
    return {"loss": nn.functional.cross_entropy(found, y).item(), "accuracy": accuracy}


def sparknet(folder: str, steps: int, tau: int) -> dict[str, Any]:
    """In a task: what rank 0 returns comes back to the driver."""
    model = begin()
    local = commlib.LocalSteps(model, "average", tau=tau)
    fit(model, mine(folder), steps, BATCH, seed=dist.get_rank(), after=local.step)
    local.close()  # the last meeting: all have the mean
    found = {**judge(model, Path(folder)), "bytes": local.bytes_sent, "equal": equal(model)}
    dist.destroy_process_group()
    return found


def compressed(folder: str, steps: int, codec: str) -> dict[str, Any]:
    """The same, with an exchange of gradients in every step."""
    model = begin()
    ddp = DistributedDataParallel(model)
    comm = commlib.attach(ddp, codec)
    fit(ddp, mine(folder), steps, BATCH, seed=dist.get_rank())
    found = {**judge(model, Path(folder)), "bytes": comm.stats().wire_bytes, "equal": equal(model)}
    comm.close()
    del ddp  # Gloo threads must end before the interpreter does, or they may abort at exit (pytorch#179291)
    gc.collect()
    dist.destroy_process_group()
    return found


def begin() -> nn.Module:
    """TorchDistributor has said by the environment who is who."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return network()


def mine(folder: str) -> tuple[Tensor, Tensor]:
    """This rank's partition."""
    return read(Path(folder) / "train", slice(dist.get_rank(), None, dist.get_world_size()))


def equal(model: nn.Module) -> bool:
    """Whether all ranks have the same bits."""
    values = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    every = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(every, values)
    return all(torch.equal(values, other) for other in every)


def main() -> None:
    parser = argparse.ArgumentParser(description="SparkNet's loop and compressed DDP inside Spark, beside one process.")
    parser.add_argument("--master", help="of Spark [local[RANKS], where spark-submit names none]")
    parser.add_argument("--ranks", type=int, default=2, help="tasks that train at once [2]")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tau", type=int, default=25, help="local steps between two meetings [25]")
    parser.add_argument("--codec", default="onebit", help="of DDP's gradients [onebit]")
    parser.add_argument("--folder", type=Path, help="for the data, seen by all [a temporary one]")
    parser.add_argument("--json", action="store_true", help="the results as one line of JSON, the last")
    args = parser.parse_args()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # tasks have what this process has
    builder = SparkSession.builder.appName("commlib").config("spark.ui.enabled", "false")
    spark = builder.config("spark.master", args.master or f"local[{args.ranks}]").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    results = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        write(spark, folder, args.ranks)
        model = network()
        fit(model, read(folder / "train"), args.steps, BATCH * args.ranks, seed=0)
        results["one process"] = judge(model, folder)
        spread = TorchDistributor(num_processes=args.ranks, local_mode=False, use_gpu=False)
        results[f"SparkNet, {args.tau}"] = spread.run(sparknet, str(folder), args.steps, args.tau)
        results[f"DDP, {args.codec}"] = spread.run(compressed, str(folder), args.steps, args.codec)
    spark.stop()
    if args.json:
        print(json.dumps(results))
        return
    print(f"{args.ranks} ranks, {args.steps} steps of {BATCH} rows each; bytes are those that rank 0 sent")
    for name, found in results.items():
        sent = (
            f"{found['bytes']:>12,} bytes, replicas {'equal' if found['equal'] else 'DIFFER'}"
            if "bytes" in found
            else ""
        )
        print(f"{name:16} loss {found['loss']:.3f}, accuracy {found['accuracy']:.1%} {sent}")


if __name__ == "__main__":
    main()
