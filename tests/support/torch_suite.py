"""PyTorch's own distributed tests, on commlib: of DDP with every model attached, and of collectives over ``zmq``.

    python -m tests.support.torch_suite ddp ROUTE FOLDER TEST …            ROUTE: plain, none, auto, factors …
    python -m tests.support.torch_suite collectives BACKEND FOLDER TEST …  BACKEND: gloo, zmq

Prints a line for each test: its name, a tab, and ``ok``, ``skipped: WHY`` or ``failed: WHY``. FOLDER gets what they
and their ranks say, in ``said``. The tests are those of ``torch.testing._internal.distributed.distributed_test``, of
the PyTorch that is installed, with ranks that are forked from this process and on the CPU: what asks for a GPU gets
none, so that those tests of DDP run, too, for which PyTorch wants several GPUs. A test counts as one of DDP if a plain
run of it makes a DDP model without a hook of its own.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal import common_distributed, common_utils

import commlib

RANKS = 4
_FACTORIES = ("arange", "empty", "eye", "full", "ones", "rand", "randint", "randn", "tensor", "zeros")
_PATIENCE_S = 30  # for one test


class Outcomes(unittest.TestResult):
    """Result that prints each test as it ends."""

    def _said(self, test: unittest.TestCase, what: str) -> None:
        print(f"{test._testMethodName}\t{what}", file=_OUT, flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:
        """Passed."""
        self._said(test, "ok")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        """PyTorch does not run it here."""
        self._said(test, f"skipped: {' '.join(reason.split())}")

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        """Failed: the last line of the first rank's error."""
        self._said(test, f"failed: {_why(str(err[1]))}")

    addError = addFailure


_OUT: Any = sys.stdout


def _why(text: str) -> str:
    """The line of a traceback that names the error."""
    lines = [line for line in text.splitlines() if re.match(r"\w[\w.]*(Error|Exception|Lost|Mismatch|Skip)\w*\b", line)]
    return (lines or text.strip().splitlines() or ["no reason"])[0][:300]


# -- on the CPU -------------------------------------------------------------------------------------


def skip_none() -> None:
    """Have no test skipped for want of GPUs; before the tests are imported."""
    theirs: Any = common_distributed
    for name in ("skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu", "require_n_gpus_for_nccl_backend"):
        setattr(theirs, name, lambda *_: lambda test: test)
    theirs.skip_if_no_gpu = lambda test: test
    theirs.init_multigpu_helper = lambda size, _: {rank: [rank] for rank in range(size)}
    common_utils.skip_but_pass_in_sandcastle_if = _skips_if


def _skips_if(condition: bool, reason: str) -> Callable[[Any], Any]:
    """Gloo has learnt since what these tests say only MPI has."""
    return _SKIPS_IF(condition and not reason.startswith("Only MPI"), reason)  # type: ignore[no-any-return]


_SKIPS_IF: Any = common_utils.skip_but_pass_in_sandcastle_if


def on_cpu() -> None:
    """Have what asks for a GPU get none; after the tests are imported."""
    anything: Any = torch
    anything.cuda.set_device = anything.cuda.synchronize = lambda *_, **__: None
    anything.cuda.device = lambda *_: contextlib.nullcontext()
    for owner in (anything.nn.Module, anything.Tensor):
        owner.cuda = lambda self, *_, **__: self
        owner.to = functools.partialmethod(_moved, owner.to)
    for name in _FACTORIES:
        setattr(torch, name, functools.partial(_made, getattr(torch, name)))


def _gpu(device: Any) -> bool:
    return type(device) is int or str(device).startswith("cuda")


def _moved(self: Any, to: Callable[..., Any], *args: Any, **options: Any) -> Any:
    args = tuple(a for a in args if not _gpu(a))
    options = {k: v for k, v in options.items() if not (k == "device" and _gpu(v))}
    return to(self, *args, **options) if args or options else self


def _made(make: Callable[..., Any], *args: Any, device: Any = None, **options: Any) -> Any:
    return make(*args, device=None if _gpu(device) else device, **options)


# -- on commlib -------------------------------------------------------------------------------------


