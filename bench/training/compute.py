"""``--compute``: whether the cores do the arithmetic, or only wait as long as an accelerator would need."""

from __future__ import annotations


def parse_compute(text: str) -> float | None:
    """Seconds of the simulated backward pass; None for ``real``.

    Raises:
        ValueError: neither ``real`` nor ``simulated:MS``.

    >>> parse_compute("simulated:50")
    0.05
    """
    kind, colon, number = text.partition(":")
    if text == "real":
        return None
    if kind != "simulated" or not colon:
        raise ValueError(f"--compute is real or simulated:MS (as simulated:50), got {text!r}")
    try:
        milliseconds = float(number)
    except ValueError:
        raise ValueError(f"--compute simulated:MS takes a number of milliseconds, got {number!r}") from None
    if not 0 <= milliseconds <= 60_000:
        raise ValueError(f"--compute simulated:MS takes 0 to 60000 milliseconds, got {number}")
    return milliseconds / 1e3
