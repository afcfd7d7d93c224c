"""DDP training that survives killed workers: torchrun starts all of them again, and they go on bit for bit.

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
torchrun --nnodes 1 --nproc-per-node 2 --max-restarts 3 examples/elastic.py runs/elastic --kill 1@70 --kill 0@140

When a worker dies, torchrun ends the others and starts the script anew on all ranks, at most --max-restarts times.
--kill RANK@STEP shows it: in this step the rank kills itself (SIGKILL), the first one in the first attempt, and so on.

Why the export: torchrun keeps one store for all attempts, and in PyTorch 2.13 nothing tells the keys of one from those
of another: ranks find addresses of dead ones (as in pytorch#135712). With it each attempt has a store of its own.

A checkpoint is a folder with a file of each rank, whose residuals are its own. It counts once all have written, when
rank 0 names it in ``latest``::

    FOLDER/latest             step-000060-of-2
           step-000060-of-2/  rank-0.pt  rank-1.pt

Whoever dies before that leaves the one before in force. On several machines FOLDER is on a disk that all see.
Without any restart, and without the steps since a checkpoint: docs/server.md.
"""

import argparse
import gc
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlib

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path, help="of checkpoints; one that is there is gone on from")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
parser.add_argument("--codec", default="onebit")
parser.add_argument("--kill", action="append", default=[], metavar="RANK@STEP", help="one for each attempt")
args = parser.parse_args()

if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
    sys.exit("export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun: see the first lines of this script")
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)

x = torch.randn(4096, 64)
y = (x @ torch.randn(64, 10)).argmax(1)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
ddp = DistributedDataParallel(model)
comm = commlib.attach(ddp, args.codec)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "comm": comm}


def save(step: int) -> None:
    """After so many steps. A name is given to what is whole, here and in ``latest``."""
    folder = args.folder / f"step-{step:06d}-of-{ranks}"
    folder.mkdir(parents=True, exist_ok=True)
    mine = folder / f"rank-{rank}.pt"
    torch.save({name: part.state_dict() for name, part in parts.items()}, mine.with_suffix(".new"))
    mine.with_suffix(".new").replace(mine)
    dist.barrier()  # all have written
    if rank == 0:
        (args.folder / "latest.new").write_text(folder.name)
        (args.folder / "latest.new").replace(args.folder / "latest")
        for old in args.folder.glob("step-*"):
            if old != folder:
                shutil.rmtree(old)
    dist.barrier()  # none goes on, and dies, before it counts


def load() -> int:
    """Steps done by the newest checkpoint; rank 0 says which that is."""
    latest = args.folder / "latest"
    chosen = [latest.read_text() if rank == 0 and latest.exists() else None]
    dist.broadcast_object_list(chosen)
    if chosen[0] is None:
        return 0
    _, step, _, saved = chosen[0].split("-")
    files = [args.folder / chosen[0] / f"rank-{r}.pt" for r in range(int(saved))]
    if len(files) == ranks:
        state = torch.load(files[rank])
    else:  # fewer ranks, or more, as with --nnodes 1:4: residuals of all, for each to take its part
        every = [torch.load(file) for file in files]
        state = {**every[0], "comm": commlib.merge_state_dicts([each["comm"] for each in every])}
    for name, part in parts.items():
        part.load_state_dict(state[name])
    return int(step)


def batch(step: int) -> torch.Tensor:
    """This rank's examples of a step: they follow from its number, so a step that is done again is the same."""
    drawn = torch.randperm(len(x), generator=torch.Generator().manual_seed(step))
    return drawn[: 32 * ranks][rank::ranks]


attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
kill = args.kill[attempt] if attempt < len(args.kill) else None
begin = load()
if rank == 0:
    print(f"attempt {attempt}: begins after step {begin}", flush=True)
loss = torch.zeros(())
for step in range(begin + 1, args.steps + 1):
    chosen = batch(step)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(ddp(x[chosen]), y[chosen])
    loss.backward()
    if kill == f"{rank}@{step}":
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    if step % args.every == 0 or step == args.steps:
        save(step)
if rank == 0:
    print(f"attempt {attempt}: {args.steps} steps are done, loss {loss.item():.4f}", flush=True)
comm.close()
del ddp  # Gloo threads must end before the interpreter does, or they may abort at exit (pytorch#179291)
gc.collect()
dist.destroy_process_group()
