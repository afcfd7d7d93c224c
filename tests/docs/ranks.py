"""What a documented command starts, forked instead of started anew (tests/support/forked_ranks.py): torchrun's ranks, a
lab's.

A rank gets what it would get: its words, torchrun's environment, its host's network and cores. What starts it is tested
elsewhere (tests/bench/lab, and the consoles of tests/docs/test_blocks.py).
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from commlib.bench.lab import Lab, command
from commlib.bench.lab.run import run_command
from commlib.bench.launch import processes
from commlib.cli.main import main
from tests.support import forked_ranks

SECONDS = 300.0  # for all ranks of one command


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, in this test."""
    monkeypatch.setattr(processes, "start", forked_ranks.start)
    monkeypatch.setattr(command, "run_command", in_lab)


def in_lab(lab: Lab, argv: Sequence[str], schedule: Sequence[Any] = (), **options: Any) -> Sequence[int | None]:
    """In the place of ``run_command`` of ``commlib bench lab``."""
    if schedule or argv[0] not in ("commlib", "python"):
        return _ANEW(lab, argv, schedule, **options)
    port = lab.start()
    found: list[int] = processes.run_ranks(
        program,
        lab.world_size,
        (os.getcwd(), list(argv)),
        env=lambda rank: lab.environment(rank, port),
        prefix=lab.prefix,
        timeout=SECONDS,
    )
    return found


_ANEW = run_command


def torchrun(words: Sequence[str]) -> list[int]:
    """What its ranks exit with; all nodes are this machine."""
    asked = get_args_parser().parse_args(list(words))
    nodes, each = int(str(asked.nnodes).partition(":")[0]), int(asked.nproc_per_node)
    argv = ["python", *(["-m"] if asked.module else []), asked.training_script, *asked.training_script_args]
    found: list[int] = processes.run_ranks(
        program,
        nodes * each,
        (os.getcwd(), argv),
        env=lambda rank: {
            "LOCAL_RANK": str(rank % each),
            "GROUP_RANK": str(rank // each),
            "LOCAL_WORLD_SIZE": str(each),
            "GROUP_WORLD_SIZE": str(nodes),
        },
        timeout=SECONDS,
    )
    return found


def program(folder: str, argv: Sequence[str]) -> int:
    """Be ``python`` or ``commlib`` with these words; what it would exit with."""
    os.chdir(folder)
    name, *args = argv
    try:
        if name == "commlib" or args[:2] == ["-m", "commlib"]:
            main(args if name == "commlib" else args[2:])
        elif args[0] == "-m":
            sys.argv = args[1:]
            runpy.run_module(args[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = args, str(Path(args[0]).resolve().parent)
            runpy.run_path(args[0], run_name="__main__")
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else int(e.code is not None)
    return 0
