"""The rank's side of :mod:`.launch`: run one job, report to the parent, end when the parent ends."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import time
import traceback
from multiprocessing.connection import Connection

import torch.distributed as dist

# What a rank runs: it watches its parent before it imports anything heavy.
BOOTSTRAP = """
import os, sys, threading
from multiprocessing.connection import Connection
link = Connection(int(sys.argv[1]))
def until_parent_ends():
    try:
        link.recv_bytes()
    except (EOFError, OSError):
        pass
    os._exit(1)
try:
    sys.path[:] = link.recv()
    job = link.recv_bytes()
except (EOFError, OSError):
    os._exit(1)
threading.Thread(target=until_parent_ends, daemon=True).start()
from commlib.bench.launch.child import serve
serve(link, job)
"""

_parent: Connection | None = None


def tell(message: object) -> bool:
    """Hand a message from inside a rank to the parent's ``on_message``; False if there is no such parent."""
    if _parent is None:
        return False
    _parent.send(("message", message))
    return True


def serve(link: Connection, job: bytes) -> None:
    """Run a pickled (function, arguments) and send back one result or one error, if the parent is still there."""
    global _parent
    _parent = link
    try:
        target, args = pickle.loads(job)
        result = pickle.dumps(target(*args))
    except BaseException as e:
        text = f"{type(e).__name__}: {e}"
        with contextlib.suppress(OSError):  # the parent has gone, and ends all ranks: this one may have lost another
            link.send(("error", (time.monotonic(), _pickled(e), text, traceback.format_exc())))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # sockets to the peers close only now: the error above came first
    link.send(("result", result))
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # No interpreter shutdown: a Gloo thread that frees a tensor in it aborts the process (pytorch#179291).
    os._exit(0)


def _pickled(error: BaseException) -> bytes | None:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return None  # its text must do
    return data
