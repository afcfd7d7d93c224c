"""Key pairs, and the list of those whose word is taken: files that only their owner can read.

::

    ~/.config/commlib/keys/        $COMMLIB_KEYS, or below $XDG_CONFIG_HOME
        <name>.secret              0600: the pair, public key first
        allowed                    a public key and a name a line

A public key is 40 characters of Z85, as ZeroMQ's CURVE has them.
"""

from __future__ import annotations

import dataclasses
import os
import re
import stat
import struct
import tempfile
from pathlib import Path

import zmq
from zmq.utils import z85

from commlib.errors import AuthenticationError

VARIABLE = "COMMLIB_KEYS"
_KEY = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")  # Z85 (ZeroMQ RFC 32)
_MOST = 1 << 24  # bytes of a file: 150,000 keys
_NAME = re.compile(r"[\w.-]{1,64}")


@dataclasses.dataclass(frozen=True)
class KeyPair:
    """Public and secret key of one side, Z85; the secret one is in no text of it."""

    public: str
    secret: str = dataclasses.field(repr=False)

    @classmethod
    def new(cls) -> KeyPair:
        """Drawn by the system's generator. The public one does not begin as an option of a command does."""
        while True:
            public, secret = (key.decode() for key in zmq.curve_keypair())
            if not public.startswith("-"):
                return cls(public, secret)


def check_public(key: str) -> str:
    """Check that this is a public key, and return it.

    Raises:
        ValueError: it is none.
    """
    if not _is_key(key):
        raise ValueError(f"a public key is 40 characters of Z85, as 'commlib keys show' prints it, got {key!r}")
    return key


def _is_key(text: str) -> bool:
    """Whether these are 32 bytes in Z85, where five digits may also stand for more than four bytes have room for."""
    try:
        return _KEY.fullmatch(text) is not None and len(z85.decode(text)) == 32
    except struct.error:
        return False


def folder() -> Path:
    """Where keys are."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "commlib" / "keys"


def create(name: str, where: Path | None = None, *, replace: bool = False) -> KeyPair:
    """Makes a pair and keeps it.

    Raises:
        ValueError: a bad name, or there is one of it, which is not to be replaced.
    """
    path = _secret(name, where)
    if path.exists() and not replace:
        raise ValueError(f"there is a key {name!r} in {path.parent}: another name, or --replace to draw a new one")
    pair = KeyPair.new()
    _write(path, f"{pair.public}\n{pair.secret}\n")
    return pair


def pairs(where: Path | None = None) -> list[str]:
    """The names of the pairs that were kept."""
    return sorted(path.stem for path in (where or folder()).glob("*.secret"))


def load(name: str, where: Path | None = None) -> KeyPair:
    """A pair that was kept.

    Raises:
        AuthenticationError: there is none, others may read or change it, or it is damaged.
    """
    path = _secret(name, where)
    try:
        text, mode = _read(path)
    except OSError as e:
        raise AuthenticationError(f"no key {name!r} ({e.strerror}: {path}): 'commlib keys new {name}' makes one") from e
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise AuthenticationError(f"others may read {path}: chmod 600 it, or make a new one if they did")
    lines = text.split()
    if len(lines) != 2 or not all(map(_is_key, lines)):
        raise AuthenticationError(f"{path} is damaged: it has no two keys")
    public, secret = lines
    if zmq.curve_public(secret.encode()).decode() != public:
        raise AuthenticationError(f"{path} is damaged: its two keys are not of one pair")
    return KeyPair(public, secret)


def allow(public: str, name: str, where: Path | None = None) -> bool:
    """Puts a public key on the list. Returns whether it was not there.

    Raises:
        ValueError: no key, or a bad name.
    """
    _check_name(name)
    listed = allowed(where)
    if check_public(public) in listed:
        return False
    _write((where or folder()) / "allowed", "".join(f"{k} {n}\n" for k, n in {**listed, public: name}.items()))
    return True


def allowed(where: Path | None = None) -> dict[str, str]:
    """Public key → name, of those whose word is taken.

    Raises:
        AuthenticationError: others may change the list, or it is damaged or cannot be read.
    """
    path, found = (where or folder()) / "allowed", {}
    try:
        text, _ = _read(path)
    except FileNotFoundError:
        return {}
    except OSError as e:
        raise AuthenticationError(f"the list of allowed keys cannot be read ({e.strerror}: {path})") from e
    for number, line in enumerate(text.splitlines(), 1):
        key, _, name = line.partition(" ")
        if not _is_key(key) or not _NAME.fullmatch(name):
            raise AuthenticationError(f"{path} is damaged: line {number} is no key and a name")
        found[key] = name
    return found


def _read(path: Path) -> tuple[str, int]:
    """Text and mode of a file that nobody else may change, as OpenSSH asks of its own; what is no text is damaged.

    Raises:
        AuthenticationError: somebody else may, or has made it.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:  # what is looked at is what is read, whatever has the name meanwhile
        its = os.fstat(file.fileno())
        data = file.read(min(its.st_size, _MOST) + 1)
    for what, stats in ((path, its), (path.parent, path.parent.stat())):
        if stats.st_uid not in (0, os.geteuid()):
            raise AuthenticationError(f"{what} belongs to user {stats.st_uid}: whoever that is may change your keys")
        kept = stat.S_ISDIR(stats.st_mode) and stats.st_mode & stat.S_ISVTX  # nobody replaces there what is not his own
        if stats.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not kept:
            raise AuthenticationError(f"others may change {what}: chmod go-w it, and look at what is in {path}")
    try:
        if len(data) > _MOST:
            raise ValueError(f"it has more than {_MOST} bytes")
        return data.decode("ascii"), its.st_mode
    except ValueError as e:
        raise AuthenticationError(f"{path} is damaged: {e}") from e


def _secret(name: str, where: Path | None) -> Path:
    return (where or folder()) / f"{_check_name(name)}.secret"


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"a name is up to 64 letters, digits, '.', '_' and '-', got {name!r}")
    return name


def _write(path: Path, text: str) -> None:
    """All of it or nothing, and for its owner only from the first moment."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # 0600
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
