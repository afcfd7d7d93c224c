"""Work of a process group: what a call gives back, to be waited for."""

from __future__ import annotations

import contextlib
import datetime
import functools
import threading
from collections.abc import Callable, Sequence

import torch
import torch.autograd.profiler as profiler
import torch.distributed as dist
from torch import Tensor

from commlib.runtime.autograd import untraced

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
        self._ending: torch.futures.Future[list[Tensor]] | None = None

    def end(self, error: BaseException | None = None) -> None:
        """Mark as through, or as failed; once, by whoever carries it out."""
        if (tell := self.ended(error)) is not None:
            tell()

    def ended(self, error: BaseException | None = None) -> Callable[[], None] | None:
        """As :meth:`end`, but for what others have put behind the future: returns what runs that, if there is one."""
        with self._lock:
            self._error = error
            self._ended.set()
            ending = self._ending
        return None if ending is None else functools.partial(self._tell, ending)

    @untraced
    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """True once it is through; raises what it failed with. No timeout: its call's own decides.

        What is on a GPU is filled behind what its current stream has: that waits, as NCCL's does.
        """
        if profiler._is_profiler_enabled:
            with profiler.record_function(f"zmq:wait for {self.what.partition('(')[0]}"):
                self._wait(timeout.total_seconds())
        else:
            self._wait(timeout.total_seconds())
        return True

    def _wait(self, seconds: float) -> None:
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

    def is_completed(self) -> bool:
        """Whether it is through, or failed."""
        return self._ended.is_set()

    def is_success(self) -> bool:
        """Whether it is through."""
        return self._ended.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """Error of the call; None if it has not failed."""
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
        """Future of :meth:`result`; of a call that failed, its error is a RuntimeError with the words of this one's.

        Who reads it in C++, as DDP does without a hook, finds an error and no value. ``set_exception`` would give the
        future a value that is an exception, which DDP takes for its tensors: that ends the process.
        """
        with self._lock:
            if self._future is None:
                self._ending = self._awaited()
                self._future = self._ending.then(self._come_through)
                if self._ended.is_set():
                    self._tell(self._ending)
            return self._future

    def _awaited(self) -> torch.futures.Future[list[Tensor]]:
        """Future of what is filled, wherever that is."""
        if not self._staged:
            return torch.futures.Future()
        return self._staged[0].by.future(*(each.device for each in self._staged))

    def _come_through(self, ending: torch.futures.Future[list[Tensor]]) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return ending.value()

    def _tell(self, future: torch.futures.Future[list[Tensor]]) -> None:
        if self._error is not None:
            future.set_result([])
            return
        with contextlib.ExitStack() as streams:  # those that the future's users are to come after
            for each in self._staged:
                streams.enter_context(each.after())
            if self._staged:
                self._staged[0].by.complete(future, self._result)
            else:
                future.set_result(self._result)
