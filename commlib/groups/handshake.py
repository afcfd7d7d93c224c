"""Do all ranks mean the same? Asked through the group's store: it works on any backend, has a deadline, and
knows who has not answered.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack

from commlib.errors import CommlibError, PeerLost, PlanMismatch, StoreSilent
from commlib.groups.store import DeadlineStore, store_of
from commlib.groups.world import World

ROLL_CALL_S = 2.0
"""Seconds that a roll call takes at most, whether ranks are missing or the store does not answer."""

_log = logging.getLogger("commlib")
_FAILED = "failed"
_LOOK_S = 0.5  # between two looks who is gone
ATTACH = "attach"
_DID = {ATTACH: "attached", "swap": "swapped to", "detach": "detached at"}


def meeting_place(group: Any, world: World) -> str:
    """A key for the next :func:`agree`: the n-th call on one rank meets the n-th call on every other."""
    return f"commlib/{store_of(group).add(f'commlib/count/{world.rank}', 1)}"


def share(group: Any, key: str, mine: Mapping[str, str], world: World, timeout: float) -> list[dict[str, str]]:
    """Gather what every rank says of itself, in rank order.

    Args:
        group: process group.
        key: the same on all ranks; :func:`agree` may use it too.
        mine: name → value.
        world: this rank.
        timeout: seconds to wait for the others.

    Raises:
        PlanMismatch: a rank has failed before.
        PeerLost: a rank did not answer in time; the message names it.
    """
    store = store_of(group).within(timeout)
    tell(group, key, mine, world)
    _await(group, f"{key}/self", world, timeout, ATTACH)
    said = [msgpack.unpackb(store.get(f"{key}/self/{r}")) for r in range(world.size)]
    for other, text in enumerate(said):
        if _FAILED in text:
            raise PlanMismatch(f"rank {other} failed to attach (this is rank {world.rank}): {text[_FAILED]}")
    return said


def tell(group: Any, key: str, mine: Mapping[str, str], world: World) -> None:
    """This rank's part of :func:`share`, for one that has no need of the others'."""
    store_of(group).set(f"{key}/self/{world.rank}", msgpack.packb(dict(mine)))


def agree(group: Any, key: str, mine: Mapping[str, str], world: World, timeout: float, doing: str = ATTACH) -> None:
    """Returns when every rank has published the same description under ``key``.

    Args:
        group: process group.
        key: the same on all ranks, used once.
        mine: what this rank is about to do; name → value.
        world: this rank.
        timeout: seconds to wait for the others.
        doing: attach, swap or detach.

    Raises:
        PlanMismatch: some rank's description differs; every rank raises it, naming both sides.
        PeerLost: a rank did not answer in time; the message names it.
    """
    store = store_of(group).within(timeout)
    packed: bytes = msgpack.packb(dict(mine))
    digest = hashlib.sha256(packed).digest()
    store.set(f"{key}/text/{world.rank}", packed)
    store.set(f"{key}/digest/{world.rank}", digest)
    _await(group, f"{key}/digest", world, timeout, doing)
    for other in range(world.size):
        if store.get(f"{key}/digest/{other}") != digest:
            theirs = msgpack.unpackb(store.get(f"{key}/text/{other}"))
            if _FAILED in theirs:
                raise PlanMismatch(f"rank {other} failed to {doing} (this is rank {world.rank}): {theirs[_FAILED]}")
            raise PlanMismatch(f"ranks {_DID[doing]} different things: {difference(mine, theirs, world.rank, other)}")


def publish_failure(group: Any, key: str, world: World, error: BaseException) -> None:
    """Tells the ranks that wait in :func:`share` or :func:`agree` why this one will not come."""
    packed: bytes = msgpack.packb({_FAILED: str(error)})
    store = store_of(group)
    if not store.check([f"{key}/self/{world.rank}"]):  # else what it has said stands, for those who read it later
        store.set(f"{key}/self/{world.rank}", packed)
    store.set(f"{key}/text/{world.rank}", packed)
    store.set(f"{key}/digest/{world.rank}", hashlib.sha256(packed).digest())


def publish_absence(group: Any, error: BaseException) -> None:
    """As :func:`publish_failure`, for a failure that comes before this rank has a key. ``group`` may be None."""
    if group is not None:
        world = World(group.rank(), group.size())
        publish_failure(group, meeting_place(group, world), world, error)


def wait_for_all(store: DeadlineStore, key: str, world: World, timeout: float, group: Any = None) -> list[int]:
    """The ranks that have not set ``key/rank`` after ``timeout`` seconds, or are gone.

    Args:
        store: where they set it.
        key: the same on all ranks.
        world: this rank.
        timeout: seconds.
        group: process group that may know of ranks that are gone ("zmq" does); they are not waited for.

    Raises:
        StoreSilent: the store does not answer.
    """
    return wait_for(store, {r: f"{key}/{r}" for r in range(world.size)}, timeout, group)


def wait_for(store: DeadlineStore, keys: Mapping[int, str], timeout: float, group: Any = None) -> list[int]:
    """The same for any keys: rank → what it sets."""
    knows = hasattr(group, "peers_gone")
    end, waiting, lost = time.monotonic() + timeout, dict(keys), set[int]()
    while True:
        left = max(0.0, end - time.monotonic())
        try:
            store.wait(list(waiting.values()), datetime.timedelta(seconds=min(left, _LOOK_S) if knows else left))
            return []
        except StoreSilent:
            raise
        except RuntimeError:
            waiting = {r: key for r, key in waiting.items() if not store.check([key])}
        if not waiting or not knows or left <= 0 or lost & waiting.keys():
            return list(waiting)
        lost = set(peers_gone(group))  # what they said before may have come to the store since it was asked


def roll_call(group: Any, key: str, world: World, known: str = "") -> str:
    """After a failure: who else is still there, in words, which are left for the others too. Never raises.

    It takes :data:`ROLL_CALL_S` at most; ranks that wait look more often than that (``runtime.autograd.LOOK_S``).

    Args:
        group: whose store is used.
        key: of the roll call.
        world: this rank.
        known: told to the others before it.
    """
    return roll_call_at(store_of(group), key, world, known)


def explained(group: Any, key: str, world: World, error: BaseException) -> str:
    """An error and who is missing, in words that are left for the others too. Never raises.

    Of a backend's error the others are told who is missing only: they will have one of their own. What we have found
    out (a shard that is gone) may be known to nobody else.

    The error is logged at once: torchrun ends the other ranks of its host as soon as one has died, in the middle of a
    roll call.

    An error of the process group ``"zmq"`` says that already: it has called the roll of its own.
    """
    if isinstance(error, PeerLost) and error.roll_called:
        announce(group, key, f"rank {world.rank}: {error}")
        return str(error)
    _log.warning("rank %d: %s; asking which ranks are still there", world.rank, error)
    known = f"rank {world.rank}: {error}; " if isinstance(error, CommlibError) else ""
    return f"{error}; {roll_call(group, key, world, known)}"


def roll_call_at(store: DeadlineStore, key: str, world: World, known: str = "") -> str:
    """The same at a store."""
    store = store.within(ROLL_CALL_S)
    try:
        _call_and_answer(store, key, world)
        missing = wait_for_all(store, key, world, ROLL_CALL_S)
        words = f"{named(missing)} did not answer a roll call" if missing else "all ranks still answer a roll call"
        store.set(f"{key}/verdict", known + words)
    except Exception as e:
        return f"the store that would know who is missing does not answer either ({type(e).__name__})"
    return words


def begin_roll_call(store: DeadlineStore, key: str, world: World) -> None:
    """The first part of :func:`roll_call_at`, for a rank with something to do before it can wait. Never raises."""
    with contextlib.suppress(Exception):  # the roll call itself will say so
        _call_and_answer(store.within(ROLL_CALL_S), key, world)


def _call_and_answer(store: DeadlineStore, key: str, world: World) -> None:
    store.set(f"{key}/called", b"")
    store.set(f"{key}/{world.rank}", b"here")


def answer_roll_call(group: Any, key: str, world: World) -> str:
    """Says "here" if somebody has called: for a rank that waits, perhaps for the rank that is gone. Never raises.

    Returns:
        What the roll call found, once it is over. Whoever called has given up, so to wait for it is of no use: a rank
        that shares no process group with the one that is gone would not learn it in any other way.
    """
    with contextlib.suppress(Exception):  # the store may be gone; the wait itself will tell
        store = store_of(group).within(ROLL_CALL_S)
        if store.check([f"{key}/called"]):
            store.set(f"{key}/{world.rank}", b"here")
            if store.check([f"{key}/verdict"]):
                words: str = store.get(f"{key}/verdict").decode()
                return words
    return ""


def announce(group: Any, key: str, why: str) -> None:
    """Tell ranks that wait, and look with :func:`answer_roll_call`, why this one has given up. Never raises."""
    with contextlib.suppress(Exception):
        store = store_of(group).within(ROLL_CALL_S)
        store.set(f"{key}/verdict", why.encode())
        store.set(f"{key}/called", b"here")


def named(ranks: list[int]) -> str:
    """Ranks in words."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _await(group: Any, key: str, world: World, timeout: float, doing: str) -> None:
    missing = wait_for_all(store_of(group).within(timeout), key, world, timeout, group)
    if missing:
        raise PeerLost(
            f"commlib.{doing}: {named(missing)} of {world.size} did not {doing} {within(group, missing, timeout)} "
            f"(this is rank {world.rank}). Every rank must {doing} its models in the same order."
        )


def peers_gone(group: Any) -> dict[int, str]:
    """Ranks that a process group knows to be gone, and why; of a group that cannot know it: none."""
    found: dict[int, str] = group.peers_gone() if hasattr(group, "peers_gone") else {}
    return found


def within(group: Any, missing: Sequence[int], timeout: float) -> str:
    """Why ranks are not waited for any longer, in words: the time is over, or they are gone."""
    gone = peers_gone(group)
    why = "; ".join(gone[r] for r in missing if r in gone)
    return f"and will not: {why}" if why else f"within {timeout:g} s"


def difference(mine: Mapping[str, str], theirs: Mapping[str, str], me: int, other: int) -> str:
    """Difference between what two ranks say, in words; at most three names."""
    names = [n for n in {**mine, **theirs} if mine.get(n) != theirs.get(n)]
    sides = ((n, mine.get(n, "nothing"), theirs.get(n, "nothing")) for n in names[:3])
    shown = "; ".join(f"{n}: rank {me} has {a!r}, rank {other} has {b!r}" for n, a, b in sides)
    more = f"; and {len(names) - 3} more" if len(names) > 3 else ""
    return shown + more
