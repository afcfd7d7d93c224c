"""A matplotlib figure as SVG that can stand in the middle of an HTML page."""

from __future__ import annotations

import html
import io
import re

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # None drops an entry
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_ID = re.compile(r'(\bid="|\bhref="#|url\(#)')
_SIZE = re.compile(r' (?:width|height)="[^"]*"')


def inline(figure: Figure, name: str, says: str) -> str:
    """The ``<svg>`` element, as wide as what it stands in.

    Args:
        figure: whatever canvas it has is replaced.
        name: unlike that of every other figure on the page; its ids begin with it.
        says: what the picture shows, for those who cannot see it.
    """
    out = io.StringIO()
    # Letters become outlines: a page looks the same where the fonts are missing, and no label runs into another.
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": name}):
        FigureCanvasSVG(figure)
        figure.savefig(out, format="svg", metadata=_NO_METADATA)
    text = out.getvalue()
    text = _COMMENT.sub("", text[text.index("<svg") :])  # no XML declaration or document type in HTML
    root, _, rest = _ID.sub(rf"\g<1>{name}-", text).partition(">")
    label = f'<svg role="img" aria-label="{html.escape(says)}"'
    return f"{_SIZE.sub('', root).replace('<svg', label)}>{rest}".strip()
