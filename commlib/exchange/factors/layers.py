"""All tapped layers of a model, and what becomes of their rows in a step.

Which thread: the taps, :meth:`FactorLayers.complete` and :meth:`FactorLayers.trip` run in the thread of the backward
pass, and only that one issues first rounds, in an order that is the same on every rank
(:mod:`commlib.exchange.factors.order`): of all-gathers and all-to-alls, as the layers' routes say, which ranks share.
Nothing waits here.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commlib.codecs.base import Compressor, Seeds
from commlib.exchange.base import Routed
from commlib.exchange.factors.guard import ddp_models_made, sharing
from commlib.exchange.factors.order import InterleavedOrder, RowOrder, StepOrder
from commlib.exchange.factors.retained import has_gradient
from commlib.exchange.factors.rounds import FactorRounds, RowHistory
from commlib.exchange.factors.tap import Tap
from commlib.exchange.registry import BY_ROWS
from commlib.groups.world import World
from commlib.runtime.autograd import after_forward, before_forward
from commlib.runtime.layers import linear_layers
from commlib.runtime.streams import accelerator

_log = logging.getLogger("commlib")
_FIRST = "a static graph of DDP's that breaks off in its first backward pass never reduces, and does not say so"


class PassObserver(Protocol):
    """Observer that is told when forward passes begin."""

    def begin(self) -> None:
        """A forward pass of the DDP model, with gradients, begins."""

    def rows(self, layer: str, count: int) -> None:
        """A layer's backward pass begins, with so many rows."""


