"""Lightning with compressed gradients: the strategy is all that is new. With --resume, on from the last checkpoint.

torchrun --nproc-per-node 2 examples/lightning_digits.py --comm onebit
"""

import argparse
from pathlib import Path

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import commlib.integrations.lightning

parser = argparse.ArgumentParser()
parser.add_argument("--comm", default="onebit", help="what commlib.attach takes; none: as plain DDP")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--folder", type=Path, default=Path("runs/lightning"), help="of the checkpoint last.ckpt")
parser.add_argument("--resume", action="store_true", help="from it")
args = parser.parse_args()


class Digits(pl.LightningModule):
    """A perceptron of 301,066 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


digits = load_digits()
x = torch.tensor(digits.data, dtype=torch.float32) / 16
y = torch.tensor(digits.target)
order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
(x, test_x), (y, test_y) = x[order].split([1500, 297]), y[order].split([1500, 297])

pl.seed_everything(0, verbose=False)
strategy = commlib.integrations.lightning.DDPStrategy(args.comm)
trainer = pl.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=strategy,
    max_epochs=args.epochs,
    callbacks=[pl.callbacks.ModelCheckpoint(args.folder, save_last=True, save_top_k=0)],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = Digits()
loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, drop_last=True)
trainer.fit(model, loader, ckpt_path=args.folder / "last.ckpt" if args.resume else None)

if trainer.is_global_zero and strategy.comm is not None:
    with torch.no_grad():
        accuracy = (model.net(test_x).argmax(1) == test_y).float().mean().item()
    stats = strategy.comm.stats()
    fewer = stats.dense_bytes / stats.wire_bytes
    print(f"{stats.steps} steps, test accuracy {accuracy:.1%}; sent {fewer:.1f} times fewer bytes than plain DDP")