def attach_all(route: str, marks: Path) -> None:
    """Have every DDP model attached to commlib as soon as it is made; ``plain``: not.

    Args:
        route: as ``commlib.attach`` takes it.
        marks: folder in which a test leaves ``NAME.made``, and ``NAME.hooked`` if it has hooks of its own.
    """
    made = DistributedDataParallel.__init__

    def init(self: Any, module: Any, *args: Any, **options: Any) -> None:
        made(self, module, *args[2:], **{k: v for k, v in options.items() if k not in ("device_ids", "output_device")})
        (marks / f"{os.environ['TORCH_TEST']}.made").touch()
        if route != "plain":
            commlib.attach(self, route, min_size=0)

    anything: Any = DistributedDataParallel
    anything.__init__ = init
    for name in ("register_comm_hook", "_register_builtin_comm_hook", "_register_fused_optim"):
        setattr(anything, name, functools.partialmethod(_hooked, getattr(anything, name), marks))


def _hooked(self: Any, register: Callable[..., Any], marks: Path, *args: Any, **options: Any) -> Any:
    if getattr(args[0] if args else None, "attached", None) is None:  # not commlib's own
        (marks / f"{os.environ['TORCH_TEST']}.hooked").touch()
    return register(self, *args, **options)


def over(backend: str) -> None:
    """Have process groups be of this backend where the tests ask for Gloo."""
    if backend == "gloo":
        return
    for name in ("init_process_group", "new_group"):
        made = getattr(dist, name)

        def swapped(*args: Any, made: Any = made, **options: Any) -> Any:
            if options.get("backend", "") == "gloo":
                options["backend"] = backend
            return made(*args, **options)

        setattr(dist, name, swapped)


# -- the tests --------------------------------------------------------------------------------------


def suite() -> type[unittest.TestCase]:
    """The tests, with ranks that are forked."""
    from torch.testing._internal.distributed import distributed_test  # it reads the environment

    class Forked(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            os.environ["TORCH_TEST"] = self._testMethodName
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

    return Forked


def run(kind: str, way: str, names: Sequence[str], marks: Path) -> None:
    """Run tests in this process, each with its ranks."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(RANKS), DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(_PATIENCE_S))
    os.environ["TEMP_DIR"] = tempfile.mkdtemp(dir=marks)
    torch.set_num_threads(1)
    skip_none()
    tests = suite()
    on_cpu()
    attach_all(way if kind == "ddp" else "plain", marks)
    over("gloo" if kind == "ddp" else way)
    os.dup2(os.open(marks / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    for name in (name for name in names if hasattr(tests, name)):  # some are made for several values, by other names
        tests(name).run(Outcomes())


_OF_DDP = re.compile(
    "ddp|DistributedDataParallel|grad|graph|unused|control_flow|sync_bn|SyncBatchNorm|SGD|powerSGD", re.I
)
"""Names of tests that may make a DDP model."""


def compare(kind: str, first: str, others: Sequence[str], one_in: int = 1) -> tuple[int, dict[str, dict[str, str]]]:
    """How tests end that pass in a first way, each way in a process of its own.

    Args:
        kind: ``ddp`` or ``collectives``.
        first: way, as of the command.
        others: ways.
        one_in: of so many tests one is run.

    Returns:
        How many pass in the first way; and for each of the other ways name → outcome of those that do not pass so.
    """
    with tempfile.TemporaryDirectory() as folder:
        marks = Path(folder)
        names = [name for name in every_name() if bool(_OF_DDP.search(name)) == (kind == "ddp")][::one_in]
        passed = [name for name, how in outcomes(kind, first, names, marks).items() if how == "ok"]
        if kind == "ddp":
            made, hooked = ({f.stem for f in marks.glob(f"*.{mark}")} for mark in ("made", "hooked"))
            passed = [name for name in passed if name in made - hooked]
        ended = {way: outcomes(kind, way, passed, marks) for way in others}
    missing = "no outcome"
    return len(passed), {
        way: {name: how for name in passed if (how := found.get(name, missing)) != "ok"} for way, found in ended.items()
    }


def every_name() -> list[str]:
    """Names of all tests, without importing them."""
    source = Path(str(importlib.util.find_spec("torch.testing").submodule_search_locations[0]))  # type: ignore[union-attr, index]
    text = (source / "_internal" / "distributed" / "distributed_test.py").read_text()
    return re.findall(r"^        def (test_\w+)\(", text, re.M)


def outcomes(kind: str, way: str, names: Sequence[str], marks: Path) -> dict[str, str]:
    """Name → outcome, of tests that run in a process of their own."""
    arguments = [sys.executable, "-m", "tests.support.torch_suite", kind, way, str(marks), *names]
    done = subprocess.run(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    return dict(line.split("\t", 1) for line in done.stdout.splitlines() if "\t" in line)


if __name__ == "__main__":
    _OUT = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what tests print is not a result
    run(sys.argv[1], sys.argv[2], sys.argv[4:], Path(sys.argv[3]))
