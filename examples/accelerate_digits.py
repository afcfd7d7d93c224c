"""Accelerate with compressed gradients: one line after ``prepare``. With --resume, on from the last checkpoint.

torchrun --nproc-per-node 2 examples/accelerate_digits.py --comm onebit
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import commlib.integrations.accelerate

parser = argparse.ArgumentParser()
parser.add_argument("--comm", default="onebit", help="what commlib.attach takes; none: as plain DDP")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--folder", type=Path, default=Path("runs/accelerate"), help="of the checkpoint")
parser.add_argument("--resume", action="store_true", help="from it")
args = parser.parse_args()

digits = load_digits()
x = torch.tensor(digits.data, dtype=torch.float32) / 16
y = torch.tensor(digits.target)
order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
(x, test_x), (y, test_y) = x[order].split([1500, 297]), y[order].split([1500, 297])

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, drop_last=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
comm = commlib.integrations.accelerate.attach(accelerator, model, args.comm)
if args.resume:
    accelerator.load_state(str(args.folder))

for _epoch in range(args.epochs):
    for inputs, labels in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
        optimizer.step()
accelerator.save_state(str(args.folder))  # on all processes

if accelerator.is_main_process:
    with torch.no_grad():
        accuracy = (accelerator.unwrap_model(model)(test_x).argmax(1) == test_y).float().mean().item()
    stats = comm.stats()
    fewer = stats.dense_bytes / stats.wire_bytes
    print(f"{stats.steps} steps, test accuracy {accuracy:.1%}; sent {fewer:.1f} times fewer bytes than plain DDP")
comm.close()
accelerator.end_training()
