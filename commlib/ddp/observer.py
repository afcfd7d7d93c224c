"""A DDP model's exchanges seen from outside, while it has no communication hook.

A hook costs something even where it changes nothing: DDP divides by P in its copy into the bucket without one, and
leaves it to a pass of the hook's own with one; and Python runs for every bucket. A hook cannot be taken away again. So
there is none before there is something for it to do, and DDP is as fast as DDP.

What is seen must be counted alike on all ranks, for reviews are held after so many exchanges. All of it happens in the
thread of the backward pass. DDP asks that every parameter become ready in a pass that exchanges (other models are not
looked at: :func:`visible`), so one parameter becomes ready once an exchange. There a callback is queued for the end of
the pass, and there another: which comes behind DDP's own, at whose end everything has been exchanged.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commlib.ddp.compat import check_ddp
from commlib.groups.process_groups import waits_on_stream
from commlib.groups.world import World
from commlib.runtime.autograd import ReadyHook, at_end_of_backward, before_forward, untraced
from commlib.runtime.layers import all_parameters, trained_parameters
from commlib.runtime.streams import Moment, moment
from commlib.telemetry.recorder import TRACK
from commlib.telemetry.stats import Meter
from commlib.telemetry.trace import NONE, Trace

Buckets = list[tuple[Moment | None, tuple[str, ...]]]
"""(when it was ready, if anybody has noted that; the names of its parameters), in DDP's order."""
ROW = "buckets"
"""Of a trace: what is seen of all."""


def visible(ddp: DistributedDataParallel) -> bool:
    """Whether this model's exchanges can be seen without a hook, and are of its gradients as they are.

    On a GPU over NCCL only: Gloo takes a bucket there through the host, and this thread would wait for streams, too.
    """
    unlike: tuple[Any, ...] = (
        ddp.find_unused_parameters,
        ddp.static_graph,
        ddp.mixed_precision,
        ddp._join_config.enable,
        getattr(ddp, "_use_python_reducer", False),
        getattr(ddp, "_delay_all_reduce_all_params", False),
    )
    reduced = _said(ddp).get("num_parameter_tensors")
    parameters = reduced_parameters(ddp).values()
    seen = all(p.device.type == "cpu" or waits_on_stream(ddp.process_group, p.device) for p in parameters)
    return not any(unlike) and reduced == len(parameters) and seen


def reduced_parameters(ddp: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """Name → parameter of all that DDP reduces, in the order of its own list."""
    ignored = {id(p) for name, p in all_parameters(ddp.module).items() if name in ddp.parameters_to_ignore}
    return {name: p for name, p in trained_parameters(ddp.module).items() if id(p) not in ignored}


class ReducedGroup(dist.ProcessGroup):
    """Process group that a DDP model's reducer has in place of its own: it hands on, and keeps the works under way.

    What travels is the same, to the last bit. But DDP waits for a work in C++, where nobody can say whose fault it is
    that it fails; whoever has the work can wait for it first.

    Args:
        group: the model's own.
        begins: called before a bucket is issued, each time.
    """

    def __init__(self, group: Any, begins: Callable[[], None]) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]  # as its stubs do not have it
        self._group, self._begins, self._works = group, begins, list[Any]()
        own = weakref.ref(self)
        # What C++ calls in the backward pass, of a compiled step too, and what is not to be compiled there.
        vars(self).update(
            allreduce=functools.partial(untraced(_all_reduce), own),
            broadcast=functools.partial(untraced(_broadcast), own),
        )

    def getBackendName(self) -> str:
        """Name of its backend, as the reducer asks for it."""
        name: str = self._group.name()
        return name

    def all_reduce(self, tensors: Any, opts: Any) -> Any:
        """All-reduce of a bucket; returns its work."""
        self._begins()
        work = self._group.allreduce(tensors, opts)
        self._works.append(work)
        return work

    def broadcast_indices(self, tensors: Any, opts: Any) -> Any:
        """Broadcast of which parameters are in which bucket; returns its work."""
        return self._group.broadcast(tensors, opts)

    def issued(self) -> list[Any]:
        """Works of all-reduces since this was asked last."""
        works, self._works = self._works, []
        return works


