"""Links of the documentation point to something."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.docs_reader import PAGES, name_of

pytestmark = pytest.mark.checkout


def links(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", text))
    return [t for t in targets if not re.match(r"[a-z]+:", t)]


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_point_to_something(page: Path):
    dangling = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            dangling.append(link)
    assert not dangling
