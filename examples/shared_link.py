"""A training job beside a neighbour who sends as fast as he can; --limit leaves him the rest of the link.

commlib bench lab --hosts 2 --rate 200mbit -- python examples/shared_link.py --limit 50mbit
"""

import argparse
import gc
import os
import socket
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlib

parser = argparse.ArgumentParser()
parser.add_argument("--limit", help="of what each rank sends, as 50mbit [none]")
parser.add_argument("--seconds", type=float, default=8, help="to train beside the neighbour")
parser.add_argument("--alone", action="store_true", help="without the neighbour")
args = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))
ddp = DistributedDataParallel(model)
comm = commlib.attach(ddp, "none", limit=args.limit)
x = torch.randn(8, 512)


class Neighbour(threading.Thread):
    """Sends from this rank's host to the next one's over one connection."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0
        self.ended = threading.Event()
        listener = socket.create_server(("", 0))
        hosts: list[tuple[str, int]] = [("", 0)] * dist.get_world_size()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:  # which address leads to rank 0: nothing is sent
            s.connect((socket.gethostbyname(os.environ["MASTER_ADDR"]), 9))
            dist.all_gather_object(hosts, (s.getsockname()[0], listener.getsockname()[1]))
        self.out = socket.create_connection(hosts[(rank + 1) % len(hosts)])
        self.into, _ = listener.accept()
        listener.close()

    def run(self) -> None:
        threading.Thread(target=self._receive, daemon=True).start()
        while not self.ended.is_set():
            self.sent += self.out.send(bytes(1 << 16))
        self.out.shutdown(socket.SHUT_WR)

    def _receive(self) -> None:
        while self.into.recv(1 << 16):
            pass


neighbour = None if args.alone else Neighbour()
ddp(x).square().mean().backward()  # buckets and connections are made
dist.barrier()
if neighbour is not None:
    neighbour.start()
before, start, steps = comm.stats().wire_bytes, time.monotonic(), 0
go_on = torch.ones(1)
while bool(go_on):
    ddp(x).square().mean().backward()
    steps += 1
    go_on.fill_(time.monotonic() - start < args.seconds)
    dist.broadcast(go_on, 0)
seconds = time.monotonic() - start
ours = 8e-6 * (comm.stats().wire_bytes - before) / seconds
theirs = 0.0 if neighbour is None else 8e-6 * neighbour.sent / seconds
print(f"rank {rank}: {steps} steps in {seconds:.1f} s, job {ours:.1f} Mbit/s, neighbour {theirs:.1f} Mbit/s")
if neighbour is not None:
    neighbour.ended.set()
    neighbour.join()
dist.barrier()
comm.close()
del ddp  # Gloo threads must end before the interpreter does, or they may abort at exit (pytorch#179291)
gc.collect()
dist.destroy_process_group()
