"""Every error commlib raises about the world, in one tree.

::

    Exception
    ├── ValueError, TypeError      the caller's mistake: a bad spec, shape, dtype or option
    └── RuntimeError               what torch.distributed raises, and so do its users expect
        └── CommlibError           the world's: other ranks, files, the network
            ├── PlanMismatch           ranks attached different codecs, models or commlib versions
            ├── PeerLost               a rank did not answer, or left, before the deadline
            │   └── StoreSilent            the store in which ranks meet does not answer
            ├── ProtocolError          what a peer sent is not what was agreed on
            ├── AuthenticationError    a key that is missing, not allowed, or readable by others
            ├── ReplicasDiverged       ranks hold other values of a parameter than others
            ├── WrongGradient          what a layer's exchange made is not its gradient (verify=)
            ├── CheckpointMismatch     a checkpoint that does not fit this model or set-up
            ├── MissingDependency      an optional package is needed; the message says what to install
            ├── LogFailed              a log that cannot be begun (commlib.monitoring.log_writers)
            ├── SnapshotFailed         a snapshot that cannot be written, or read (commlib.server.storage.snapshot)
            └── TraceFailed            a trace that cannot be written, or merged (commlib.telemetry.trace)

A message names what was wrong, what is known, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class CommlibError(RuntimeError):
    """Base of the errors that are not the caller's fault."""


class PlanMismatch(CommlibError):
    """Ranks disagree about what they exchange; both sides are named."""


class PeerLost(CommlibError):
    """A rank is missing: it never came, it left, or it answered too late.

    Attributes:
        rank: which, where it is one that is known to be gone.
        roll_called: whether its words say what a roll call has found.
        cut_off: whether that rank may live, and a connection to it broke with messages under way.
    """

    rank: int | None = None
    roll_called: bool = False
    cut_off: bool = False


class StoreSilent(PeerLost):
    """The key-value store of a process group, or of a parameter server's job, does not answer.

    Who keeps it (rank 0, torchrun's agent on its host, ``commlib server meet``) is stopped, gone or out of reach.
    """


class ProtocolError(CommlibError):
    """A message that is no message of ours, or not the one that is due; it says what is wrong with it."""


class AuthenticationError(CommlibError):
    """A key that is missing, that a peer does not allow, or that others may read."""


class WrongGradient(CommlibError):
    """The exchange of a layer made another gradient than it has, found by a check that ``verify=`` asks for.

    Attributes:
        layer: name of the layer or parameter.
    """

    def __init__(self, message: str, layer: str) -> None:
        super().__init__(message)
        self.layer = layer

    def __reduce__(self) -> tuple[type[WrongGradient], tuple[str, str]]:
        return WrongGradient, (str(self), self.layer)


class ReplicasDiverged(CommlibError):
    """Ranks hold other values of a parameter than others.

    Attributes:
        layer: the first such parameter, in the model's order.
        layers: all of them.
        holders: the ranks that hold the same values of it, most ranks first; lists of ranks.
        step: how many steps had been taken; None where nobody counts them.
    """

    def __init__(self, message: str, layers: Sequence[str], holders: Sequence[Sequence[int]], step: int | None) -> None:
        super().__init__(message)
        self.layer, self.layers = layers[0], list(layers)
        self.holders, self.step = [list(ranks) for ranks in holders], step

    def __reduce__(self) -> tuple[type[ReplicasDiverged], tuple[object, ...]]:
        return type(self), (str(self), self.layers, self.holders, self.step)


class CheckpointMismatch(CommlibError):
    """A state dict that belongs to another model, codec or set of ranks."""


class MissingDependency(CommlibError):
    """An optional package is not installed."""


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """The message for a name that is not known: what there is, and the nearest to it.

    >>> unknown("compressor", "onebitt", ["topk", "onebit"])
    "unknown compressor 'onebitt' (known: onebit, topk; did you mean 'onebit'?)"
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {name!r} (known: {', '.join(names) or 'none'}{hint})"


def check_numbers(timeout: float, **counts: object) -> None:
    """Raises ValueError if the timeout is not above 0, or one of the counts no whole number ≥ 0."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} must be a whole number ≥ 0, got {value!r}")
    if not timeout > 0:
        raise ValueError(f"timeout must be a number of seconds > 0, got {timeout!r}")
