"""Who of the hosts has which cores, and how TCP behaves there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from commlib.bench.lab.network_commands import congestion, cores

CPUS = st.lists(st.integers(0, 255), min_size=1, max_size=32, unique=True).map(sorted)


@given(CPUS, st.integers(1, 64))
def test_hosts_have_equal_parts_of_the_cores_and_share_one_only_if_there_are_too_few(cpus: list[int], n: int) -> None:
    parts = [cores(h, n, cpus) for h in range(n)]
    assert all(parts)
    assert set().union(*parts) == set(cpus)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    taken = [c for part in parts for c in part]
    used = [taken.count(c) for c in cpus]
    assert max(used) - min(used) <= 1
    if n <= len(cpus):
        assert used == [1] * len(cpus)


def test_tcp_is_linuxs_default_whatever_this_machine_prefers_and_reno_where_there_is_none() -> None:
    assert congestion("reno bbr cubic\n") == "cubic"
    assert congestion("reno bbr\n") == "reno"
