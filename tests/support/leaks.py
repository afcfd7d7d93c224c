"""What a process has at this moment that may be left behind: children, threads, listening sockets, memory."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
from pathlib import Path

from tests.support import forked_ranks
from tests.support.rank_pool import PIDS

_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")  # Python keeps them until it exits


def children() -> dict[object, str]:
    """Process id → command line of every child, forked ones too, but Python's own helpers; zombies count."""
    server = forked_ranks.server()
    found = {pid: line for pid, line in _children("self").items() if not any(h in line for h in _HELPERS)}
    if server is not None:
        found |= _children(server)  # their command line is the server's
    return {pid: f"{pid} ({line.strip() or 'zombie'})" for pid, line in found.items() if pid not in PIDS}


def _children(parent: int | str) -> dict[str, str]:
    found: dict[str, str] = {}
    for task in Path(f"/proc/{parent}/task").glob("*/children"):
        try:
            pids = task.read_text().split()
        except OSError:
            continue  # the thread has ended
        for pid in pids:
            with contextlib.suppress(OSError):  # the child has ended
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found


def descendants() -> list[str]:
    """Process ids of children, their children, and so on."""
    found, todo = [], list(_children("self"))
    while todo:
        found.append(todo.pop())
        todo += _children(found[-1])
    return found


def threads() -> dict[object, str]:
    """Every live non-daemon thread by identity."""
    return {t: t.name for t in threading.enumerate() if not t.daemon}


def listeners() -> dict[object, str]:
    """Inode → address of every socket that this process has open and that listens."""
    found: dict[object, str] = {}
    for path in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):  # closed meanwhile, as the descriptor of this very listing is
            if (name := os.readlink(path)).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as s:
                    if s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found[name] = _address(s)
    return found


def _address(s: socket.socket) -> str:
    address = s.getsockname()
    return f"unix {address or 'unnamed'}" if s.family == socket.AF_UNIX else f"tcp port {address[1]}"


def resident() -> int:
    """Bytes of this process's resident memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
