"""The pages that follow a bucket and a push name the files that such a step runs, and no others."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlib
import commlib.compressors
import commlib.transports
from commlib.groups.world import World
from tests.support.rank_pool import Fleet
from tests.support.server_cluster import Cluster

pytestmark = pytest.mark.checkout

DOCS = Path(__file__).parents[2] / "docs"
STEPS = 4  # in the last one all that is made once is there
OTHERS = "commlib-member", "commlib-store"
"""Threads of the heartbeats and of their calls of the store, which may come by meanwhile."""
LATE = {"commlib/groups/handshake.py"}
"""Who has waited for a second looks whether another rank calls the roll."""


BEGINNING = "server/shard/serve.py"
"""Who begins a shard, and has it compile its kernels: on a slow machine that may still be under way."""


def begins(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.endswith(BEGINNING):
        frame = frame.f_back
    return frame is not None


def told(page: str) -> list[str]:
    """Files of a page's table, in its order."""
    rows = [line for line in (DOCS / page).read_text().splitlines() if line.startswith("| `")]
    names = [re.findall(r"`([\w/]+\.py)`", row)[0] for row in rows]
    return [name if name.partition("/")[0] in ("compressors", "transports") else f"commlib/{name}" for name in names]


class Files:
    """Source files of commlib that are called into while :attr:`recording`.

    Attributes:
        seen: by any thread.
        here: by the thread that made this, in the order of the first call.
    """

    def __init__(self) -> None:
        self.recording = False
        self.seen: set[str] = set()
        self.here: dict[str, None] = {}
        self._thread = threading.get_ident()
        self._roots = {
            str(Path(str(package.__file__)).parent): name
            for name, package in (
                ("commlib", commlib),
                ("compressors", commlib.compressors),
                ("transports", commlib.transports),
            )
        }

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if self.recording and event == "call" and not threading.current_thread().name.startswith(OTHERS):
            for root, name in sorted(self._roots.items(), reverse=True):  # in a wheel one lies in another
                if frame.f_code.co_filename.startswith(f"{root}/") and not begins(frame):
                    file = name + frame.f_code.co_filename[len(root) :]
                    self.seen.add(file)
                    if threading.get_ident() == self._thread:
                        self.here[file] = None
                    return

    @contextmanager
    def following(self) -> Iterator[Files]:
        """Follow this thread and all that start inside the block."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield self
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


def bucket(world: World) -> tuple[list[str], set[str]]:
    files = Files()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(64, 64, bias=False))
    with files.following():
        commlib.attach(ddp, "onebit")
        for step in range(STEPS):
            files.recording = step == STEPS - 1
            ddp(torch.ones(2, 64)).sum().backward()
        files.recording = False
    return list(files.here), files.seen


def test_a_bucket_goes_the_way_that_its_page_tells(fleet: Fleet) -> None:
    pytest.importorskip("numba", reason="the page is of numba's kernels: pip install 'torch-commlib[numba]'")
    page = told("life-of-a-bucket.md")
    for order, seen in fleet.run(2, bucket):
        assert [file for file in order if file not in LATE] == page  # a lane may still end the step before
        assert seen - LATE == set(page)


def test_a_push_goes_the_way_that_its_page_tells() -> None:
    files = Files()

    def worker(rank: int) -> None:
        model = nn.Linear(8, 8, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with cluster.join(model, optimizer, rank) as server:
            for step in range(STEPS):
                optimizer.zero_grad()
                files.recording = step == STEPS - 1
                model(torch.ones(2, 8)).sum().backward()
                server.step()
            model(torch.ones(2, 8))  # waits for what the last push has made
            files.recording = False

    with files.following(), Cluster(1, 1) as cluster:
        cluster.train(worker)
    page = told("life-of-a-push.md")
    assert files.seen == set(page)
    assert len(page) == len(set(page))


@pytest.mark.parametrize("page", ["life-of-a-bucket.md", "life-of-a-push.md"])
def test_the_page_says_how_many_files_there_are(page: str) -> None:
    (count,) = re.findall(r"^That is (\d+) files", (DOCS / page).read_text(), flags=re.MULTILINE)
    assert int(count) == len(told(page))