class PassiveObserver:
    """Sees exchanges until :meth:`leave`. The model keeps it alive, and whom it tells.

    Args:
        ddp: a :func:`visible` model, without a hook.
        meters: of the parameters, by name.
        world: this rank.
        begins: called before DDP issues anything of an exchange; over NCCL at the end of the backward pass.
        issued: called at the end of the backward pass, when DDP has issued all its collectives, but waits for none yet;
            with their works, none over NCCL, and the meter of all parameters.
        exchanged: called when it has, with when the backward pass ended, and the buckets if they are watched.
        check: called when a forward pass begins; it raises what speaks against an exchange.
        hook: to be registered, and its state before it.

    Attributes:
        sent: bytes that DDP has sent by itself.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        meters: Mapping[str, Meter],
        world: World,
        begins: Callable[[], None],
        issued: Callable[[list[Any], Meter], None],
        exchanged: Callable[[Moment, Buckets], None],
        check: Callable[[], None],
        hook: tuple[object, Callable[..., Any]],
    ) -> None:
        self._ddp, self._world = weakref.ref(ddp), world
        self._begins, self._issued, self._tell = begins, issued, exchanged
        self._check, self._hook = check, hook
        self._parameters = reduced_parameters(ddp)
        self._nbytes = sum(p.nbytes for p in self._parameters.values())
        parts = [(meters[name], p.numel()) for name, p in self._parameters.items()]
        self._meter, self.sent = Meter.of_all(parts[0][0].device, parts), 0.0
        self._buckets: list[tuple[str, ...]] = []
        self._ready: dict[str, Moment] = {}
        self._device = parts[0][0].device
        self._watches: list[Any] = []
        self._expected = self._queued = self._begun = self._wanted = False
        self._trace = NONE
        self._ended = Moment(0.0)
        own = weakref.ref(self)  # or parameters, and with them the model, would never be freed
        self._reduced: ReducedGroup | None = None
        if not waits_on_stream(ddp.process_group, self._device):  # there nobody waits for a work
            begins_one = functools.partial(_one_begins, own)
            self._reduced = ReducedGroup(ddp.process_group, begins_one)  # kept, for C++ keeps no Python object alive
            ddp.reducer._update_process_group(self._reduced)
        one: Any = next(reversed(self._parameters.values()))
        self._handles = [
            before_forward(ddp, self, keep=True),
            one.register_post_accumulate_grad_hook(ReadyHook(functools.partial(untraced(_one_is_ready), own))),
        ]

    def watch(self, on: bool) -> None:
        """Note when parameters become ready, or no longer; to be changed between two exchanges."""
        self._wanted = on
        self._watch(on or self._trace.enabled)

    @property
    def trace(self) -> Trace:
        """Trace in which exchanges are recorded; as :meth:`watch`."""
        return self._trace

    @trace.setter
    def trace(self, trace: Trace) -> None:
        self._trace = trace
        self._watch(bool(self._handles) and (self._wanted or trace.enabled))

    def _watch(self, on: bool) -> None:
        if on and not self._watches:
            own = weakref.ref(self)
            for name, p in self._parameters.items():
                parameter: Any = p
                note = functools.partial(untraced(_note), own, name)
                self._watches.append(parameter.register_post_accumulate_grad_hook(ReadyHook(note)))
        elif not on:
            for handle in self._watches:
                handle.remove()
            self._watches = []

    def leave(self) -> None:
        """Give the model its hook, and see nothing more; between two exchanges, after the same one on every rank.

        Raises:
            ValueError: the model has another hook by now.
        """
        ddp = self._ddp()
        if self.remove() and ddp is not None:
            check_ddp(ddp)
            ddp.register_comm_hook(*self._hook)

    def check(self) -> None:
        """Raises ValueError if the model has been given a hook meanwhile: beside it nothing else can be chosen."""
        ddp = self._ddp()
        if self._handles and ddp is not None:
            check_ddp(ddp)

    def remove(self) -> bool:
        """See nothing more, and leave the model as it was; whether there was anything to remove."""
        if not self._handles:
            return False
        self._watch(False)
        for handle in self._handles:
            handle.remove()
        self._handles = []
        ddp = self._ddp()
        if self._reduced is not None and ddp is not None:
            ddp.reducer._update_process_group(ddp.process_group)
        return True

    # -- what the model's hooks tell --

    def begin(self, syncing: bool) -> None:
        """Same contract as :meth:`commlib.runtime.autograd.ForwardListener.begin`.

        Raises:
            ValueError: the model has been given a hook meanwhile, beside which nothing else can be chosen any more.
        """
        check_ddp(self._ddp())
        self._check()
        if torch.is_grad_enabled():
            self._expected, self._queued = self._expected or syncing, False  # DDP, too, expects it until it comes
            self._begun = False
            self._ready.clear()
            self._works()  # of a pass that broke off

    def ready(self, name: str) -> None:
        """A parameter has its gradient, in this pass."""
        self._ready[name] = moment(self._device)

    def one_is_ready(self) -> None:
        """The one that stands for all of them has."""
        if self._expected and not self._queued:
            self._queued = at_end_of_backward(self._backward_ended)

    def one_begins(self) -> None:
        """DDP is about to issue a bucket, or would be seen to have issued all."""
        if not self._begun:
            self._begun = True
            self._begins()

    def _backward_ended(self) -> None:
        self.one_begins()
        self._ended, self._expected = moment(self._device), False
        self._meter.would_send(self._nbytes, self._world.size)
        sent = 2 * (self._world.size - 1) / self._world.size * self._nbytes
        self._meter.add_sent(sent)
        self.sent += sent
        self._issued(self._works(), self._meter)
        at_end_of_backward(self._exchanged)

    def _works(self) -> list[Any]:
        return [] if self._reduced is None else self._reduced.issued()

    def _exchanged(self) -> None:
        ddp = self._ddp()
        if ddp is None or not _finalized(ddp):
            return
        if self._watches and not self._buckets:
            self._buckets = _buckets(ddp, list(self._parameters))
        seen = handed_over(self._buckets, self._ready) if self._watches else []
        if self._trace.enabled:
            self._record(seen)
        self._tell(self._ended, seen if self._wanted else [])

    def _record(self, buckets: Buckets) -> None:
        """When each is through, DDP tells nobody; only when all are."""
        now = self._trace.now()
        for i, (at, names) in enumerate(buckets):
            if at is not None:  # in the first step nobody may have noted it
                self._trace.instant(ROW, f"bucket {i} handed over", at.host_s, layers=f"{names[0]} … {names[-1]}")
        if buckets and buckets[0][0] is not None:
            self._trace.span(ROW, "exchange by DDP", buckets[0][0].host_s, now)
        self._trace.span(TRACK, "wait", self._ended.host_s, now)


def handed_over(buckets: Sequence[tuple[str, ...]], ready: Mapping[str, Moment]) -> Buckets:
    """When DDP begins to exchange each bucket: it is ready, and so are those before it.

    Args:
        buckets: names of their parameters.
        ready: of parameters; one that is missing was ready at once.
    """
    found: Buckets = []
    last: Moment | None = None
    for names in buckets:
        noted = [ready[n] for n in names if n in ready] + ([] if last is None else [last])
        last = max(noted, key=lambda at: at.host_s, default=None)
        found.append((last, names))
    return found


def _buckets(ddp: DistributedDataParallel, names: Sequence[str]) -> list[tuple[str, ...]]:
    """Buckets that DDP uses from its second exchange on, as it says; empty before."""
    listed = str(_said(ddp).get("rebuilt_per_bucket_param_indices", ""))
    return [tuple(names[int(i)] for i in bucket.split()) for bucket in listed.split(",") if bucket.strip()]


def _said(ddp: Any) -> dict[str, Any]:
    """Logging data that DDP has of itself."""
    said: dict[str, Any] = ddp._get_ddp_logging_data()
    return said


def _finalized(ddp: DistributedDataParallel) -> bool:
    """Whether the exchange is complete: not so where several losses make gradients ready in several passes."""
    try:
        ddp.reducer._check_reducer_finalized()
    except RuntimeError:
        return False
    return True


def _one_is_ready(lookout: weakref.ref[PassiveObserver]) -> None:
    if (it := lookout()) is not None:
        it.one_is_ready()


def _all_reduce(group: weakref.ref[ReducedGroup], tensors: Any, opts: Any) -> Any:
    it = group()
    assert it is not None  # the observer keeps it
    return it.all_reduce(tensors, opts)


def _broadcast(group: weakref.ref[ReducedGroup], tensors: Any, opts: Any) -> Any:
    it = group()
    assert it is not None
    return it.broadcast_indices(tensors, opts)


def _one_begins(lookout: weakref.ref[PassiveObserver]) -> None:
    if (it := lookout()) is not None:
        it.one_begins()


def _note(lookout: weakref.ref[PassiveObserver], name: str) -> None:
    if (it := lookout()) is not None:
        it.ready(name)
