"""``init_process_group("zmq")``: a process group of torch.distributed, by the schedules of
:mod:`commlib.transports.process_group.algorithms`."""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist

from .arguments import Parts, one
from .base import Calls
from .group import Copies
from .p2p import Mail
from .sums import Sums
from .work import Work


class ZmqGroup(Sums, Copies):
    """A process group over endpoints.

    Args:
        mail: messages from one rank to another.
        rest: of :class:`~.calls.Calls`.
    """

    def __init__(self, *rest: Any, mail: Mail[Any]) -> None:
        Calls.__init__(self, *rest)
        self._mail = mail

    def monitored_barrier(self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier. It names all ranks that do not come in time, as every call does. (``dist``'s is Gloo's only.)"""
        opts = dist.BarrierOptions()
        opts.timeout = timeout or self.options._timeout
        self.barrier(opts).wait()

    def send(self, tensors: Parts, to: int, tag: int) -> Work:
        """To rank ``to``; through once the tensor may be written to."""
        return self._mail.send(one(tensors), to, tag, self._seconds(None))

    def recv(self, tensors: Parts, source: int, tag: int) -> Work:
        """The next message of rank ``source`` with this tag."""
        return self._mail.recv(one(tensors), source, tag, self._seconds(None))

    def recv_anysource(self, tensors: Parts, tag: int) -> Work:
        """The next message with this tag, of any rank."""
        return self._mail.recv(one(tensors), None, tag, self._seconds(None))
