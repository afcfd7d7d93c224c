"""``make fuzz``: a million damaged messages, each of which is a frame or a named error, in bounded time and memory.

The suite does some thousands (tests/commlib/messaging/test_frame.py). Prints how many were still frames.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import tracemalloc

from commlib.messaging.frame import encode
from tests.support.frame_samples import FRAMES, mutated, survives

_LONGEST_S, _MOST_BYTES = 0.5, 1 << 20  # for one message


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=time.time_ns() % (1 << 32))
    given = parser.parse_args()
    print(f"{given.messages:,} messages, --seed {given.seed}", flush=True)
    rng, sent = random.Random(given.seed), [encode(f) for f in FRAMES.values()]
    alive, longest, began = 0, 0.0, time.monotonic()
    tracemalloc.start()
    for n in range(given.messages):
        message = mutated(rng.choice(sent), rng)
        tracemalloc.reset_peak()
        held, start = tracemalloc.get_traced_memory()[0], time.perf_counter()
        try:
            alive += survives(message)
        except BaseException:
            print(f"message {n}: {message!r}", file=sys.stderr)
            raise
        took, peak = time.perf_counter() - start, tracemalloc.get_traced_memory()[1] - held
        longest = max(longest, took)
        if took > _LONGEST_S or peak > _MOST_BYTES:
            print(f"message {n} took {took:.3g} s and {peak:,} bytes: {message!r}", file=sys.stderr)
            return 1
        if (n + 1) % 100_000 == 0:
            print(f"{n + 1:,}: {time.monotonic() - began:.0f} s, {alive:,} still frames", flush=True)
    print(f"all {given.messages:,}: a frame ({alive:,}) or a ProtocolError; the longest took {longest * 1e3:.1f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
