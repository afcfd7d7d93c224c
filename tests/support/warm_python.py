"""Python for programs of tests, forked from a process that has imported PyTorch: it starts in 50 ms, not in 3 s.

Whatever a test starts as ``python …``, ``commlib …`` or ``torchrun …``, and whatever that starts, is a new Python
first, which hands its words, environment, folder, files, cores and network over to a server and waits
(tests/support/warm/sitecustomize.py). The server forks; the child is the program, and dies with who was started.

A test asks for it by the fixture ``warm_python``; one whose subject is how Python starts, is stopped or ends does not:
here PyTorch and commlib are imported already, options that change the interpreter do not count, the process id is not
that of who was started, SIGSTOP does not come through, and modules are not taken down at the end. On an emulated host a
program has the host's network and cores, but this machine's /sys.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import fcntl
import io
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NoReturn

import torch

from commlib.bench.launch import processes
from commlib.server.worker import embedded
from tests.support import forked_ranks
from tests.support.rank_pool import PIDS

FOLDER = Path(__file__).with_name("warm")
_F_SETSIG = 10  # of Linux
_CLONE_NEWNET = 0x40000000
_servers: list[forked_ranks.Forked] = []


class WarmPopen(subprocess.Popen[Any]):
    """``subprocess.Popen``, whose processes, and those that they start, are forked where they are Python."""

    def __init__(self, args: Any, **options: Any) -> None:
        own = dict(options.pop("env", None) or os.environ)
        paths = [str(FOLDER), *filter(None, [own.get("PYTHONPATH")])]
        user = os.stat("/proc/self/ns/user").st_ino
        warm = {"PYTHONPATH": os.pathsep.join(paths), "WARM_PYTHON": f"{server()}:{user}"}
        super().__init__(args, env={**own, **warm}, **options)


def server() -> str:
    """Where the server listens; it is started if there is none, and ends with this process."""
    place = os.path.join(tempfile.gettempdir(), f"warm-{os.getpid()}")
    if not _servers:
        _servers.append(forked_ranks.Forked(_serve, (place, os.getpid()), {"OMP_NUM_THREADS": "1", **os.environ}))
        PIDS.add(str(_servers[0].pid))
        while not os.path.exists(place):
            assert _servers[0].poll() is None, forked_ranks.printed()
            time.sleep(0.01)
    return place


def _serve(place: str, user: int) -> None:
    """Fork programs until the process that wants them ends.

    That is not its parent, the server that it was forked by, which lives as long as any that it has forked.
    """
    ends = os.pidfd_open(user)
    running: dict[int, tuple[int, socket.socket]] = {}  # pidfd → process id, who waits for it
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{place}.new")
        listener.listen(64)
        os.rename(f"{place}.new", place)
        while True:
            ready = select.select([listener.fileno(), ends, *running], [], [])[0]
            if ends in ready:
                return
            for fd in ready:
                if fd in running:
                    pid, waits = running.pop(fd)
                    os.close(fd)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    with contextlib.suppress(OSError), waits:
                        waits.sendall(code.to_bytes(8, "little", signed=True))
                    continue
                client, _ = listener.accept()
                pid = os.fork()
                if pid == 0:
                    listener.close()
                    _run(client)
                running[os.pidfd_open(pid)] = pid, client


def _run(client: socket.socket) -> NoReturn:
    """Be the program that somebody who has connected asks for, to its end."""
    code = 1
    try:
        about = _become(client)
        code = _exit_code(about["program"], safe=about["safe"])
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _become(client: socket.socket) -> dict[str, Any]:
    """Take over files, network, cores, folder and environment; from here on this process dies with the client."""
    head, fds, _, _ = socket.recv_fds(client, 8, 64)
    said = b""
    while len(said) < int.from_bytes(head, "little"):
        said += client.recv(1 << 16)
    about: dict[str, Any] = json.loads(said)
    os.setsid()
    conn = fcntl.fcntl(client.fileno(), fcntl.F_DUPFD, 1000)
    fcntl.fcntl(conn, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(conn, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(conn, fcntl.F_SETFL, os.O_ASYNC)

    network, *files = [fcntl.fcntl(fd, fcntl.F_DUPFD, 1000) for fd in fds]
    here = os.path.samestat(os.fstat(network), os.stat("/proc/self/ns/net"))
    if not here and ctypes.CDLL(None, use_errno=True).setns(network, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "cannot enter the network of who started this")
    wanted = dict(zip(about["fds"], files, strict=True))
    client.detach()
    os.closerange(3, 1000)  # what was the server's
    resource_tracker._resource_tracker._fd = resource_tracker._resource_tracker._pid = None  # type: ignore[attr-defined]
    for number, file in wanted.items():
        os.dup2(file, number)
        os.close(file)
    os.close(network)

    os.sched_setaffinity(0, about["cores"])
    os.sched_setscheduler(0, about["policy"], os.sched_param(0))
    os.umask(about["umask"])
    os.chdir(about["folder"])
    os.environ.clear()
    os.environ.update(about["env"])
    embedded.start, processes.start = _ANEW
    for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(each, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed()
    sys.stdin = io.TextIOWrapper(
        io.BufferedReader(io.FileIO(0, closefd=False))
    )  # multiprocessing has put another there
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", len(about["cores"]))))
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=stream.isatty() or stream is sys.stderr, write_through=about["unbuffered"])
    os.write(conn, os.getpid().to_bytes(8, "little"))  # from here on it takes signals
    return about


def _exit_code(words: Sequence[str], *, safe: bool) -> int:
    """Be ``python WORDS``; what it exits with."""
    kind, *rest = words
    first = {"-m": os.getcwd(), "-c": ""}.get(kind) or str(Path(kind).resolve().parent)
    first = "" if kind == "-c" else first
    more = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    sys.path[:] = [*([] if safe else [first]), *more, *_BASE]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __spec__=None)
    sys.argv = ["-m", *rest[1:]] if kind == "-m" else ["-c", *rest[1:]] if kind == "-c" else list(words)
    try:
        if kind == "-m":
            runpy._run_module_as_main(rest[0], alter_argv=True)  # type: ignore[attr-defined]
        elif kind == "-c":
            exec(compile(rest[0], "<string>", "exec"), main.__dict__)
        else:
            main.__dict__["__file__"] = kind
            exec(compile(Path(kind).read_bytes(), kind, "exec"), main.__dict__)
    except SystemExit as e:
        if e.code is not None and not isinstance(e.code, int):
            print(e.code, file=sys.stderr)
            return 1
        return e.code or 0
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as e:
        sys.last_value = e.with_traceback(e.__traceback__ and e.__traceback__.tb_next)  # as if it had begun there
        sys.excepthook(type(e), e, e.__traceback__)
        return 1
    return 0


_ANEW = embedded.start, processes.start
_BASE = [p for p in sys.path if p.startswith((sys.prefix, sys.base_prefix))]
