"""Python, at its start, hands its program over to a process that has imported PyTorch (tests/support/warm_python.py).

It lies on PYTHONPATH where a test wants that, and costs a start of Python nothing else. This process stays for whoever
started it: it hands on signals, ends as the program ends, and takes the program with it if it is killed.
"""

import array
import json
import os
import signal
import socket
import sys

_FLAGS = ("-u", "-B", "-P", "-E", "-s")


def _program(words: list[str]) -> list[str] | None:
    """``-c CODE …``, ``-m MODULE …`` or ``SCRIPT …``; None if it is none that can be handed over.

    pytest is none: it wants to import the tests by itself.
    """
    rest = words[1:]
    while rest and rest[0] in _FLAGS:
        rest = rest[1:]
    if not rest or (rest[0].startswith("-") and rest[0] not in ("-c", "-m")):
        return None
    own = (rest[0] == "-c" and rest[1].startswith("from multiprocessing")) or rest[:2] == ["-m", "pytest"]
    return None if own else rest


def _hand_over(place: str, program: list[str]) -> None:
    server = socket.socket(socket.AF_UNIX)
    server.connect(place)
    fds = [int(fd) for fd in os.listdir("/proc/self/fd")]
    fds = [
        fd for fd in fds if fd != server.fileno() and os.path.exists(f"/proc/self/fd/{fd}") and os.get_inheritable(fd)
    ]
    network = os.open("/proc/self/ns/net", os.O_RDONLY)
    mask = os.umask(0)
    os.umask(mask)
    about = {
        "program": program,
        "unbuffered": "-u" in sys.orig_argv[: len(sys.orig_argv) - len(program)],
        "safe": bool(getattr(sys.flags, "safe_path", False)),
        "env": dict(os.environ),
        "folder": os.getcwd(),
        "cores": sorted(os.sched_getaffinity(0)),
        "policy": os.sched_getscheduler(0),
        "umask": mask,
        "fds": fds,
    }
    said = json.dumps(about).encode()
    running: list[int] = []  # the program's process id
    early: list[int] = []

    def hand_on(number: int, _: object) -> None:
        os.kill(running[0], number) if running else early.append(number)

    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, hand_on)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [network, *fds]))]
    server.sendmsg([len(said).to_bytes(8, "little")], ancillary)
    server.sendall(said)
    running.append(int.from_bytes(_whole(server, 8), "little"))
    while early:
        os.kill(running[0], early.pop(0))
    status = int.from_bytes(_whole(server, 8), "little", signed=True)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)


def _whole(server: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        part = server.recv(size - len(got))
        if not part:
            os._exit(255)  # the one that runs it has died
        got += part
    return got


def _can_follow(user: str) -> bool:
    """Whether the server can go where this process is: into its network, but into no user namespace."""
    return os.geteuid() == 0 and str(os.stat("/proc/self/ns/user").st_ino) == user


if _at := os.environ.get("WARM_PYTHON"):
    _place, _user = _at.split(":")
    _words = _program(sys.orig_argv)
    if _words is not None and _can_follow(_user):
        _hand_over(_place, _words)
