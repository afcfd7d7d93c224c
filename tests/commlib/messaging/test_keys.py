"""Keys are files that only their owner can read, whole or not there; what is wrong with one is said, not the secret."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from commlib.errors import AuthenticationError
from commlib.messaging import keys

Call = Callable[..., tuple[int, str, str]]
KEY = "0123456789" * 4


def test_a_pair_comes_back_as_it_was_made_and_nobody_else_can_read_it(tmp_path: Path) -> None:
    where = tmp_path / "keys"
    old = os.umask(0)
    try:
        made = keys.create("a", where)
    finally:
        os.umask(old)
    assert keys.load("a", where) == made
    assert stat.S_IMODE((where / "a.secret").stat().st_mode) == 0o600
    assert stat.S_IMODE(where.stat().st_mode) == 0o700
    assert keys.pairs(where) == ["a"]
    assert made.secret not in repr(made)
    assert made.public in repr(made)


def test_a_pair_is_replaced_only_if_that_is_said(tmp_path: Path) -> None:
    made = keys.create("a", tmp_path)
    with pytest.raises(ValueError, match="there is a key 'a'"):
        keys.create("a", tmp_path)
    assert keys.load("a", tmp_path) == made
    assert keys.create("a", tmp_path, replace=True) == keys.load("a", tmp_path) != made


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = keys.create("a", tmp_path)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        keys.create("a", tmp_path, replace=True)
    assert keys.load("a", tmp_path) == made
    assert [p.name for p in tmp_path.iterdir()] == ["a.secret"]


@pytest.mark.parametrize("mode", [0o660, 0o606, 0o666, 0o622])
def test_a_list_that_others_may_change_is_not_used(tmp_path: Path, mode: int) -> None:
    keys.allow(KEY, "a", tmp_path)
    (tmp_path / "allowed").chmod(mode)
    with pytest.raises(AuthenticationError, match=r"others may change .*allowed: chmod go-w"):
        keys.allowed(tmp_path)
    (tmp_path / "allowed").chmod(0o644)  # to be read is no harm: these are public keys
    assert keys.allowed(tmp_path) == {KEY: "a"}


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o707])
def test_keys_in_a_folder_that_others_may_change_are_not_used(tmp_path: Path, mode: int) -> None:
    where = tmp_path / "keys"
    keys.create("a", where)
    keys.allow(KEY, "b", where)
    where.chmod(mode)
    for read in (lambda: keys.allowed(where), lambda: keys.load("a", where)):
        with pytest.raises(AuthenticationError, match=r"others may change .*keys: chmod go-w"):
            read()


def test_a_folder_where_anyone_may_add_but_not_replace_is_as_good(tmp_path: Path) -> None:
    made = keys.create("a", tmp_path)
    keys.allow(KEY, "b", tmp_path)
    tmp_path.chmod(0o1777)  # as a mounted secret's
    assert keys.load("a", tmp_path) == made
    assert keys.allowed(tmp_path) == {KEY: "b"}


@pytest.mark.parametrize("file", ["allowed", "a.secret"])
def test_keys_of_another_user_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    keys.create("a", tmp_path)
    keys.allow(KEY, "b", tmp_path)
    own = os.fstat

    def others(fd: int) -> os.stat_result:
        found = list(own(fd))
        found[4] = 12345  # st_uid
        return os.stat_result(found)

    monkeypatch.setattr(os, "fstat", others)
    with pytest.raises(AuthenticationError, match=rf"{file} belongs to user 12345"):
        keys.allowed(tmp_path) if file == "allowed" else keys.load("a", tmp_path)


@pytest.mark.parametrize("file", ["allowed", "a.secret"])
@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"\x80" * 100, "ä".encode(), b"\0" * 10])
def test_what_is_no_text_is_damaged(tmp_path: Path, file: str, data: bytes) -> None:
    keys.create("a", tmp_path)
    (tmp_path / file).touch(mode=0o600)
    (tmp_path / file).write_bytes(data)
    with pytest.raises(AuthenticationError, match=rf"{file} is damaged"):
        keys.allowed(tmp_path) if file == "allowed" else keys.load("a", tmp_path)


def test_a_list_without_end_is_not_read_to_it(tmp_path: Path) -> None:
    (tmp_path / "allowed").touch(mode=0o600)
    os.truncate(tmp_path / "allowed", 1 << 40)
    with pytest.raises(AuthenticationError, match=r"allowed is damaged: it has more than 16777216 bytes"):
        keys.allowed(tmp_path)


def test_a_list_that_cannot_be_read_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "allowed").mkdir()
    with pytest.raises(AuthenticationError, match=r"cannot be read \(Is a directory: .*allowed\)"):
        keys.allowed(tmp_path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_one_that_others_may_read_is_not_used(tmp_path: Path, mode: int) -> None:
    keys.create("a", tmp_path)
    (tmp_path / "a.secret").chmod(mode)
    with pytest.raises(AuthenticationError, match=r"others may (read|change) .*a\.secret: chmod"):
        keys.load("a", tmp_path)


NO_KEY = "#" * 40  # of the digits that keys have, but five of them are more than four bytes
DAMAGED = ["", "x\ny\n", "{public}\n", "{public}\n{public}\n", "{other}\n{secret}\n", f"{{public}}\n{NO_KEY}\n"]


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_pair_is_named(tmp_path: Path, text: str) -> None:
    pair, other = keys.create("a", tmp_path), keys.KeyPair.new()
    path = tmp_path / "a.secret"
    path.write_text(
        text.replace("{public}", pair.public).replace("{secret}", pair.secret).replace("{other}", other.public)
    )
    with pytest.raises(AuthenticationError, match=r"a\.secret is damaged") as e:
        keys.load("a", tmp_path)
    assert pair.secret not in str(e.value)


def test_one_that_is_not_there_is_told_with_what_makes_it(tmp_path: Path) -> None:
    with pytest.raises(AuthenticationError, match=r"no key 'b' .*: 'commlib keys new b' makes one"):
        keys.load("b", tmp_path)


@pytest.mark.parametrize("name", ["", "a/b", "../a", "a b", "a" * 65])
def test_a_name_is_no_path(tmp_path: Path, name: str) -> None:
    for use in (lambda: keys.create(name, tmp_path), lambda: keys.allow(keys.KeyPair.new().public, name, tmp_path)):
        with pytest.raises(ValueError, match="a name is up to 64 letters"):
            use()


def test_the_list_has_each_key_once_and_says_where_it_is_damaged(tmp_path: Path) -> None:
    one, other = keys.KeyPair.new().public, keys.KeyPair.new().public
    assert keys.allowed(tmp_path) == {}
    assert [keys.allow(one, "a", tmp_path), keys.allow(other, "b", tmp_path), keys.allow(one, "c", tmp_path)] == [
        1,
        1,
        0,
    ]
    assert keys.allowed(tmp_path) == {one: "a", other: "b"}
    with pytest.raises(ValueError, match="a public key is 40 characters of Z85"):
        keys.allow(one[:-1], "d", tmp_path)
    with (tmp_path / "allowed").open("a") as file:
        file.write("nonsense\n")
    with pytest.raises(AuthenticationError, match="line 3 is no key and a name"):
        keys.allowed(tmp_path)


def test_where_keys_are_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(keys.VARIABLE, str(tmp_path / "x"))
    assert keys.folder() == tmp_path / "x"
    monkeypatch.delenv(keys.VARIABLE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert keys.folder() == tmp_path / "commlib" / "keys"


def test_the_command_makes_shows_and_allows_and_prints_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    monkeypatch.setenv(keys.VARIABLE, str(tmp_path))
    status, made, err = call("keys", "new", "a")
    pair = keys.load("a", tmp_path)
    assert status == 0, err
    assert f"commlib keys allow '{pair.public}' a" in made
    other = keys.KeyPair.new().public
    for said in ("b is allowed", "this key is on the list already, as b"):
        assert said in call("keys", "allow", other, "b")[1]
    shown = call("keys", "show", "--json")[1]
    assert json.loads(shown) == {"own": {"a": pair.public}, "allowed": {"b": other}}
    for out in (made, shown, call("keys", "show")[1]):
        assert pair.secret not in out
        assert pair.public in out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("new", "a"), "there is a key 'a'"),
        (("new", "a/b"), "a name is up to 64 letters"),
        (("allow", "short", "b"), "a public key is 40 characters of Z85"),
        (("allow",), "Missing argument 'key'"),
        (("steal",), "No such command 'steal'"),
    ],
)
def test_the_command_refuses_in_words_and_with_a_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call, args: tuple[str, ...], said: str
) -> None:
    monkeypatch.setenv(keys.VARIABLE, str(tmp_path))
    keys.create("a", tmp_path)
    status, _, err = call("keys", *args)
    assert status != 0
    assert said in err
    assert "Traceback" not in err
