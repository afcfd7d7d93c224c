"""``python -m commlib.bench.chaos``."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from .run import ChaosRun


def main(
    runs: Annotated[int, typer.Option(help="How many.")] = 10,
    seed: Annotated[int, typer.Option(help="Of the first run; each is another.")] = 0,
    verbose: Annotated[bool, typer.Option("--verbose", help="What members log.")] = False,
) -> None:
    """Train with a parameter server, kill and stop its processes at random moments, and look whether it ends right."""
    for each in range(seed, seed + runs):
        begun, run = time.monotonic(), ChaosRun(each, quiet=not verbose)
        run.go()
        print(f"run {each}: {run.spec}, {', '.join(run.events)}: right, {time.monotonic() - begun:.1f} s", flush=True)
    print(f"{runs} runs ended right")


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
