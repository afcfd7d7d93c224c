"""Loops for the CPU, compiled by numba; kept on disk, so that what one process has compiled the next one loads."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np

_log = logging.getLogger("commlib")

F = TypeVar("F", bound=Callable[..., Any])

Floats = np.ndarray[Any, np.dtype[np.float32]]
Doubles = np.ndarray[Any, np.dtype[np.float64]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Words = np.ndarray[Any, np.dtype[np.int32]]
Places = np.ndarray[Any, np.dtype[np.int64]]
Scalar = Any
"""One number, of the type that numba infers: in Python, without numba, it would be another."""


def jit(loop: F) -> F:
    """Compiles a loop at its first call. It holds no GIL, and IEEE arithmetic as written: nothing fused or reordered.

    numba's own cache knows a function by its file alone and would keep one whose callee in another file has changed:
    so all lie in a folder that is named after all the files. ``NUMBA_CACHE_DIR`` moves it.
    """
    config: Any = numba.config
    given = config.CACHE_DIR
    folder = _cache(given)
    config.CACHE_DIR = str(folder or given)
    try:
        return cast(F, numba.njit(nogil=True, cache=folder is not None, error_model="numpy")(loop))
    finally:
        config.CACHE_DIR = given


@functools.cache
def _cache(chosen: str) -> Path | None:
    """Where compiled loops are kept; None, and every process compiles its own, where nothing can be written."""
    try:
        folder = Path(chosen or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "commlib" / _digest()
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
        reason = f"{folder} is not writable"
    except (OSError, RuntimeError) as e:  # RuntimeError: nobody knows this user's home
        reason = str(e)
    _log.warning("compiled loops are not kept, so each process compiles them (%s): set NUMBA_CACHE_DIR", reason)
    return None


def _digest() -> str:
    """Digest of all that is compiled, and of what compiles it."""
    texts = [file.read_bytes() for file in sorted(Path(__file__).parents[1].rglob("*.py"))]
    return hashlib.blake2b(b"\0".join([numba.__version__.encode(), *texts]), digest_size=8).hexdigest()
