"""Where this process is, and what is said where that cannot be told."""

from __future__ import annotations

import pytest

from commlib.errors import CommlibError
from commlib.messaging.network import address_of, address_towards, machine, store_host
from tests.support.thread_groups import new_store


def test_an_interface_is_named_by_its_name_or_its_address() -> None:
    assert address_of("lo") == "127.0.0.1"
    assert address_of("127.0.0.1") == "127.0.0.1"
    with pytest.raises(ValueError, match=r"an interface of this machine or its address, got 'wlan9'; there are lo \("):
        address_of("wlan9")


def test_the_way_to_this_machine_is_by_loopback() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    with pytest.raises(CommlibError, match=r"no way to the store's host 'no\.such\.host\.invalid'"):
        address_towards("no.such.host.invalid")


def test_without_a_network_store_only_its_variable_tells_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert store_host(new_store()) is None
    monkeypatch.setenv("MASTER_ADDR", "10.1.2.3")
    assert store_host(new_store()) == "10.1.2.3"


def test_a_machine_is_the_same_for_all_of_its_processes() -> None:
    assert machine() == machine()
    assert machine()
