"""Plain DDP training with compressed gradients: the line with ``commlib.attach`` is all that is new.

torchrun --nproc-per-node 2 examples/ddp_digits.py
"""

import gc

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlib

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)

digits = load_digits()
x = torch.tensor(digits.data, dtype=torch.float32) / 16
y = torch.tensor(digits.target)
test_x, test_y, x, y = x[1500:], y[1500:], x[:1500], y[:1500]

model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
ddp = DistributedDataParallel(model)
comm = commlib.attach(ddp, "onebit")
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)

for _epoch in range(10):
    for batch in torch.randperm(1500).split(32 * ranks)[:-1]:  # every rank draws the same order
        mine = batch[rank::ranks]
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x[mine]), y[mine]).backward()
        optimizer.step()

if rank == 0:
    with torch.no_grad():
        accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
    stats = comm.stats()
    fewer = stats.dense_bytes / stats.wire_bytes
    print(f"test accuracy {accuracy:.1%}; sent {fewer:.1f} times fewer bytes than plain DDP")
comm.close()
del ddp  # Gloo threads must end before the interpreter does, or they may abort at exit (pytorch#179291)
gc.collect()
dist.destroy_process_group()
