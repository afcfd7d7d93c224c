"""What ends a rank that hangs, whatever it hangs in."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Iterator

_GRACE_S = 2.0


@contextlib.contextmanager
def watched(name: str, limit_s: float, *, aloud: bool) -> Iterator[None]:
    """Ends this process if the block is not left within ``limit_s`` seconds.

    Such a hang cannot be undone from inside: threads of the backend wait for each other.

    Args:
        name: of the contender, for the message.
        aloud: say so on stderr; where a parent watches, it does.
    """

    def end() -> None:
        print(f"error: {name} hangs: its visit took more than {limit_s:.0f} s; leave it out", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    with open(os.devnull, "w") as nowhere:
        # A thread of its own outside the interpreter: it ends us even if somebody waits with the GIL held.
        faulthandler.dump_traceback_later(limit_s + (_GRACE_S if aloud else 0.0), exit=True, file=nowhere)
        if aloud:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()
            faulthandler.cancel_dump_traceback_later()
