"""Products with a thin matrix."""

from __future__ import annotations

import pytest
import torch

from commlib.codecs.cooperative import thin_product


@pytest.mark.parametrize(("m", "n", "r"), [(1, 1, 1), (300, 70, 4), (64, 1000, 1), (5, 3, 3)])
@pytest.mark.parametrize("transposed", [False, True])
def test_it_is_the_product(m: int, n: int, r: int, transposed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(n, m, generator=generator).T if transposed else torch.randn(m, n, generator=generator)
    b, out = torch.randn(n, r, generator=generator), torch.full((m, r), torch.nan)
    thin_product(a, b, out)
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=0, atol=1e-4)


def test_what_is_not_finite_stays_so() -> None:
    a, out = torch.ones(4, 3), torch.empty(4, 2)
    a[1, 2] = torch.inf
    thin_product(a, torch.ones(3, 2), out)
    assert out.isfinite().all(1).tolist() == [True, False, True, True]
