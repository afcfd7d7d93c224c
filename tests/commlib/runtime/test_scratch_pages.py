"""Large memory is as torch.zeros gives it, in pages of 2 MB where the system has them, and goes with its tensor."""

from __future__ import annotations

import copy
import gc
import io
import mmap
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.runtime.scratch import zeros
from tests.support.leaks import resident
from tests.support.tiers import examples

CPU = torch.device("cpu")
LARGE = 8 << 20  # bytes
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@settings(max_examples=examples(20))
@given(
    st.lists(st.integers(0, 300), max_size=3),
    st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.int64]),
)
def test_it_is_what_torch_zeros_is_whatever_the_shape(shape: list[int], dtype: torch.dtype) -> None:
    made = zeros(shape, dtype, CPU)
    assert torch.equal(made, torch.zeros(shape, dtype=dtype))
    assert made.is_contiguous()
    made.fill_(1)
    assert torch.equal(made, torch.ones(shape, dtype=dtype))


def test_two_tensors_share_nothing_and_views_keep_the_memory() -> None:
    one, other = (zeros((LARGE,), torch.uint8, CPU) for _ in range(2))
    view = one[-5:]
    one.fill_(7)
    del one
    gc.collect()
    other.fill_(9)
    assert view.tolist() == [7] * 5


def test_it_is_copied_and_saved_as_any_tensor_is() -> None:
    made = zeros((1 << 21,), torch.float32, CPU).add_(2.5)
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    for again in (torch.load(file), copy.deepcopy(made), made.clone()):
        assert torch.equal(again, made)
        assert again.data_ptr() != made.data_ptr()


@pytest.mark.skipif(not _SETTING.exists() or "[never]" in _SETTING.read_text(), reason="the system has no large pages")
def test_its_pages_are_large() -> None:
    # Several, for the system may be short of them; what it gives is told by the mapping's entry.
    made = [zeros((4 * LARGE,), torch.uint8, CPU).fill_(1) for _ in range(4)]
    assert all(m.data_ptr() % (2 << 20) == 0 for m in made)
    assert sum(_large(m.data_ptr()) for m in made) > 0


def _large(address: int) -> int:
    """kB in large pages of the mapping at an address."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        field, _, rest = line.partition(" ")
        if not field.endswith(":"):
            first, last = (int(x, 16) for x in field.split("-"))
            here = first <= address < last
        elif here and field == "AnonHugePages:":
            return int(rest.split()[0])
    raise AssertionError(f"nothing is mapped at {address:#x}")


@pytest.mark.skipif(sys.platform != "linux", reason="counts resident pages as Linux tells them")
def test_it_is_given_back_with_the_tensor() -> None:
    before = resident()
    made = zeros((16 * LARGE,), torch.uint8, CPU).fill_(1)
    assert resident() - before >= 16 * LARGE
    del made
    gc.collect()
    assert resident() - before < 4 * LARGE


def test_without_large_pages_it_is_memory_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(mmap.mmap):
        def madvise(self, *args: int) -> None:
            raise OSError(22, "Invalid argument")

    for change in (
        lambda: monkeypatch.delattr(mmap, "MADV_HUGEPAGE"),
        lambda: monkeypatch.setattr(mmap, "mmap", Refused),
    ):
        change()
        assert torch.equal(zeros((LARGE,), torch.uint8, CPU), torch.zeros(LARGE, dtype=torch.uint8))
        monkeypatch.undo()
