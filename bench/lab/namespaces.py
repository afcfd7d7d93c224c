"""The process that owns a lab: while it lives, the lab does."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys

from commlib.errors import CommlibError

NEEDED = {
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
    "chrt": "util-linux",
    "taskset": "util-linux",
    "env": "coreutils",
    "ip": "iproute2",
    "tc": "iproute2",
}
_NAMESPACES = ("--net", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc")
_PATIENCE_S = 30.0

# The first process of the lab, and so its PID 1: when it ends, the kernel kills every other process of the
# lab, and with the last of them go the namespaces. It ends when nobody holds the other end of its stdin.
# `ip netns` keeps its names in /run/netns: here a file system of the lab's own. $1 are the hosts' names.
_SCRIPT = """
set -e
[ -d /run/netns ] && over=/run/netns || over=/run
mount -t tmpfs lab $over
mkdir -p /run/netns
if [ -e /etc/hosts ]; then
    { cat /etc/hosts; echo "$1"; } > /run/netns/hosts
    mount --bind /run/netns/hosts /etc/hosts
    rm /run/netns/hosts
fi
echo ready
exec cat >/dev/null
"""


class LabError(CommlibError):
    """There can be no lab here, or a command that changes one failed; the message has the reason."""


class NamespaceHolder:
    """Namespaces of one's own, for as long as this object's owner lives.

    Args:
        names: lines that ``/etc/hosts`` has in there besides the machine's.

    Raises:
        LabError: this machine, or this user, cannot; the message says what would help.
    """

    def __init__(self, names: str) -> None:
        if not sys.platform.startswith("linux"):
            raise LabError(f"the lab needs Linux's network namespaces, and this is {sys.platform}")
        absent = [name for name in NEEDED if shutil.which(name) is None]
        if absent:
            packages = ", ".join(sorted({NEEDED[n] for n in absent}))
            raise LabError(f"the lab needs {' and '.join(absent)}, which are not here: install {packages}")
        self._root = os.geteuid() == 0
        user = [] if self._root else ["--user", "--map-root-user"]
        self._process = subprocess.Popen(
            ["unshare", *user, *_NAMESPACES, "sh", "-c", _SCRIPT, "keeper", names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C in the terminal goes to the owner alone
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        if self._process.stdout.readline() != "ready\n":
            self._close_stdin()
            said = " ".join(self._process.stderr.read().split()) or "no reason given"
            self.close()
            who = "" if self._root else "; run it as root, or allow unprivileged user namespaces"
            raise LabError(f"the lab needs namespaces of its own and may not make them: {said}{who}")

    def enter(self) -> list[str]:
        """The words that, put before a command, run it inside.

        Raises:
            LabError: the keeper is gone.
        """
        if self._process.poll() is not None:
            raise LabError("the lab has ended: its keeper is gone (closed, or killed)")
        # unshare made the namespaces and then forked PID 1 into its "PID namespace for children".
        ns = f"/proc/{self._process.pid}/ns"
        user = [] if self._root else [f"--user={ns}/user", "--preserve-credentials"]
        return ["nsenter", *user, f"--net={ns}/net", f"--mount={ns}/mnt", f"--pid={ns}/pid_for_children", "--"]

    def close(self) -> None:
        """End every process in there; returns when they have ended. More than once does no harm."""
        self._close_stdin()
        try:
            # unshare returns only when PID 1 has, and that only when every process of the lab has.
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # --kill-child takes PID 1 along
            self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def _close_stdin(self) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
