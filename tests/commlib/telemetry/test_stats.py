"""What is counted for a bucket is its layers', each by its share."""

from __future__ import annotations

import pytest
import torch

from commlib.telemetry.stats import SAMPLED, Meter, Stats

CPU = torch.device("cpu")


def test_a_layer_counts_its_share_of_a_buckets_count_beside_its_own() -> None:
    layers, bucket = {"a": Meter(CPU), "b": Meter(CPU)}, Meter(CPU)
    layers["a"].add_sent(100)
    layers["a"].add_wire(1.0)
    bucket.add_sent(8)  # what it did before the shares counts too
    layers["a"].has_share(bucket, 0.25)
    layers["b"].has_share(bucket, 0.75)
    bucket.add_sent(32)
    bucket.add_wire(4.0)
    bucket.would_send(60, 4)
    stats = Stats.of(1, 0, 140, {"a": ("none@dense", 1), "b": ("none@dense", 3)}, layers)
    assert [x.wire_bytes for x in stats.layers.values()] == [110, 30]
    assert [x.dense_bytes for x in stats.layers.values()] == [22, 68]  # a quarter of 90 is 22.5
    assert [x.seconds["wire"] for x in stats.layers.values()] == pytest.approx([2.0, 3.0])
    assert stats.dense_bytes == 90
    assert stats.seconds["wire"] == pytest.approx(5.0)


def test_layers_without_values_have_no_share_and_do_no_harm() -> None:
    empty = Meter(CPU)
    bucket = Meter.of_all(CPU, [(empty, 0)])
    bucket.add_sent(8)
    assert empty.sent() == 0


def test_on_a_gpu_one_call_in_some_is_timed_and_stands_for_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            made.append(self)

        def record(self) -> None:
            """Costs nothing here."""

        synchronize = record

        def query(self) -> bool:
            return True

        def elapsed_time(self, end: object) -> float:
            return 2.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    meter = Meter(torch.device("cuda"))
    seen = {}
    for call in range(1, 10 * SAMPLED + 2):
        with meter.timed("compress"):
            pass
        seen[call] = meter.seconds()["compress"]
    assert len(made) == 2 * 11
    assert all(seen[c] == pytest.approx(0.002 * c) for c in range(1, 10 * SAMPLED + 2, SAMPLED))
    assert list(seen.values()) == sorted(seen.values())
    assert meter.seconds()["decompress"] == 0
