"""Process group with NCCL's rules, over Gloo, for tensors of a simulated accelerator.

    with device() as (gpu, group):  # gpu: a SimulatedAccelerator
        ddp = DistributedDataParallel(model, process_group=group)

A collective runs on a stream of the group's own, behind the stream that issued it. Its ``wait()`` orders the current
stream behind it, and holds no thread up: so a result that is used before is a race. Before each collective the ranks
tell each other which it is. Where NCCL would hang, or add up what does not belong together, all of them raise, with
what each has issued on this communicator.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from commlib.errors import CommlibError
from commlib.runtime.autograd import at_end_of_backward
from commlib.runtime.streams import accelerator
from commlib.testing.accelerator import SimulatedAccelerator, SimulatedEvent
from commlib.transports.process_group.algorithms.steps import Position
from commlib.transports.process_group.base import GroupIdentity, never_compiled

NAME = "stream_ordered"
_TOLD = 128  # bytes in which a rank says what it issues
_LISTED = 8  # collectives that an error names
_CPU = torch.device("cpu")
_OF_DDP = "torch.autograd", "commlib.ddp.hook_slot"  # who hands futures to DDP: itself, or what is left of a hook


class CollectivesDiffer(CommlibError):
    """Ranks that have issued other collectives, or in another order, on one communicator."""


class OrderedWork(dist.Work):
    """Collective that streams wait for, and no thread.

    Args:
        by: accelerator.
        done: event behind it, on the communicator's stream.
        result: what it fills.
        inputs: what it reads.
    """

    def __init__(
        self, by: SimulatedAccelerator, done: SimulatedEvent, result: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> None:
        super().__init__()
        self._by, self._done, self._result = by, done, list(result)
        self._stash = [*result, *inputs]  # as ProcessGroupNCCL keeps them, and does not record them on its stream

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """Order the current stream behind it; nobody keeps its tensors from here on."""
        self._done.wait()
        self._stash, self._result = [], []
        return True

    def is_completed(self) -> bool:
        """Whether the host knows that it is through."""
        return self._done.query()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Future of the result; done, as NCCL's is when it is issued."""
        if sys._getframe(1).f_globals["__name__"].startswith(_OF_DDP):
            done = self._done  # DDP waits for it in C++, at the end of the backward pass: which streams do is not seen
            at_end_of_backward(lambda: done.wait())
        future: torch.futures.Future[list[Tensor]] = self._by.future(_CPU)
        before = self._by.stream(_CPU)
        before.wait_event(self._done)
        with self._by.use(before):
            self._by.complete(future, self._result)
        return future


