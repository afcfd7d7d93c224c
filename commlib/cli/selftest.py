"""Whether two processes on this machine can all-reduce: the smallest thing that must work."""

from __future__ import annotations

import multiprocessing as mp
import tempfile
import time
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TypedDict

import torch
import torch.distributed as dist


class SelfTest(TypedDict):
    """How it went; ``detail`` says why it did not."""

    ok: bool
    seconds: float
    detail: str


def all_reduce_between_two(deadline: float) -> SelfTest:
    """All-reduce eight values between two spawned Gloo processes; none outlives the call.

    They meet through a file, so no port is taken but Gloo's own.

    Args:
        deadline: seconds for everything, the start of the processes included.
    """
    began = time.monotonic()
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        meeting = (Path(folder) / "meeting").as_uri()
        ends = [context.Pipe(duplex=False) for _ in range(2)]
        processes = [
            context.Process(target=_rank, args=(rank, meeting, deadline, sender), daemon=True)
            for rank, (_, sender) in enumerate(ends)
        ]
        try:
            for process, (_, sender) in zip(processes, ends, strict=True):
                process.start()
                sender.close()  # the child has it: if it dies, our end reads end-of-file
            troubles = _answers([receiver for receiver, _ in ends], began + deadline, deadline)
        finally:
            for process, (receiver, _) in zip(processes, ends, strict=True):
                receiver.close()
                if process.pid is not None:
                    process.kill()
                    process.join()
    detail = "; ".join(f"rank {r}: {t}" for r, t in enumerate(troubles) if t)
    return {"ok": not detail, "seconds": round(time.monotonic() - began, 3), "detail": detail}


def _answers(receivers: list[Connection], end: float, deadline: float) -> list[str]:
    """What each rank says is wrong ("" is nothing)."""
    troubles = dict.fromkeys(receivers, f"no answer within {deadline:g} s")
    waiting = set(receivers)
    while waiting and (left := end - time.monotonic()) > 0:
        for ready in wait(list(waiting), timeout=left):
            receiver = next(r for r in receivers if r is ready)
            try:
                troubles[receiver] = receiver.recv()
            except EOFError:
                troubles[receiver] = "the process died without a word"
            waiting.discard(receiver)
    return [troubles[r] for r in receivers]


def _rank(rank: int, meeting: str, deadline: float, answer: Connection) -> None:
    """One of the two processes."""
    try:
        torch.set_num_threads(1)
        timeout = timedelta(seconds=deadline)
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=timeout)
        x = torch.full((8,), float(rank + 1))
        dist.all_reduce(x)
        wrong = bool((x != 3.0).any())
        answer.send(f"1 + 2 gave {x.tolist()}" if wrong else "")
        dist.destroy_process_group()
    except Exception as e:  # whatever it is, the parent reports it
        answer.send(f"{type(e).__name__}: {e}")
