"""What is said of links and codecs, and how figures are written in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from commlib.bench.report import formatting
from commlib.bench.report.findings import findings, summary
from commlib.bench.results.record import Record, read
from commlib.bench.results.table import Row

SAMPLES = Path(__file__).parent / "samples"


def collective(op: str, size: int, off: float, share: float = 0.9) -> Row:
    shared = {"backend": "gloo", "op": op, "bytes": size, "reps": 5, "seconds": 0.1, "spread": 0.01}
    return {
        **shared,
        "bus_gbit_s": 0.1,
        "of_line": share,
        "alpha_us": 100.0,
        "predicted_s": 0.1 * (1 + off),
        "off": off,
    }


def test_the_worst_prediction_of_long_messages_is_named() -> None:
    rows = [collective("reduce", 1024, 5.0), collective("reduce", 65536, 0.1), collective("gather", 1 << 20, -0.3)]
    text = " ".join(f.text for f in findings(Record("link", {"line_gbit_s": 0.2}, rows)))
    assert "predicts 1 of 2 times of 64 kB and more within 15 %" in text
    assert "the worst, gather of 1.05 MB, by 30 % below the measured time" in text


def test_bandwidth_is_that_of_the_largest_message() -> None:
    rows = [collective("reduce", 1 << 20, 0.0, 0.4), collective("reduce", 1024, 0.0, 0.99)]
    text = findings(Record("link", {"line_gbit_s": 0.2}, rows))[0].text
    assert "reduce reaches 40 % of the measured line of 0.2 Gbit/s" in text


def test_a_barrier_has_neither_bytes_nor_bandwidth() -> None:
    rows: list[Row] = [
        {**collective("barrier", 0, 0.0), "of_line": None, "bus_gbit_s": None, "off": None, "predicted_s": None}
    ]
    texts = [f.text for f in findings(Record("link", {}, rows))]
    assert texts == ["What a message costs before its bytes count (α): 100 µs (barrier)."]


def test_codecs_are_ranked_by_both_ways_together() -> None:
    def two(codec: str, there: float, back: float, bits: float) -> list[Row]:
        shared = {
            "codec": codec,
            "numel": 1000,
            "dtype": "float32",
            "device": "cpu",
            "bits_per_value": bits,
            "error": 0.5,
        }
        ops = (("compress", there), ("decompress_add", back))
        return [{**shared, "op": op, "copy_multiple": copies} for op, copies in ops]

    rows = [*two("none", 1, 1, 32), *two("fp16", 3, 2, 16), *two("onebit", 2, 9, 1)]
    cost, size = (f.text for f in findings(Record("codec", {}, rows)))
    assert cost == (
        "1 k values of float32 on cpu: fp16 is the cheapest codec, there and back in the time of 5 copies of the "
        "gradient; onebit takes 11."
    )
    assert size == "onebit sends least, 1 bits a value, and keeps 50 % of a random gradient's energy in one shot."


def test_a_folder_of_all_kinds_has_one_sentence_a_place() -> None:
    records = read(SAMPLES)
    assert {r.kind for r in records} == {"train", "exchange", "link", "codec"}
    found = summary(records)
    assert [f.alarm for f in found] == [True, True, *[False] * 4]  # topk is wrong for both models of the sample
    assert sum("200 Mbit/s" in f.text for f in found) == 5


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (formatting.seconds(0.0123), "12.3 ms"),
        (formatting.seconds(12), "12 s"),
        (formatting.seconds(1234), "1,234 s"),
        (formatting.seconds(4e-7), "0.4 µs"),
        (formatting.nbytes(1.5e6), "1.5 MB"),
        (formatting.nbytes(12), "12 B"),
        (formatting.count(143_667_240), "144 M"),
        (formatting.percent(0.714), "71 %"),
        (formatting.percent(0.034), "3.4 %"),
        (formatting.signed(-0.5), "−50 %"),
        (formatting.times(1.004), "1.00×"),
        (formatting.times(28.13), "28.1×"),
        (formatting.rate("1.5gbit"), "1.5 Gbit/s"),
        (formatting.rate("fast"), "fast"),
        (formatting.join(["a", "b", "c"]), "a, b and c"),
        (formatting.join([]), ""),
        (formatting.place({"ranks": 2, "hosts": None, "ranks_per_host": 2, "rate": None}), "2 ranks on one machine"),
        (formatting.place({"ranks": 16, "hosts": None, "ranks_per_host": 8}), "16 ranks, 8 on each host"),
        (formatting.place({"ranks": 4, "hosts": 2, "rate": None}), "4 ranks on 2 emulated hosts without a rate limit"),
        (formatting.place({}), ""),
        (
            formatting.setting({"ranks": 1, "compute": "simulated:50"}),
            "1 rank on one machine, a simulated backward of 50 ms",
        ),
    ],
)
def test_words(text: str, shown: str) -> None:
    assert text == shown


@pytest.mark.parametrize(
    ("row", "exact"),
    [
        ({"route": "ddp", "by": "pytorch"}, True),
        ({"route": "torch-fp16", "by": "pytorch"}, False),
        ({"route": "none", "by": "commlib"}, True),
        ({"route": "none@gather", "by": "commlib"}, True),
        ({"route": "dense", "by": "commlib"}, True),
        ({"route": "factors", "by": "commlib"}, True),
        ({"route": "nonesuch", "by": "commlib"}, False),
        ({"route": "onebit", "by": "commlib"}, False),
        ({"route": "fsdp2", "by": "pytorch", "vs_fsdp2": 1.0}, True),
        ({"route": "none", "by": "commlib", "vs_fsdp2": 1.0}, True),
        ({"route": "none+none", "by": "commlib", "vs_fsdp2": None}, True),
        ({"route": "none+int8", "by": "commlib", "vs_fsdp2": 1.0}, False),
        ({"route": "none@reduce_scatter+int8", "by": "commlib", "vs_fsdp2": 1.0}, False),
        ({"route": "int8+none", "by": "commlib", "vs_fsdp2": 1.0}, False),
        ({"exchange": "dense", "codec": "none"}, True),
        ({"exchange": "dense", "codec": "fp16"}, False),
    ],
)
def test_only_an_uncompressed_route_is_exact(row: Row, exact: bool) -> None:
    assert formatting.exact(row) is exact
