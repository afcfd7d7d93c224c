"""Which interface, which keys: what is told is done, what is not is found out, and what cannot be is said."""

from __future__ import annotations

import types
from pathlib import Path

import pytest

from commlib.errors import AuthenticationError, CommlibError
from commlib.groups.world import World
from commlib.transports.options import Options
from commlib.transports.process_group import rendezvous
from commlib.transports.process_group.factory import create
from tests.support.thread_groups import new_store


def test_what_is_given_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMLIB_HOST", "nowhere")
    monkeypatch.setenv("COMMLIB_INSECURE", "1")
    assert Options(host="lo").wanted_host() == "127.0.0.1"
    assert not Options(insecure=False).goes_insecure()
    assert Options().goes_insecure()
    monkeypatch.setenv("COMMLIB_INSECURE", "maybe")
    with pytest.raises(ValueError, match="COMMLIB_INSECURE is 1 or 0, got 'maybe'"):
        Options().goes_insecure()
    monkeypatch.setenv("COMMLIB_ANY_SOURCE", "1")
    assert Options().hears_any_source()
    assert not Options(any_source=False).hears_any_source()


def test_beyond_this_machine_keys_are_needed_and_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMLIB_KEYS", str(tmp_path))
    monkeypatch.setattr(rendezvous, "is_loopback", lambda host: False)
    with pytest.raises(AuthenticationError, match=r"no key 'default' .*'commlib keys new default' makes one"):
        rendezvous.opener(new_store(), "k", World(0, 1), Options(), 1.0)


def test_loopback_is_no_way_between_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    store = new_store()
    rendezvous.say(store, "k/machine", World(1, 2), "another")
    with pytest.raises(CommlibError, match="the group is of 2 machines: name the interface by COMMLIB_HOST"):
        rendezvous.opener(store, "k", World(0, 2), Options(host="127.0.0.1"), 1.0)


def test_options_of_another_backend_are_refused() -> None:
    with pytest.raises(TypeError, match="pg_options of the zmq backend are its Options, got dict"):
        create(types.SimpleNamespace(), {})  # type: ignore[arg-type]
