"""Ranks that run to the end of a script: forked from a process that has imported PyTorch, with an interpreter's end."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable


def run(size: int, script: Callable[[int], object]) -> list[int] | None:
    """How each rank ended, as ``os.waitstatus_to_exitcode`` has it.

    Args:
        size: how many ranks; ``init_process_group`` finds what it needs in their environment.
        script: called in each, with its number.

    Returns:
        None in a rank, whose script is over: its process has to come to its end.
    """
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    pids = []
    for rank in range(size):
        if (pid := os.fork()) == 0:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            script(rank)
            return None
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
