"""``commlib bench codec``: its rows, and the figures in them that do not depend on the machine."""

from __future__ import annotations

import io
import json
import math

import pytest
import torch

from commlib.bench.codec.command import codec, interleave, measure, pick_device, single_shot_delta, squarest
from commlib.bench.codec.torch_hooks import alone, peers
from commlib.bench.results.table import cell, print_rows
from commlib.codecs.registry import compressors, make

COLUMNS = [
    *("codec", "op", "numel", "dtype", "device", "kernels"),
    *("seconds", "gb_per_s", "copy_multiple", "error", "bits_per_value"),
]
CPU = torch.device("cpu")


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    codec(codecs=["none", "onebit"], numel=[4096, 65536], device="cpu", repeat=2, as_json=True)
    out, err = capsys.readouterr()
    rows = [json.loads(line) for line in out.splitlines()]
    assert err == ""
    assert all(list(row) == ["schema", "kind", "run", *COLUMNS] for row in rows)
    assert [(r["codec"], r["op"], r["numel"]) for r in rows] == [
        (name, op, n) for name in ("none", "onebit") for n in (4096, 65536) for op in ("compress", "decompress_add")
    ]
    for row in rows:
        assert row["kernels"] in ("numba", "torch")
        assert row["seconds"] > 0
        assert row["gb_per_s"] == pytest.approx(4e-9 * row["numel"] / row["seconds"])
        assert row["copy_multiple"] > 0


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    codec(codecs=["none"], numel=[64], device="cpu", repeat=1)
    out = capsys.readouterr().out
    for word in ("codec", "gb per s", "bits per", "decompress_add", "none"):
        assert word in out


def test_the_identity_loses_nothing() -> None:
    for dtype, bits in ((torch.float32, 32), (torch.bfloat16, 16)):
        rows = measure(make("none"), 1000, dtype, CPU, repeat=1)
        assert {(r["error"], r["bits_per_value"]) for r in rows} == {(1.0, bits)}


def test_one_bit_keeps_two_over_pi_of_a_normal_vector() -> None:
    compress, _ = measure(make("onebit"), 1 << 16, torch.float32, CPU, repeat=1)
    assert compress["error"] == pytest.approx(2 / math.pi, abs=0.01)
    assert compress["bits_per_value"] == 1 + 64 / 256  # two float32 means for a column of 256 values


def test_a_lossy_codec_takes_a_half_precision_gradient() -> None:
    rows = measure(make("onebit"), 4096, torch.bfloat16, CPU, repeat=1)
    assert {r["dtype"] for r in rows} == {"bfloat16"}


def test_the_error_is_that_of_one_shot_without_feedback() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    assert single_shot_delta(make("onebit"), x) == single_shot_delta(make("onebit:ef=off"), x)


def test_operations_take_turns_after_one_round_of_warming_up() -> None:
    calls: list[str] = []
    times = interleave({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, CPU, repeat=2)
    assert calls == ["a", "b"] * 3
    assert times.keys() == {"a", "b"}


def test_pytorchs_hooks_are_timed_beside_and_leave_no_process_group(capsys: pytest.CaptureFixture[str]) -> None:
    codec(codecs=["int8"], numel=[4096], device="cpu", repeat=1, peers=True, as_json=True)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(list(row) == ["schema", "kind", "run", *COLUMNS] for row in rows)
    theirs = [r for r in rows if r["op"] == "compress+decompress"]
    assert [r["codec"] for r in theirs] == ["torch-fp16", "torch-int8", "torch-powersgd:rank=4"]
    assert all(r["seconds"] > 0 and r["kernels"] == "torch" for r in theirs)
    assert not torch.distributed.is_initialized()


def test_what_the_int8_peer_computes_is_a_quantised_gradient() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(5))
    with alone():
        told = peers(x)["torch-int8"]()
    assert isinstance(told, torch.Tensor)
    assert (told - x).abs().max() <= (x.max() - x.min()) / 255


def test_threads_are_set_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    try:
        codec(codecs=["none"], numel=[64], device="cpu", repeat=1, threads=1)
        assert "1 threads" in capsys.readouterr().out
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("numel", "shape"), [(1, (1, 1)), (7, (1, 7)), (12, (3, 4)), (1 << 20, (1024, 1024)), (30, (5, 6))]
)
def test_squarest(numel: int, shape: tuple[int, int]) -> None:
    assert squarest(numel) == shape


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"unknown compressor 'onebitt'.*did you mean 'onebit'"):
        codec(codecs=["onebitt"], repeat=1)
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16, got 'int8'"):
        codec(codecs=["none"], dtype="int8", repeat=1)
    with pytest.raises(ValueError, match="numel must be at least 1, got 0"):
        codec(codecs=["none"], numel=[0], device="cpu", repeat=1)
    with pytest.raises(ValueError, match=r"device 'abacus' cannot be used: .*; try auto or cpu"):
        pick_device("abacus")


def test_without_names_every_codec_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    codec(numel=[4096], device="cpu", repeat=1, as_json=True)
    out, err = capsys.readouterr()
    measured = {json.loads(line)["codec"].partition(":")[0] for line in out.splitlines()}
    left_out = {line.partition(" ")[0] for line in err.splitlines()}
    assert {"none", "onebit"} <= measured
    assert measured | left_out == set(compressors())


def test_rows_of_one_report_have_the_same_columns() -> None:
    with pytest.raises(ValueError, match="same columns: a; got b"):
        print_rows([{"a": 1}, {"b": 2}], file=io.StringIO())


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "–"), (True, "yes"), (False, "no"), (0.123456, "0.1235"), (7, "7"), ("x", "x")]
)
def test_cells(value: object, shown: str) -> None:
    assert cell(value) == shown