class FactorLayers:
    """Taps on a model's linear layers.

    Args:
        ddp: the model.
        modules: name → layer, those whose factors may be exchanged; the same, in the same order, on every rank.
        world: this rank.
        on: whether the step under way exchanges factors (not in a dense warm-up); False once its object is gone.
        seeds: of a layer, in the step under way.
        sample: which layer is to be verified in the step whose forward pass begins; empty: none.
        routes: layer → the exchange of its rows, by name, and the codec; others are as plain ones until
            :meth:`activate`.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        modules: Mapping[str, nn.Linear],
        world: World,
        on: weakref.WeakMethod[Callable[[], bool]],
        seeds: weakref.WeakMethod[Callable[[str], Seeds]],
        sample: weakref.WeakMethod[Callable[[], str]],
        routes: Mapping[str, Routed],
    ) -> None:
        self._ddp, self._modules, self._world, self._on, self._seeds = weakref.ref(ddp), modules, world, on, seeds
        self._sample, self._verified = sample, ""
        self._habits = {name: RowHistory() for name in modules}
        self._trips: dict[str, FactorRounds] = {}
        self._loaded: set[str] = set()
        self._asked: set[str] = set()
        self._passed: set[str] = set()
        self._among_buckets = False
        self._armed = self._syncing = False
        self._taps: dict[str, Tap] = {}
        self._around: list[Any] = []
        self._seen = 0  # DDP models that had been made when it was seen which layers they share
        self._proving: frozenset[str] = frozenset()
        self._proofs: dict[str, FactorRounds] = {}
        self._remarks: dict[str, tuple[int, str]] = {}
        self._group: Any = None
        self.observer: PassObserver | None = None
        self._watch = False
        order = [name for name in reversed(list(modules)) if name in routes]  # the backward pass meets the last first
        self.activate({name: routes[name] for name in order})

    @classmethod
    def of(
        cls,
        module: nn.Module,
        names: Collection[str],
        world: World,
        on: weakref.WeakMethod[Callable[[], bool]],
        seeds: weakref.WeakMethod[Callable[[str], Seeds]],
        sample: weakref.WeakMethod[Callable[[], str]],
        routes: Mapping[str, Routed],
        *,
        watched: bool,
    ) -> FactorLayers | None:
        """Make taps for the layers of these names; None if there are none, and nobody wants to know when passes begin
        either.

        Raises:
            ValueError: the module is not the DDP model.
        """
        if not names and not watched:
            return None
        if not isinstance(module, DistributedDataParallel):
            raise ValueError(
                "factors are caught in the DDP model's passes: attach to the DistributedDataParallel itself"
            )
        modules = {n: m for n, m in linear_layers(module.module).items() if n in names}
        return cls(module, modules, world, on, seeds, sample, routes)

    def activate(
        self, routes: Mapping[str, Routed], rows: Mapping[str, int] | None = None, prove: Collection[str] = ()
    ) -> None:
        """Let these layers exchange factors from the next step on, in this order; alike on every rank.

        Only between an exchange and the next forward pass.

        Args:
            routes: layer → how its rows travel.
            rows: layer → rows to have room for; others have what they had lately.
            prove: layers whose gradient is to be dense until the next call, and compared with what rows make of it;
                :meth:`differences` tells. Not those whose rows go by a codec that loses something.
        """
        self._routes = dict(routes)
        self._proving, self._proofs = frozenset(prove), {}
        self._order = self._ordered()
        for name, count in (rows or {}).items():
            self._habits[name].expect(count)
        self._share()
        self._fit()

    @property
    def watch(self) -> bool:
        """Whether the observer is told of rows. To be changed when :meth:`activate` may be called."""
        return self._watch

    @watch.setter
    def watch(self, on: bool) -> None:
        self._watch = on
        self._fit()

    def _fit(self) -> None:
        """Layers are looked at while they are needed: a tapped layer takes more time, though it may not show."""
        for name, tap in self._taps.items():
            if self._watch or name in self._routes:
                tap.enable()
            else:
                tap.disable()

    def _share(self) -> None:
        """See which layers another DDP model reduces, too: that would miss their gradient, so nothing is caught."""
        ddp, self._seen = self.ddp, ddp_models_made()
        if self._routes and self._taps and ddp is not None:
            leaves = [p for tap in self._taps.values() for p in tap.leaves]
            try:
                found = sharing(ddp, leaves)
            except Exception:  # some object of the program's cannot even be looked at
                _log.warning("layers go as dense gradient: it is not known who shares them", exc_info=True)
                found = {id(p) for p in leaves}
            for tap in self._taps.values():
                if any(id(p) in found for p in tap.leaves):
                    tap.barred = tap.barred or "another DDP model reduces a parameter of it, too"

    @property
    def ddp(self) -> DistributedDataParallel | None:
        """The model; None once it is gone."""
        return self._ddp()

    def terms(self) -> dict[str, str]:
        """Terms that ranks must have in common where each multiplies for itself, and must come to the same bits."""
        found = {
            "arithmetic": f"{torch.__version__}, {torch.backends.cpu.get_cpu_capability()}",
            "threads": str(torch.get_num_threads()),
        }
        if any(m.weight.is_cuda for m in self._modules.values()):
            found["arithmetic"] = f"{torch.__version__}, {torch.cuda.get_device_name()}"
            found["products"] = torch.get_float32_matmul_precision()
        return found

    @property
    def names(self) -> list[str]:
        """Names of the layers."""
        return list(self._modules)

    def tap(self, group: Any, *, among_buckets: bool = False, traced: bool = False) -> None:
        """Put the taps on.

        Args:
            group: a process group for their first rounds.
            among_buckets: whether buckets go over it, too.
            traced: whether ``torch.compile`` sees plain layers, of which nothing is caught, and needs no graph break.
        """
        ddp = self._ddp()
        assert ddp is not None
        self._group = group
        self._among_buckets = among_buckets
        self._order = self._ordered()
        owner = weakref.proxy(self)  # or model, taps and hook would keep each other alive
        self._taps = {name: Tap(name, module, owner, traced=traced) for name, module in self._modules.items()}
        if ddp.static_graph and self._routes:  # else they are chosen later, when DDP has reduced
            self._bar(_FIRST)
        self._share()
        self._fit()
        self._around = [before_forward(ddp, self), after_forward(ddp, self)]

    def remove(self) -> None:
        """Make the layers ordinary again; more than once does no harm."""
        for hook in self._around:
            hook.remove()
        for tap in self._taps.values():
            tap.disable()
        self._taps = {}

    def retire(self) -> None:
        """As :meth:`remove`, for good and while the model goes on: what has not been exchanged is ordinary gradient."""
        for tap in self._taps.values():
            tap.retire()
        self.observer = None
        self.remove()

    # -- what taps ask and tell --

    def on(self, name: str) -> bool:
        """Same contract as :meth:`commlib.exchange.factors.tap.TapOwner.on`."""
        asked = self._on()
        return self._armed and name in self._routes and asked is not None and asked()

    def watching(self) -> bool:
        """Same contract as :meth:`commlib.exchange.factors.tap.TapOwner.watching`."""
        return self._watch and self._armed

    def sighted(self, name: str, rows: int) -> None:
        """Same contract as :meth:`commlib.exchange.factors.tap.TapOwner.sighted`."""
        if self.observer is not None:
            self.observer.rows(name, rows)

    def syncing(self) -> bool:
        """Same contract as :meth:`commlib.exchange.factors.tap.TapOwner.syncing`."""
        return self._syncing

    def none_is_unused(self) -> bool:
        """Same contract as :meth:`commlib.exchange.factors.tap.TapOwner.none_is_unused`."""
        ddp = self.ddp
        return ddp is None or ddp.find_unused_parameters  # a static graph goes by what its first step used

    def complete(self, name: str) -> None:
        """As :meth:`commlib.exchange.factors.tap.TapOwner.complete`: the layer's rows leave as soon as its turn has
        come."""
        self._load(name)
        self._start(self._order.ready(name))

    # -- what the hook asks --

    def trip(self, name: str) -> FactorRounds:
        """The layer's trip in this step. DDP asks for its bucket: what has not come until now will not."""
        self._asked.add(name)
        tap = self._taps[name]
        if name not in self._loaded:
            self._load(name)
        elif tap.foreign or not tap.empty():  # called again, or its weight is used elsewhere
            self._note(tap)
            self._trip(name).add(tap.take())
        self._start(self._order.asked(name))
        return self._trip(name)

    def passed(self, parameters: Sequence[str]) -> None:
        """All of a bucket has been issued; ``parameters`` names those in it, in order."""
        layers = dict.fromkeys(name.rpartition(".")[0] for name in parameters)
        mine = [name for name in layers if name in self._routes and name not in self._passed]
        self._passed.update(mine)
        self._start(self._order.passed(mine))

    def end_step(self) -> None:
        """DDP has asked for all buckets. A layer that it has not asked for is none of this step's on any rank.

        So it is with ``skip_all_reduce_unused_params``, by which DDP leaves out what no rank has used.

        Raises:
            ValueError: a layer whose rows were caught: nobody would write its gradient.
        """
        missing = [name for name in self._routes if name not in self._asked]
        if missing and (self._asked or self._loaded):  # neither, in a dense warm-up
            lost = [name for name in missing if name in self._loaded or not self._taps[name].empty()]
            if lost:
                raise ValueError(
                    f"DDP does not reduce {', '.join(lost)}: frozen, or left out, when the model was wrapped. Wrap it "
                    f'anew, or give the layer another route, for example {{"{lost[0]}.*": "none"}}'
                )
            for name in missing:
                self._start([due for due in self._order.ready(name) if due not in missing])
        for tap in self._taps.values():
            tap.barred = tap.barred if tap.barred != _FIRST else ""
        self._reset(whole=True)

    def _reset(self, *, whole: bool) -> None:
        self._armed = self._syncing = False  # what is called now, on one rank perhaps, does not go through DDP
        self._close()
        self._order.restart(whole=whole)
        self._proofs |= {name: trip for name, trip in self._trips.items() if trip.proving}
        self._trips.clear()
        self._loaded.clear()
        self._asked.clear()
        self._passed.clear()

    def begin(self, syncing: bool) -> None:
        """A forward pass of the DDP model begins.

        DDP exchanges in the next backward pass if any forward pass since the last exchange was outside of ``no_sync``.
        """
        if self._trips:  # the last backward pass broke off
            for trip in self._trips.values():
                trip.give_up("the backward pass broke off before this layer's factors could leave")
            for tap in self._taps.values():
                tap.take()
            self._reset(whole=False)
            self._after_a_break()
        if not self._armed and self._routes:
            asked = self._sample()
            self._verified = asked() if asked is not None else ""
        for tap in self._taps.values():
            tap.begin()
            tap.proving = self._proves(tap.name)
        if self._seen != ddp_models_made():
            self._share()
        on = torch.is_grad_enabled()
        self._armed |= on
        self._syncing |= on and syncing
        if on:
            for tap in self._taps.values():
                if tap.enabled:
                    tap.put()
            if self.observer is not None:
                self.observer.begin()

    def _after_a_break(self) -> None:
        """Catch nothing any more if DDP may not reduce again, which it does not say: nobody would write the gradient.

        So it is with a static graph, once a backward pass has broken off.
        """
        ddp = self.ddp
        if ddp is not None and ddp.static_graph:
            _log.warning(
                "a backward pass has broken off, and DDP with static_graph=True may never reduce gradients again "
                "(PyTorch's DDP says nothing): wrap the model anew, or let static_graph=False"
            )
            self._bar("a backward pass has broken off, from which a static graph of DDP's may not recover")

    def _bar(self, why: str) -> None:
        for tap in self._taps.values():
            tap.barred = tap.barred or why

    def _proves(self, name: str) -> bool:
        """Whether a layer's gradient is exchanged both ways in this step, and compared."""
        return name in self._proving or (
            name == self._verified and name in self._routes and self._routes[name].codec.lossless
        )

    def end(self) -> None:
        """A forward pass of the DDP model ends. Layers that are called again in the backward pass stay tapped."""
        if not any(tap.again for tap in self._taps.values()):
            self._close()

    def _close(self) -> None:
        for tap in self._taps.values():
            tap.remove()
            tap.again = False

    def _note(self, tap: Tap) -> None:
        """A layer goes as dense gradient in this step; remember why."""
        count, _ = self._remarks.get(tap.name, (0, ""))
        self._remarks[tap.name] = count + 1, tap.why or "it had gradient besides that of its rows"
        tap.foreign, tap.why = False, ""

    def differences(self) -> dict[str, float]:
        """Layer that was to be proved → how far the gradient that its rows made was from the true one in the last step.

        In multiples of what rounding explains, so at most 1 is good; negative where the layer had gradient besides its
        rows, so that nothing could be compared. To be asked when all exchanges have come through.
        """
        found = {name: self._proofs.get(name) for name in self._proving}
        return {n: -1.0 if p is None or p.summed or p.difference is None else p.difference for n, p in found.items()}

    @property
    def remarks(self) -> dict[str, str]:
        """Layer → in how many steps it went as dense gradient because of this rank, and why the last time."""
        return {name: f"dense in {count} steps: {why}" for name, (count, why) in self._remarks.items()}

    def _trip(self, name: str) -> FactorRounds:
        if name not in self._trips:
            weight, route = self._taps[name].leaves[0], self._routes[name]
            n, m = weight.shape
            sending = BY_ROWS[route.exchange].sending(route.codec, n, m, self._world)
            seeds = functools.partial(self._seeds_of, name, route.codec)
            self._trips[name] = FactorRounds(sending, self._habits[name], weight.device, seeds)
            self._trips[name].proving = self._proves(name)
        return self._trips[name]

    def _seeds_of(self, name: str, codec: Compressor) -> tuple[int, int]:
        seeds = self._seeds()
        if not codec.random or seeds is None:
            return 0, 0
        drawn = seeds(name)
        return drawn.of(codec, self._world.rank, "u"), drawn.of(codec, self._world.rank, "v")

    def _ordered(self) -> RowOrder:
        return InterleavedOrder() if self._among_buckets else StepOrder(list(self._routes))

    def _load(self, name: str) -> None:
        """All rows of a layer have come, as far as is known: they are what leaves when its turn has come."""
        if name in self._loaded:
            return
        tap = self._taps[name]
        dirty = tap.foreign or (not tap.grad_is_rows and has_gradient(tap.leaves))
        if dirty:
            if not tap.foreign and accelerator(tap.leaves[0].device) is not None:
                tap.why = "its grad was there before the exchange: let zero_grad() set it to None"
            self._note(tap)
        self._loaded.add(name)
        self._trip(name).load(tap.take(), dirty)

    def _start(self, due: Sequence[str]) -> None:
        for name in due:
            self._trip(name).start(self._group)
