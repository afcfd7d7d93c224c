"""Work of a process group: what a call gives back, to be waited for."""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .host_tensors import Staged

Help = Callable[["CollectiveWork"], None]
"""Gets a work done in the thread that waits for it, as far as that is possible; may return before it is."""


class CollectiveWork(dist.Work):
    """A call under way. Any number of threads may wait for it.

    Waiting with a deadline that passes raises RuntimeError and changes nothing, as Gloo's does.

    Args:
        what: the call, in words.
        result: what it fills.
        help: see :data:`Help`.
        staged: what it fills that is on a GPU.
    """

    def __init__(
        self, what: str, result: Sequence[Tensor], help: Help | None = None, staged: Sequence[Staged] = ()
    ) -> None:
        super().__init__()
        self.what, self.source = what, -1
        self._result, self._help, self._staged = list(result), help, staged
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._future: torch.futures.Future[list[Tensor]] | None = None

    def end(self, error: BaseException | None = None) -> None:
        """Mark as through, or as failed; once, by whoever carries it out."""
        with self._lock:
            self._error = error
            self._ended.set()
            future = self._future
        if future is not None:
            self._tell(future)

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """True once it is through; raises what it failed with. No timeout: its call's own decides.

        What is on a GPU is filled behind what its current stream has: that waits, as NCCL's does.
        """
        seconds = timeout.total_seconds()
        if seconds > 0:
            if not self._ended.wait(seconds):
                raise RuntimeError(f"{self.what} was not through within {seconds:g} s; it goes on")
        else:
            while not self._ended.is_set():
                if self._help is not None:
                    self._help(self)
                else:
                    self._ended.wait()
        if self._error is not None:
            raise self._error
        for each in self._staged:
            each.join()
        return True

    def is_completed(self) -> bool:
        """Whether it is through, or failed."""
        return self._ended.is_set()

    def is_success(self) -> bool:
        """Whether it is through."""
        return self._ended.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """What it failed with."""
        return self._error

    def synchronize(self) -> None:
        """Wait for the end of the call."""
        self.wait()

    def result(self) -> list[Tensor]:
        """The tensors that the call filled."""
        return self._result

    def source_rank(self) -> int:
        """Rank whose message was received (``recv``)."""
        return self.source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Future of :meth:`result`."""
        with self._lock:
            found, ended = self._future, self._ended.is_set()
            if found is None:
                found = self._future = torch.futures.Future(devices=[s.device for s in self._staged])
                if ended:
                    self._tell(found)
        return found

    def _tell(self, future: torch.futures.Future[Any]) -> None:
        if self._error is not None:
            future.set_exception(self._error)
            return
        with contextlib.ExitStack() as streams:  # those that the future's users are to come after
            for each in self._staged:
                streams.enter_context(each.after())
            future.set_result(self._result)
