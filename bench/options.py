"""Options that several benchmarks have, each said and checked once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commlib.errors import unknown
from commlib.exchange.rate_limit import RateLimit

_BACKENDS = ("gloo", "nccl", "zmq")
_WHICH = "gloo, zmq, or nccl, where ranks may share a GPU."


def _known(backend: str) -> str:
    if backend not in _BACKENDS:
        raise ValueError(unknown("backend", backend, _BACKENDS))
    return backend


def _above_nought(mib: float | None) -> float | None:
    if mib is not None and not mib > 0:
        raise ValueError(f"--bucket-cap-mb must be above 0, got {mib:g}")
    return mib


def _limit(text: str | None) -> str | None:
    try:
        RateLimit.of(text)
    except ValueError as e:
        raise ValueError(f"--{e}") from e
    return text


Ranks = Annotated[int | None, typer.Option("--ranks", help="Ranks on this machine; under torchrun it decides. [2]")]
Hosts = Annotated[int | None, typer.Option("--hosts", help="Emulated hosts instead; needs root and iproute2.")]
Rate = Annotated[str | None, typer.Option("--rate", help="Of each host's link: 50mbit, 1gbit … [no limit]")]
PerHost = Annotated[int, typer.Option("--ranks-per-host", help="Ranks on each emulated host.")]

Backend = Annotated[str, typer.Option("--backend", help=_WHICH, callback=_known)]
BucketCap = Annotated[
    float | None,
    typer.Option("--bucket-cap-mb", help="Size of DDP's buckets in MiB. [DDP's]", callback=_above_nought),
]

Limit = Annotated[
    str | None,
    typer.Option(
        "--limit", metavar="RATE", help="What each rank may send by commlib, as 50mbit. [no limit]", callback=_limit
    ),
]
Levels = Annotated[
    bool, typer.Option("--hierarchy", help="commlib sums inside each node first; nodes as torchrun or the lab say.")
]

Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw it too: .png, .svg or .pdf; needs matplotlib.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line instead of a table.")]
Save = Annotated[
    Path | None, typer.Option("--save", metavar="FOLDER", help="Keep the figures there, for bench report and compare.")
]
