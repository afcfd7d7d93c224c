"""FSDP2 training of a small language model, with gradients and parameters compressed: one line is new.

torchrun --nproc-per-node 2 examples/fsdp_text.py none onebit int8 int4 onebit+int8

Each word is a run with the same batches: a codec for gradients, and after a plus one for the parameters.
"""

import argparse
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import commlib

WINDOW, BATCH, WIDTH, DEPTH = 64, 16, 128, 2

text = "\n".join(topics[name] for name in sorted(topics))  # Python's own help, about 460,000 characters
alphabet = {c: i for i, c in enumerate(sorted(set(text)))}
codes = torch.tensor([alphabet[c] for c in text])
train, test = codes[: len(codes) * 9 // 10], codes[len(codes) * 9 // 10 :]


class Model(nn.Module):
    """Characters (batch, time) → logits of the character that follows each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(len(alphabet), WIDTH), nn.Embedding(WINDOW, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, DEPTH, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, len(alphabet))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(WINDOW)
        hidden = self.blocks(self.embed(x) + self.place(torch.arange(WINDOW)), mask=mask, is_causal=True)
        logits: torch.Tensor = self.out(hidden)
        return logits


def loss_of(model: nn.Module, data: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    x = torch.stack([data[i : i + WINDOW] for i in starts])
    y = torch.stack([data[i + 1 : i + WINDOW + 1] for i in starts])
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def run(rules: str, steps: int, warm_up: int) -> tuple[float, float, float]:
    """(test loss, how many times fewer bytes of gradients, and of parameters)"""
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks.layers:
        fully_shard(block)
    fully_shard(model)
    gradients, _, parameters = rules.partition("+")
    comm = commlib.attach(model, gradients, parameters=parameters or None, dense_steps=warm_up)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    drawn = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(steps):
        starts = torch.randint(len(train) - WINDOW - 1, (BATCH,), generator=drawn)
        optimizer.zero_grad()
        loss_of(model, train, starts).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        loss = loss_of(model, test, torch.arange(0, len(test) - WINDOW - 1, WINDOW)).item()
    fewer = [s.ratio if s.wire_bytes else 1.0 for s in (comm.stats(), comm.parameter_stats())]
    comm.detach()
    return loss, fewer[0], fewer[1]


def main() -> None:
    """All runs, one after another."""
    parser = argparse.ArgumentParser()
    parser.add_argument("rules", nargs="*", default=["none", "onebit", "int8"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warm-up", type=int, default=0, help="uncompressed steps in the beginning")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    first = None
    for rules in given.rules:
        loss, gradients, parameters = run(rules, given.steps, given.warm_up)
        first = first or loss
        if dist.get_rank() == 0:
            beside = f"{(loss / first - 1) * 100:+.2f} % of the first"
            fewer = f"{gradients:.1f} x fewer bytes of gradients, {parameters:.1f} of parameters"
            print(f"{rules:>12}: test loss {loss:.4f} ({beside}); {fewer}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
