"""Spec strings: a name and options, which are the fields of a frozen dataclass.

::

    name[:option=value[,option=value…]]          topk:ratio=0.01,values=int8
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Collection, Mapping
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, TypeVar, cast

from commlib.errors import MissingDependency, unknown

T = TypeVar("T")
N = TypeVar("N", bound="Named")
_SWITCH = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}


def split(what: str, spec: str, first: str = "") -> tuple[str, dict[str, str]]:
    """Name and options, as written.

    Args:
        what: kind of thing, for messages.
        spec: the whole string.
        first: the option that a lone value stands for (``ssp:3``); empty: every option has its name.

    Raises:
        ValueError: it is no spec string, or has an option twice.
    """
    name, _, tail = spec.strip().partition(":")
    options: dict[str, str] = {}
    for part in filter(None, tail.split(",")):
        key, eq, value = part.partition("=")
        if first and not eq and not options:
            key, eq, value = first, "=", key
        if not eq or not key.strip() or not value.strip():
            raise ValueError(f"cannot read {part!r} in {what} {spec!r}: write name:option=value,option=value")
        if key.strip() in options:
            raise ValueError(f"option {key.strip()!r} is given twice in {what} {spec!r}")
        options[key.strip()] = value.strip()
    return name, options


def build(cls: type[T], name: str, options: Mapping[str, str], also: Collection[str] = ()) -> T:
    """An instance of a dataclass, each option converted to the type of its field.

    Args:
        cls: of what.
        name: its name, for messages.
        options: as written.
        also: options that the caller has taken out, for messages.

    Raises:
        ValueError: an unknown option, or a value that is none or out of range.
    """
    fields = {f.name for f in dataclasses.fields(cls) if f.init} if dataclasses.is_dataclass(cls) else set()
    hints = _types(cast(Any, cls))
    values: dict[str, Any] = {}
    for key, text in options.items():
        if key not in fields:
            raise ValueError(f"{name}: {unknown('option', key, [*fields, *also])}")
        values[key] = _convert(name, key, text, hints[key])
    return cls(**values)


@functools.cache
def _types(cls: Any) -> Mapping[str, Any]:
    """Attribute → its type; Python compiles each anew whenever it is asked, and a codec is made for each parameter."""
    return MappingProxyType(typing.get_type_hints(cls))


class Named(Protocol):
    """Class whose instances a spec string can ask for by a name in a table."""

    first: ClassVar[str]
    """The option that a lone value stands for (``ssp:3``); empty: every option has its name."""


def from_table(what: str, spec: str, table: Mapping[str, type[N]]) -> N:
    """Make the instance that a spec string asks for, of one of the dataclasses of a table.

    Args:
        what: kind of thing, for messages.
        spec: the string.
        table: name → dataclass.

    Raises:
        ValueError: an unknown name or option, or a value that is none or out of range.
    """
    name = spec.strip().partition(":")[0]
    if name not in table:
        raise ValueError(unknown(what, name, table))
    return build(table[name], *split(what, spec, table[name].first))


def switch(name: str, key: str, text: str) -> bool:
    """``on`` or ``off``.

    Raises:
        ValueError: neither.
    """
    if text.lower() not in _SWITCH:
        raise ValueError(f"{name}: {key} must be on or off, got {text!r}")
    return _SWITCH[text.lower()]


def _convert(name: str, key: str, text: str, kind: object) -> object:
    if kind is bool:
        return switch(name, key, text)
    if kind is str:
        return text
    convert = int if kind is int else float
    try:
        return convert(text)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise ValueError(f"{name}: {key} must be {wanted}, got {text!r}") from None


def installed(group: str, things: str) -> Mapping[str, EntryPoint]:
    """Name → entry point of all that is installed in a group, read-only; ``things`` is what messages call it.

    Raises:
        ValueError: if two distributions offer different things under one name.
    """
    found: dict[str, EntryPoint] = {}
    for ep in entry_points(group=group):
        other = found.setdefault(ep.name, ep)
        if other.value != ep.value:
            raise ValueError(
                f"two installed {things} are called {ep.name!r}: {other.value} and {ep.value}; uninstall one of them"
            )
    return MappingProxyType(dict(sorted(found.items())))


def fetch(what: str, name: str, known: Mapping[str, EntryPoint], extra: str = "") -> object:
    """Load what an entry point names, whatever it is.

    Args:
        what: kind of thing, for messages.
        name: which of those known.
        known: as :func:`installed` gives them.
        extra: the extra of this distribution that installs what our own need; empty: there is none.

    Raises:
        ValueError: unknown name; the message lists what is known and the nearest.
        MissingDependency: its module needs a package that is not installed.
    """
    if name not in known:
        raise ValueError(unknown(what, name, known))
    try:
        return known[name].load()
    except ImportError as e:
        package = (e.name or "").partition(".")[0]
        if not package or package == "commlib":  # a broken module, not a missing package
            raise
        ours = extra and known[name].module.partition(".")[0] == "commlib"
        needed = f"'torch-commlib[{extra}]'" if ours else package
        raise MissingDependency(f"{what} {name!r} needs the package {package!r}: pip install {needed}") from e
