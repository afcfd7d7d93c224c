"""A codec of your own in twenty lines: one byte a value, as float8, scaled by the largest.

torchrun --nproc-per-node 2 examples/own_codec.py

Error feedback, the exchange between ranks and checkpoints come for free. To use it by name, as in
``commlib train --comm float8``, list it in your package's entry points under ``commlib.compressors``.
"""

import dataclasses
import gc

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commlib


@dataclasses.dataclass(frozen=True)
class Float8(commlib.Compressor):
    """Payload: the largest magnitude (float32), then one float8 (e5m2) a value, relative to it."""

    name = "float8"

    def nbytes(self, spec: commlib.LayerSpec) -> int:
        return 4 + spec.numel

    def encode(self, x: Tensor, payload: Tensor, *, memory: commlib.Memory, seed: int) -> None:
        largest = torch.cat([x.view(-1).abs(), x.new_full((1,), 1e-30)]).amax()  # also for an empty layer; a NaN stays
        payload[:4].view(torch.float32).copy_(largest)
        payload[4:].copy_((x.view(-1) / largest).to(torch.float8_e5m2).view(torch.uint8))

    def decode(self, payload: Tensor, out: Tensor, *, add: bool, scale: float, seed: int) -> None:
        largest = payload[:4].view(torch.float32)
        values = payload[4:].view(torch.float8_e5m2).float() * (largest * scale)
        out.view(-1).copy_(values + out.view(-1) if add else values)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(256, 256))
    comm = commlib.attach(ddp, Float8())
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    x, wanted = torch.randn(128, 256), torch.randn(256, 256) / 16
    for step in range(101):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x), x @ wanted)
        loss.backward()
        optimizer.step()
        if step % 50 == 0 and dist.get_rank() == 0:
            print(f"step {step:3}: loss {loss.item():.4f}")
    if dist.get_rank() == 0:
        stats = comm.stats()
        print(f"sent {stats.dense_bytes / stats.wire_bytes:.1f} times fewer bytes than plain DDP")
    comm.close()
    del ddp  # Gloo threads must end before the interpreter does, or they may abort at exit (pytorch#179291)
    gc.collect()
    dist.destroy_process_group()
