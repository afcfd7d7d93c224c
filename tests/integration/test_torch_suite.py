"""PyTorch's own tests of DDP pass with every model attached, and those of collectives over ``zmq``: but for these."""

from __future__ import annotations

import pytest

from tests.support.torch_suite import compare

_PROBES = "`auto` measures the link by all-reduces of its own: a profiler counts them, too"
DDP: dict[str, str] = {
    "test_ddp_grad_div_uneven_inputs": "Join(divide_by_initial_world_size=False) is refused by name",
    "test_ddp_profiling_torch_profiler": _PROBES,
}
"""Test of DDP that passes on a plain model → why it does not on an attached one."""

ZMQ: dict[str, str] = {
    "test_get_backend": "the name of the backend is another one",
    "test_barrier_timeout_full_group": "the error is PeerLost, with another text",
    **dict.fromkeys(
        (
            "test_monitored_barrier_gloo",
            "test_monitored_barrier_gloo_subgroup",
            "test_monitored_barrier_gloo_rank_0_timeout",
        ),
        "monitored_barrier is PyTorch's for Gloo only",
    ),
}
"""Test of collectives that passes over Gloo → why it does not over zmq."""


some_of_them = pytest.mark.parametrize("one_in", [12, pytest.param(1, marks=pytest.mark.long)])


@pytest.mark.timeout(1500)
@pytest.mark.full
@some_of_them
def test_models_that_are_attached_pass_pytorchs_tests_of_ddp(one_in: int) -> None:
    passed, other = compare("ddp", "plain", ("none", "auto", "factors"), one_in)
    assert passed >= 50 // one_in - 2
    assert {name for ended in other.values() for name in ended} <= DDP.keys(), other


@pytest.mark.timeout(1500)
@pytest.mark.full
@some_of_them
def test_collectives_over_zmq_pass_pytorchs_tests(one_in: int) -> None:
    passed, other = compare("collectives", "gloo", ["zmq"], one_in)
    assert passed >= 100 // one_in - 4
    assert other["zmq"].keys() <= ZMQ.keys(), other
