"""Messages of a parameter server to test with, at least one of each kind."""

from __future__ import annotations

from typing import Any

import torch

from commlib.codecs.filter import Content
from commlib.server.job.consistency import BSP
from commlib.server.protocol.messages import (
    Ack,
    Adopt,
    Agreed,
    Applied,
    Complaint,
    Keys,
    Message,
    Moved,
    Observe,
    Pull,
    Push,
    Replicate,
    Replicated,
    Start,
    Unknown,
    Values,
)
from commlib.server.shard.chunk_state import ChunkState


def state(kind: type[torch.optim.Optimizer]) -> dict[str, Any]:
    made: Any = kind
    cell = ChunkState(torch.arange(3.0), lambda p: made(p, lr=0.1), range(2), BSP().threshold())
    for worker in range(2):
        cell.push(worker, 0, torch.ones(3))
    return cell.state_dict()


MESSAGES: list[Message] = [
    Push(1, "w[0:3]", 2, 7, torch.arange(3.0)),
    Push(1, "w[0:0]", 2, 7, torch.empty(0)),
    Push(1, "w", 2, 7, torch.arange(3).bfloat16()),
    Ack(0, "w", 1, 2),
    Ack(0, "w", 1, 2, True),
    Start(0, "w", torch.tensor([2.0])),
    Push(3, "w", 1, 0, None, {"lr": 0.1, "betas": [0.9, 0.99]}, frozenset({0, 2})),
    Pull(3, "ü[0:1]", 1, (1 << 63) - 1),
    Pull(3, "w", 1, 4, 0),
    Values(3, "w", 1, 4, torch.tensor([1.0, torch.nan]), {0: 3, 5: 1}),
    Values(3, "w", 1, 4, torch.tensor([1.0], dtype=torch.float64), {}),
    Replicate(3, "w", Applied(4, {0: 1, 1: 1}, torch.ones(2), frozenset({1}))),
    Replicate(3, "w", Applied(4, {0: 1}, None, frozenset({0}))),
    Replicated(3, "w", 5, "shard 1"),
    Push(1, "w", 2, 7, Content(None, torch.arange(5, dtype=torch.uint8))),
    Push(1, "w", 2, 7, Content(torch.tensor([1, 8]), torch.tensor([0.5, 2.0]), (None, b"ab", [1, 2.5]))),
    Values(3, "w", 1, 4, Content(torch.empty(0, dtype=torch.int64), torch.empty(0), (True,)), {0: 3}, None, 7, 8),
    Unknown(3, "w", 1, b"abc"),
    Keys(3, "w", 1, b"abc", torch.tensor([0, 5])),
    Moved(3, "w[0:2]@0", 1, 7, torch.tensor([0.5, -2.0]), 8),
    Moved(3, "w[0:2]@0", 1, 8, torch.zeros(2, dtype=torch.float64), 9, 9),
    Agreed(3, "w[0:2]@1", 7, 8, torch.tensor([1.0, 3.0])),
    Complaint(0, "its model is another"),
    Observe(3, 1, 0.5),
    Adopt(3, "w", state(torch.optim.SGD)),
    Adopt(3, "w", state(torch.optim.AdamW)),
]
