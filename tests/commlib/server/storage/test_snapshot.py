"""Snapshots: what is read is what was saved, the newest that is whole, whatever became of the others."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import random
import resource
import shlex
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from commlib.errors import CheckpointMismatch, CommlibError
from commlib.messaging.frame import DTYPES, to_buffer
from commlib.runtime.optimizers import BY_ELEMENT, Recipe
from commlib.server.job.consistency import BSP
from commlib.server.shard.chunk_state import ChunkState
from commlib.server.storage.snapshot import SnapshotFailed, load, save
from commlib.server.storage.snapshot_policy import restore
from tests.support import forked_ranks
from tests.support.tiers import examples

ABOUT = {"fingerprint": "a model's", "clock": 3, "time": 1.5}
RECIPES = {
    **{kind: Recipe(getattr(torch.optim, kind), {"lr": 0.01}) for kind in sorted(BY_ELEMENT)},
    "momentum": Recipe(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "amsgrad": Recipe(torch.optim.AdamW, {"lr": 0.1, "betas": (0.8, 0.99), "amsgrad": True}),
    "tensor lr": Recipe(torch.optim.Adam, {"lr": torch.tensor(0.1), "foreach": False}),
}


def cell(recipe: str, steps: int = 2, n: int = 5) -> ChunkState:
    made = ChunkState(torch.linspace(-1, 1, n), RECIPES[recipe].make, range(2), BSP().threshold())
    for t in range(steps):
        push(made, t)
    return made


def push(book: ChunkState, t: int) -> None:
    for worker in range(2):
        seed = torch.Generator().manual_seed(2 * t + worker)
        book.push(worker, t, torch.randn(book.values.shape, generator=seed))


def same(a: object, b: object) -> bool:
    return plain(a) == plain(b)


def plain(value: Any) -> object:
    if isinstance(value, Tensor):
        return value.dtype, value.shape, bytes(to_buffer(value.reshape(-1))) if value.numel() else b""
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    return list(map(plain, value)) if isinstance(value, list | tuple) else (type(value), value)


def state(clock: int, n: int = 3, **more: Any) -> dict[str, Any]:
    optimizer = {"state": {0: {"step": torch.tensor(float(clock))}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    ledger = {"included": {0: clock, 7: clock}, "furthest": clock}
    return {"values": torch.full((n,), float(clock)), "optimizer": optimizer, "ledger": ledger, "number": clock, **more}


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@settings(max_examples=examples(30))
@given(st.sampled_from(sorted(RECIPES)), st.integers(0, 4), st.integers(0, 6))
def test_a_cell_from_a_snapshot_goes_on_as_the_one_that_was_saved(recipe: str, steps: int, n: int) -> None:
    book, other = cell(recipe, steps, n), cell(recipe, 0, n)
    with TemporaryDirectory() as folder:
        save(folder, "0", 0, ABOUT, {"w[0:5]": book.state_dict()})
        other.load_state_dict(load(folder).cells["w[0:5]"])
    for t in range(steps, steps + 3):
        for each in (book, other):
            push(each, t)
    assert same(other.state_dict(), book.state_dict())


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_every_dtype_come_back_and_are_the_readers_own(tmp_path: Path, dtype: str) -> None:
    values, strided = torch.randint(0, 2, (5,)).to(getattr(torch, dtype)), torch.arange(12.0).view(3, 4).t()
    cells = {"ü/∞": state(1, values=values, strided=strided)}
    save(tmp_path, "0", 0, ABOUT, cells)
    first, second = load(tmp_path).cells, load(tmp_path).cells
    first["ü/∞"]["values"].fill_(0)
    assert same(second, cells)


def test_shards_are_one_and_of_a_key_that_several_have_the_most_updates_win(tmp_path: Path) -> None:
    save(tmp_path, "a", 0, ABOUT, {"v": state(4), "w": state(5)})
    save(tmp_path, "a-1", 9, {**ABOUT, "clock": 6}, {"w": state(6), "x": state(1)})
    save(tmp_path, "../ü.", 0, ABOUT, {"w": state(2)})
    found = load(tmp_path)
    assert same(found.cells, {"v": state(4), "w": state(6), "x": state(1)})
    assert found.numbers == {"a": 0, "a-1": 9, "../ü.": 0}
    assert found.abouts["a-1"] == {**ABOUT, "clock": 6}
    assert same(load(tmp_path, "../ü.").cells, {"w": state(2)})


def test_as_many_stay_as_are_kept_and_none_is_written_over_and_a_killed_writers_rest_goes(tmp_path: Path) -> None:
    (tmp_path / f"0-7.snapshot.{'0' * 32}.part").touch()
    (others := tmp_path / f"1-7.snapshot.{'0' * 32}.part").touch()
    for number in (8, 9, 10, 11):
        save(tmp_path, "0", number, ABOUT, {"w": state(number)}, keep=2)
    assert files(tmp_path) == ["0-10.snapshot", "0-11.snapshot", others.name]
    with pytest.raises(ValueError, match=r"snapshot 11 of shard '0': .* has 11 already; count on"):
        save(tmp_path, "0", 11, ABOUT, {"w": state(1)}, keep=1)
    save(tmp_path, "0", 12, ABOUT, {"w": state(12)}, keep=1)
    assert files(tmp_path) == ["0-12.snapshot", others.name]


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda b: b"", "cut off after 0 bytes"),
        (lambda b: b[:-1], r"it has \d+ bytes, and should have \d+"),
        (lambda b: b[:-40] + bytes([b[-40] ^ 1]) + b[-39:], "checksum is wrong"),
        (lambda b: bytes(len(b)), "checksum is wrong"),
    ],
)
def test_a_damaged_one_is_passed_over_with_a_warning_and_alone_is_an_error(
    tmp_path: Path, harm: Callable[[bytes], bytes], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    older, newer = (save(tmp_path, "0", number, ABOUT, {"w": state(number)}) for number in (1, 2))
    newer.write_bytes(harm(newer.read_bytes()))
    found = load(tmp_path)
    assert same(found.cells, {"w": state(1)})
    assert found.numbers == {"0": 2}
    assert "0-2.snapshot is passed over" in caplog.text
    older.write_bytes(harm(older.read_bytes()))
    with pytest.raises(SnapshotFailed, match=rf"no snapshot of shard '0' .*0-2.*{said}.*0-1.*{said}"):
        load(tmp_path)


def test_a_folder_without_snapshots_says_so(tmp_path: Path) -> None:
    (tmp_path / "0-7.snapshot").mkdir()
    for name in (f"0-7.snapshot.{'0' * 32}.part", "0-07.snapshot", "%ff" * 60 + "-1.snapshot", "\udcff-1.snapshot"):
        (tmp_path / name).touch()
    with pytest.raises(SnapshotFailed, match="has no snapshots"):
        load(tmp_path)
    with pytest.raises(SnapshotFailed, match="No such file or directory"):
        load(tmp_path / "none")
    save(tmp_path, "b", 0, ABOUT, {})
    with pytest.raises(SnapshotFailed, match=r"no snapshot of shard 'a' \(known: b\)"):
        load(tmp_path, "a")
    with pytest.raises(SnapshotFailed, match=r"could be written to .*: File exists\. It needs \d+ bytes"):
        save(tmp_path / "0-07.snapshot", "b", 0, ABOUT, {})


def test_snapshots_of_several_models_are_an_error_that_names_them(tmp_path: Path) -> None:
    save(tmp_path, "a", 0, ABOUT, {})
    save(tmp_path, "b", 0, {"fingerprint": "another's"}, {})
    with pytest.raises(CheckpointMismatch, match=r"a-0\.snapshot: \"a model's\"; b-0\.snapshot: \"another's\""):
        load(tmp_path)
    assert load(tmp_path, "b").abouts == {"b": {"fingerprint": "another's"}}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"shard": "ü" * 40}, "1 to some 150 letters"),
        ({"number": -1}, "whole number from 0"),
        ({"keep": 0}, "keep must be at least 1"),
        ({"cells": {"w": state(1, values=torch.ones(1, 1))}}, "as 'w' is not what Cell"),
        ({"about": {"time": 1 << 64}}, r"about\['time'\] cannot be saved: int"),
        ({"about": {1.5: 1}}, "about cannot be saved: dict"),
        ({"about": {"a": [0, object()]}}, r"about\['a'\]\[1\] cannot be saved: object"),
        ({"about": {"a": torch.ones(2).to_sparse()}}, r"about\['a'\] cannot be saved: Tensor"),
        ({"about": {"a": [0] * 5000}}, r"about\['a'\] cannot be saved: list"),
    ],
)
def test_what_cannot_be_saved_is_named_and_nothing_is_written(tmp_path: Path, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        save(tmp_path, **{"shard": "0", "number": 0, "about": ABOUT, "cells": {}, **wrong})
    assert files(tmp_path) == []


@functools.cache
def whole(number: int) -> bytes:
    with TemporaryDirectory() as folder:
        return save(folder, "0", number, ABOUT, {"v": state(number), "w": cell("amsgrad").state_dict()}).read_bytes()


def mutated(rng: random.Random, signed: bool) -> bytes:
    """Cut, or with some bytes that are others; with a checksum and lengths that are right if it is to be signed."""
    held, first = (bytearray(whole(2)[:-32]), 25) if signed else (bytearray(whole(2)), 0)
    for _ in range(rng.randint(1, 4)):
        held[rng.randrange(first, len(held))] = rng.choice([0, 0x81, 0xC7, 0xDD, 0xDF, rng.randrange(256)])
    if rng.random() < 0.3:
        del held[rng.randrange(first, len(held)) :]
    if signed:
        head = min(struct.unpack_from(">Q", whole(2), 9)[0], len(held) - first)
        held[9:25] = struct.pack(">QQ", head, len(held) - first - head)
        held += hashlib.blake2b(held, digest_size=32).digest()
    return bytes(held)


@settings(max_examples=examples(300))
@given(st.integers(0, 1 << 32), st.booleans())
def test_whatever_the_bytes_it_is_a_snapshot_an_older_one_or_a_named_error(seed: int, signed: bool) -> None:
    with TemporaryDirectory() as name:
        bad = mutated(random.Random(seed), signed)
        Path(name, "0-2.snapshot").write_bytes(bad)
        with contextlib.suppress(CommlibError):
            found = load(name)
            assert signed or bad == whole(2)
            assert all(s["values"].nbytes <= len(bad) for s in found.cells.values())
        Path(name, "0-1.snapshot").write_bytes(whole(1))
        assert signed or load(name).cells.keys() == {"v", "w"}


CLAIMS = {
    "a tensor has 4398046511104 bytes, of which 0": msgpack.ExtType(1, msgpack.packb(["float32", [1 << 40]])),
    "dtype or shape is none": msgpack.ExtType(1, msgpack.packb(["float31", [1]])),
    "no states of cells": {"w": {}},
    r"RuntimeError: ": msgpack.ExtType(1, msgpack.packb(["float32", [0, 1 << 62, 1 << 62]])),
    r"ValueError: 5000 exceeds max_array_len": [0] * 5000,
    r"0-0\.snapshot has version 2, this commlib reads 1": {},
}


@pytest.mark.parametrize("said", CLAIMS)
def test_nothing_is_made_of_what_only_claims_to_be_large_or_ours(tmp_path: Path, said: str) -> None:
    head = msgpack.packb(["0", 0, {}, CLAIMS[said]])
    made = struct.pack(">8sBQQ", b"cml-snap", 2 if "version" in said else 1, len(head), 0) + head
    (tmp_path / "0-0.snapshot").write_bytes(made + hashlib.blake2b(made, digest_size=32).digest())
    with pytest.raises(SnapshotFailed, match=said):
        load(tmp_path)


def fails_for_want_of_room(folder: Path, said: str) -> None:
    save(folder, "0", 0, ABOUT, {"w": state(0)})
    with pytest.raises(SnapshotFailed, match=rf"{said}\. It needs 1\d{{6}} bytes, \d+ are free: make room"):
        save(folder, "0", 1, ABOUT, {"w": state(1, n=270_000)})
    assert files(folder) == ["0-0.snapshot"]
    assert same(load(folder).cells, {"w": state(0)})


def test_a_full_disk_is_a_named_error_and_the_older_one_stays(tmp_path: Path) -> None:
    command = f"mount -t tmpfs -o size=1m tmpfs {shlex.quote(str(tmp_path))}"
    mounted = subprocess.run(command, shell=True, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")
    try:
        fails_for_want_of_room(tmp_path, "No space left on device")
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_file_larger_than_is_allowed_is_a_named_error_and_the_older_one_stays(tmp_path: Path) -> None:
    _, most = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, most))  # Python ignores its signal
    try:
        fails_for_want_of_room(tmp_path, "File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def kills(folder: Path) -> None:
    """Forks a writer, kills it and reads, ten times; in a process of its own, which has no threads."""
    torch.set_num_threads(1)
    number, dice = -1, random.Random(1)
    for _ in range(10):
        ready, told = os.pipe()
        writer = os.fork()
        if not writer:
            os.close(ready)  # so that it ends when its parent has
            for n in range(number + 1, number + 100_000):
                save(folder, "0", n, {"clock": n}, {"v": state(n, n=100_000), "w": state(n, n=300_000)})
                os.write(told, b".")
        os.close(told)
        os.read(ready, 1)
        time.sleep(dice.uniform(0, 0.02))
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        os.close(ready)
        before, found = number, load(folder)
        number = found.abouts["0"]["clock"]
        assert before < number == found.numbers["0"]
        assert same(found.cells, {"v": state(number, n=100_000), "w": state(number, n=300_000)})


def test_of_a_writer_that_is_killed_at_any_moment_the_newest_is_whole(tmp_path: Path) -> None:
    with forked_ranks.context().Pool(1) as pool:
        pool.apply_async(kills, (tmp_path,)).get(240)


def test_where_all_snapshots_are_damaged_nothing_says_that_there_are_none(tmp_path: Path) -> None:
    for number in (1, 2):
        path = save(tmp_path, "s0", number, ABOUT, {"c": state(number)})
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SnapshotFailed, match=r"nothing to go on from: no snapshot of shard 's0' in .* is whole"):
        restore(str(tmp_path), ["c"], str(ABOUT["fingerprint"]))
    with pytest.raises(SnapshotFailed, match=r"nothing to go on from: .* has no snapshots"):
        restore(str(tmp_path / "empty"), ["c"], str(ABOUT["fingerprint"]))


RUNS = {"first": {**ABOUT, "run": "1", "time": 1.0}, "second": {**ABOUT, "run": "2", "time": 2.0}}


def test_what_two_runs_have_saved_of_a_step_is_never_put_together(tmp_path: Path) -> None:
    """Power was lost when one shard had saved step 6, and the next run, from step 3, lost it when the other had."""
    for shard, key in (("a", "v"), ("b", "w")):
        save(tmp_path, f"{shard}.1", 3, RUNS["first"], {key: state(3)})
    save(tmp_path, "a.1", 6, RUNS["first"], {"v": state(6)})
    save(tmp_path, "b.2", 6, RUNS["second"], {"w": state(6)})
    step, states = restore(str(tmp_path), ["v", "w"], str(ABOUT["fingerprint"]))
    assert step == 3
    assert same(states, {"v": state(3), "w": state(3)})


def test_of_two_runs_that_have_a_step_whole_the_later_one_counts_unless_a_file_of_it_is_damaged(tmp_path: Path) -> None:
    for n, about in enumerate(RUNS.values()):
        for shard, key in (("a", "v"), ("b", "w")):
            last = save(tmp_path, f"{shard}.{n}", 6, about, {key: state(6 + n)})
    assert restore(str(tmp_path), ["v", "w"], str(ABOUT["fingerprint"]))[1]["v"]["number"] == state(7)["number"]
    last.write_bytes(last.read_bytes()[:-1])
    step, states = restore(str(tmp_path), ["v", "w"], str(ABOUT["fingerprint"]))
    assert step == 6
    assert same(states, {"v": state(6), "w": state(6)})
