"""The site is built without a warning, leads to every page, and its reference names all that is public."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import commlib
from commlib.cli.main import commands
from tests.docs.treated import recipe
from tests.support.docs_reader import PAGES, ROOT

pytestmark = [pytest.mark.checkout, pytest.mark.full]

DOCS = [p.relative_to(ROOT / "docs") for p in PAGES if p.is_relative_to(ROOT / "docs")]
Read = Callable[[str], str]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Read:
    """The text of a page of the site, which is built as ``make docs`` does, from what `make types` links."""
    pytest.importorskip("mkdocs", reason="pip install 'torch-commlib[docs]'")
    folder = tmp_path_factory.mktemp("site")
    (words,) = recipe("make docs")
    build = [sys.executable, "-m", *words.split(), "--site-dir", str(folder)]
    assert "--strict" in build
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    (ROOT / "build").mkdir(exist_ok=True)
    with (ROOT / "build/site.lock").open("w") as lock:  # another worker of the tests would make the links anew
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(["make", "types"], cwd=ROOT, check=True, capture_output=True)
        done = subprocess.run(build, cwd=ROOT, env=env, capture_output=True, text=True, timeout=390)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return lambda page: (folder / page).read_text()


def test_every_page_is_in_the_navigation(site: Read):
    home = site("index.html")
    missing = [p for p in DOCS if f'href="{p.with_suffix(".html")}"' not in home and p != Path("index.md")]
    assert not missing


def test_the_reference_has_every_public_name(site: Read):
    pages = "".join(site(f"reference/{p.stem}.html") for p in DOCS if p.parent == Path("reference"))
    anchors = set(re.findall(r'id="([\w.]+)"', pages))
    homes = {n: f"{getattr(commlib, n).__module__}.{n}" for n in commlib.__all__}
    assert not [n for n, home in homes.items() if not {f"commlib.{n}", home} & anchors]


def test_the_reference_has_every_command_and_option(site: Read):
    page = site("reference/cli.html")
    assert not [c for c in commands() if f'id="commlib-{c}' not in page]
    for heading in ("commlib-bench-train", "commlib-server-run", "commlib-keys-allow"):
        assert f'id="{heading}"' in page
    assert "<code>--rate &lt;str&gt;</code>" in page


def test_nothing_is_fetched_and_no_mark_of_the_tests_is_seen(site: Read):
    for page in ("index.html", "tutorials/own-transport.html", "source/examples/two_levels.py.html"):
        text = site(page)
        assert not re.findall(r'(?:src|href)="https?://(?!arxiv\.org|squidfunk)[^"]*\.(?:js|css|woff2?)[^"]*"', text)
        assert not re.findall("notest|```", text), page


def test_docstrings_are_read_as_they_are_meant(site: Read):
    text = site("reference/training.html")
    assert not re.findall(":(?:class|func|meth|mod):", text)
    assert "::</p>" not in text
