"""Figures as the manager says them."""

from __future__ import annotations

from collections.abc import Sequence

from commlib.messaging.link_model import Link


def ms(seconds: float) -> str:
    """``12.3 ms``."""
    return f"{seconds * 1e3:.3g} ms"


def mbit(link: Link) -> str:
    """What a link carries: ``200 Mbit/s``."""
    beta = link.all_reduce.beta
    return f"{8e-6 / beta:.3g} Mbit/s" if beta else "no limit that shows"


def some(names: Sequence[str]) -> str:
    """The first three, and how many more."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
