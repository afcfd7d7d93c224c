"""``make fuzz``: damaged inputs for all that reads bytes or text from outside: each is read, or refused by name.

Frames and messages of strangers, what members of a job leave in its store, files of snapshots, plans and keys, spec
strings. No input may take more than :data:`LONGEST_S` or :data:`MOST_BYTES`, or raise anything but what its reader says
that it raises. The suite does some hundreds of each (tests/integration/test_damaged_inputs.py).
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import dataclasses
import functools
import gc
import random
import shutil
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from commlib.codecs import registry
from commlib.errors import AuthenticationError, CommlibError, MissingDependency, ProtocolError
from commlib.messaging import keys, values
from commlib.messaging.frame import decode, encode
from commlib.planning import plan as plans
from commlib.planning.planner import make_plan
from commlib.planning.route import resolve
from commlib.runtime.layers import layer_specs
from commlib.runtime.optimizers import by_group
from commlib.server.job.job import ServerJob
from commlib.server.protocol import wire
from commlib.server.storage import serialization
from tests.support.frame_samples import FRAMES, mutated
from tests.support.message_samples import MESSAGES, state
from tests.support.tiers import slowness

LONGEST_S = 0.05
"""Seconds of a core as fast as usual that an input may take."""
MOST_BYTES = 8 << 20
"""Bytes that reading an input may hold at once."""

Parts = list[bytes]


@dataclasses.dataclass(frozen=True)
class Reader:
    """What reads something from outside.

    Args:
        sound: inputs that it reads, to be damaged.
        read: reads one.
        refuses: errors by which it refuses one.
    """

    sound: Sequence[Parts]
    read: Callable[[Parts], object]
    refuses: tuple[type[Exception], ...]


class TooMuch(AssertionError):
    """An input took too long, or too much memory."""


def _bytes(parts: Sequence[object]) -> Parts:
    return [bytes(memoryview(p)) for p in parts]  # type: ignore[arg-type]


def _plan() -> plans.Plan:
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    rules = {"0.weight": "topk:ratio=0.5@gather", "1.*": "none@factors"}
    return make_plan(layer_specs(model), rules, world=2, min_size=0)


def _job() -> ServerJob:
    model = nn.Linear(4, 4)
    recipes, chosen = by_group(torch.optim.AdamW(model.parameters(), lr=0.1), dict(model.named_parameters()))
    shapes = {n: (tuple(p.shape), "float32") for n, p in model.named_parameters()}
    return ServerJob(
        shapes, tuple(recipes), chosen, "ssp:3", 2, 1, 1, True, "go on", 10.0, 1 << 20, False, "none", "none"
    )


def _key_of(folder: Path, parts: Parts) -> object:
    (folder / "fuzzed.secret").write_bytes(b"".join(parts))
    (folder / "fuzzed.secret").chmod(0o600)
    return keys.load("fuzzed", folder)


def _allowed_of(folder: Path, parts: Parts) -> object:
    (folder / "allowed").write_bytes(b"".join(parts))
    return keys.allowed(folder)


def _values_of(parts: Parts) -> object:
    return values.unpack(parts[0] if parts else b"", memoryview(b"".join(parts[1:])))


@functools.cache
def readers() -> dict[str, Reader]:
    """All there are, by name."""
    folder = Path(tempfile.mkdtemp(prefix="commlib-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    pair = keys.create("fuzzed", folder)
    keys.allow(pair.public, "rank-0", folder)
    secret, allowed = (folder / "fuzzed.secret").read_bytes(), (folder / "allowed").read_bytes()
    head, rows = values.pack(
        {"about": {"step": 3, "of": [1, 2.5, "x", None]}, "cells": {"w": state(torch.optim.AdamW)}}
    )
    snapshot = serialization.pack("shard-1", 3, {"step": 3}, {"w": state(torch.optim.SGD)})
    specs = ("topk:ratio=0.01,values=int8", "powersgd:rank=2", "onebit:axis=tensor,ef=off", "qsgd:levels=4")
    routes = ("topk:ratio=0.01@gather", "none@factors", "onebit@scatter_gather")
    found = {
        "frame": Reader([_bytes(encode(f)) for f in FRAMES.values()], decode, (ProtocolError,)),
        "message": Reader([_bytes(wire.pack(m)) for m in MESSAGES], wire.unpack, (ProtocolError,)),
        "values": Reader([_bytes([head, *rows])], _values_of, (values.Unreadable,)),
        "snapshot": Reader(
            [_bytes(snapshot)],
            lambda parts: serialization.unpack(memoryview(b"".join(parts)), "shard-1", 3),
            (serialization.Torn, serialization.OtherVersion),
        ),
        "job": Reader([[_job().pack()]], lambda parts: ServerJob.unpack(b"".join(parts)), (CommlibError,)),
        "plan": Reader(
            [[plans.to_text(_plan()).encode()]],
            lambda parts: plans.from_text(b"".join(parts).decode(errors="replace"), "a plan"),
            (ValueError, MissingDependency),
        ),
        "key": Reader([[secret]], functools.partial(_key_of, folder), (AuthenticationError,)),
        "allowed": Reader([[allowed]], functools.partial(_allowed_of, folder), (AuthenticationError,)),
        "codec": Reader(
            [[s.encode()] for s in specs],
            lambda parts: registry.make(b"".join(parts).decode(errors="replace")),
            (ValueError, MissingDependency),
        ),
        "route": Reader(
            [[s.encode()] for s in routes],
            lambda parts: resolve(b"".join(parts).decode(errors="replace"), 2),
            (ValueError, MissingDependency),
        ),
    }
    for reader in found.values():
        for parts in reader.sound:
            reader.read(parts)  # or the first ones would be charged with what is imported for them
        with contextlib.suppress(*reader.refuses):
            reader.read([b"none"])
    return found


@contextlib.contextmanager
def measured() -> Iterator[None]:
    """Memory is counted inside, and no garbage is collected: that takes long in a large process, whoever made it."""
    tracemalloc.start()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        tracemalloc.stop()


def survive(reader: Reader, rng: random.Random) -> bool:
    """Damage an input and have it read; whether it still was one. Within :func:`measured`.

    Raises:
        TooMuch: it took too long, or too much memory.
        Exception: what it raised besides; a note has the input.
    """
    parts = _bytes(mutated(list(rng.choice(reader.sound)), rng))
    for pause_s in (0.0, 0.1, 1.0, 5.0):  # what takes long by itself does so each time, and no busy machine's doing
        time.sleep(pause_s)
        tracemalloc.reset_peak()
        held, start = tracemalloc.get_traced_memory()[0], time.thread_time()
        try:
            reader.read(parts)
            alive = True
        except reader.refuses:
            alive = False
        except Exception as e:
            e.add_note(f"input: {parts!r}")
            raise
        took, peak = time.thread_time() - start, tracemalloc.get_traced_memory()[1] - held
        longest = LONGEST_S * (slowness() if pause_s == 5.0 else 1.0)
        if took <= longest and peak <= MOST_BYTES:
            break
        if pause_s == 5.0 or peak > MOST_BYTES:
            raise TooMuch(f"{took:.3g} s and {peak:,} bytes: {parts!r}")
    return alive


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--messages", type=int, default=1_000_000, help="in all; a third of them are frames")
    parser.add_argument("--seed", type=int, default=time.time_ns() % (1 << 32))
    parser.add_argument("--only", choices=list(readers()), help="inputs of one kind")
    given = parser.parse_args()
    rng, began, wrong = random.Random(given.seed), time.monotonic(), 0
    kinds = {n: r for n, r in readers().items() if given.only in (None, n)}
    weights = {"frame": 8, "message": 8, "values": 4}
    whole = sum(weights.get(n, 1) for n in kinds)
    print(f"{given.messages:,} inputs, --seed {given.seed}", flush=True)
    for name, reader in kinds.items():
        count, alive = max(1, given.messages * weights.get(name, 1) // whole), 0
        try:
            with measured():
                for _ in range(count):
                    alive += survive(reader, rng)
        except Exception as e:
            wrong += 1
            print(f"{name}: {type(e).__name__}: {e} {' '.join(getattr(e, '__notes__', []))}", file=sys.stderr)
        else:
            print(
                f"{name}: {count:,} read ({alive:,}) or refused by name, {time.monotonic() - began:.0f} s", flush=True
            )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
