"""Griffe extension: docstrings here say `:class:` and `::`, as for Sphinx; the site reads Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`~?([^`]+)`")
_LITERAL = re.compile(r"::(?=\n\n)")
_TABLE = re.compile(r"^=+ +=+\n.*?^=+ +=+$", re.DOTALL | re.MULTILINE)


def markdown(text: str) -> str:
    """Roles as code, literal blocks without their mark, tables as they were typed."""
    text = _TABLE.sub(lambda table: f"```text\n{table[0]}\n```", text)
    return _LITERAL.sub(":", _ROLE.sub(r"`\1`", text))


class Docstrings(griffe.Extension):
    """Every docstring as it is read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites it."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