@never_compiled
class StreamOrderedGroup(GroupIdentity):
    """Communicator of ranks on simulated accelerators.

    Args:
        about: torch.distributed's: store, group_rank, group_size, timeout.

    Attributes:
        issued: what this rank has issued, in order.
    """

    orders_streams = True

    def __init__(self, about: Any) -> None:
        super().__init__(about.store, Position(about.group_rank, about.group_size, 1), about.timeout)
        told = distributed_c10d.PrefixStore("told", about.store)
        gloo: Any = dist.ProcessGroupGloo
        self._over, self._told = (
            gloo(store, about.group_rank, about.group_size, about.timeout) for store in (about.store, told)
        )
        self._streams: dict[SimulatedAccelerator, Any] = {}
        self._device = concurrent.futures.ThreadPoolExecutor(1)  # does what the communicator's stream has, in order
        self._under_way: list[OrderedWork] = []
        self.issued: list[str] = []

    def getBackendName(self) -> str:
        """Name of the backend."""
        return NAME

    name = getBackendName

    def _get_sequence_number_for_group(self) -> int:
        return len(self.issued)

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None, *, op: Any = None) -> OrderedWork:
        """Same as ``dist.all_reduce``."""
        tensors = _listed(tensors)
        opts = opts or dist.AllreduceOptions()
        return self._issue("allreduce", tensors, tensors, lambda: self._over.allreduce(tensors, opts))

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> OrderedWork:
        """Same for several tensors."""
        opts = opts or dist.AllreduceCoalescedOptions()
        return self._issue("allreduce", tensors, tensors, lambda: self._over.allreduce_coalesced(tensors, opts))

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None, *, root: Any = None) -> OrderedWork:
        """Same as ``dist.broadcast``."""
        tensors = _listed(tensors)
        opts = opts or dist.BroadcastOptions()
        return self._issue("broadcast", tensors, tensors, lambda: self._over.broadcast(tensors, opts))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> OrderedWork:
        """Same as ``dist.all_gather``."""
        ins, outs = _listed(inputs), outputs if isinstance(outputs[0], list) else [outputs]
        flat = [t for some in outs for t in some]
        return self._issue("allgather", ins, flat, lambda: self._over.allgather(outs, ins))

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> OrderedWork:
        return self._issue("allgather_base", [input], [output], lambda: self._over._allgather_base(output, input))

    all_gather_single = _allgather_base  # as torch 2.13 calls it

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> OrderedWork:
        opts = opts or dist.ReduceScatterOptions()
        call = functools.partial(self._over._reduce_scatter_base, output, input, opts)
        return self._issue("reduce_scatter", [input], [output], call)

    reduce_scatter_single = _reduce_scatter_base

    def alltoall_base(
        self, output: Tensor, input: Tensor, outs: list[int], ins: list[int], opts: Any = None
    ) -> OrderedWork:
        """Same as ``dist.all_to_all_single``."""
        return self._issue("alltoall", [input], [output], lambda: self._over.alltoall_base(output, input, outs, ins))

    def barrier(self, opts: Any = None) -> OrderedWork:
        """Same as ``dist.barrier``."""
        return self._issue("barrier", [], [], lambda: self._over.barrier())

    def _issue(
        self, kind: str, reads: Sequence[Tensor], fills: Sequence[Tensor], call: Callable[[], Any]
    ) -> OrderedWork:
        by = accelerator(_CPU)
        if not isinstance(by, SimulatedAccelerator):
            raise CommlibError(f"a process group {NAME!r} is for tensors of a simulated accelerator, and there is none")
        shapes = ", ".join(f"{tuple(t.shape)} {str(t.dtype)[6:]}" for t in reads[:2])
        self.issued.append(f"{kind}({shapes})" if kind not in ("allgather", "alltoall") else kind)
        if by not in self._streams:
            self._streams[by] = by.stream(_CPU, f"communicator {self.group_name or NAME}")
        own = self._streams[by]
        own.wait_stream(by.current())
        with torch._C._DisableTorchDispatch():  # what Gloo does is no work of the device's
            self._compare()
        by.finish(own.clock, but=own.number)
        done = self._device.submit(lambda: call().wait())
        with by.use(own):
            by.ran(reads, fills, f"{kind} on a communicator")
            by.later(done)
            event = own.record_event()
        self._under_way = [work for work in self._under_way if not work.is_completed()]  # its watchdog's
        self._under_way.append(OrderedWork(by, event, fills, reads))
        return self._under_way[-1]

    def _compare(self) -> None:
        """Raises CollectivesDiffer where ranks issue different ones."""
        mine = torch.frombuffer(bytearray(self.issued[-1].encode()[:_TOLD].ljust(_TOLD)), dtype=torch.uint8)
        told = bytearray(self.size() * _TOLD)
        every = torch.frombuffer(told, dtype=torch.uint8)
        about = f"rank {self.rank()} of {self.size()} has issued …, {', '.join(self.issued[-_LISTED:])}"
        try:
            self._told._allgather_base(every, mine).wait()
        except RuntimeError as e:
            raise CollectivesDiffer(f"{about}; another rank has not come to it: a hang, over NCCL ({e})") from e
        texts = [told[r * _TOLD : (r + 1) * _TOLD].decode().strip() for r in range(self.size())]
        if len(set(texts)) > 1:
            each = "; ".join(f"rank {r}: {text}" for r, text in enumerate(texts))
            raise CollectivesDiffer(f"{about}; now {each}: a hang, or wrong sums, over NCCL")


def register() -> None:
    """Make the backend known to ``init_process_group``."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu"])


def _make(about: Any, options: Any) -> Any:
    return StreamOrderedGroup(about)


def _listed(tensors: Any) -> list[Tensor]:
    return list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]


@contextlib.contextmanager
def device(backend: str = NAME) -> Iterator[tuple[SimulatedAccelerator, Any]]:
    """A simulated accelerator, and a communicator of all ranks for it, or a process group of another backend."""
    register()
    group = dist.new_group(backend=backend)
    with mock.patch.dict(os.environ, {"COMMLIB_KERNELS": "reference"}), SimulatedAccelerator() as gpu:
        yield gpu, group
