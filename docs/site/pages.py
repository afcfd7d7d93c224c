"""MkDocs hook: what the site needs beyond the pages of docs/, which stay those that GitHub shows.

A link that leaves docs/ leads to a page made of the file it names, so that the site is complete without a repository
beside it. The command line's reference is made of its own help, and a folder in the navigation is its pages.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

import click
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from commlib.cli.main import build, commands

ROOT = Path(__file__).parents[2]
SOURCE = "source"  # the folder of the site for what lies outside docs/
_COMMANDS = "<!-- commands -->"
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
_FENCED = re.compile(r"^( *```).*?^ *```", re.DOTALL | re.MULTILINE)
_LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Folders of the navigation become their pages."""
    for section in config.nav or ():
        for entries in section.values():
            for entry in entries:
                if isinstance(entry, dict):
                    entry.update({k: _pages_of(v) for k, v in entry.items() if v.endswith("/")})
    return config


def _pages_of(folder: str) -> list[str]:
    return [f"{folder}{p.name}" for p in sorted((ROOT / "docs" / folder).glob("*.md"))]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for every file outside docs/ that is linked to, and for those that these link to."""
    todo = [p for f in files.documentation_pages() for p in _targets(f"docs/{f.src_uri}", f.content_string)]
    todo += [p for section in config.nav or () for p in _outside(section)]
    while todo:
        path = todo.pop()
        uri = place(path)
        if path.startswith("docs/") or uri in files.src_uris:
            continue
        text = _page_of(path)
        files.append(File.generated(config, uri, content=text))
        todo += _targets(path, text)
    return files


def _outside(section: dict[str, list[object]]) -> Iterator[str]:
    for entries in section.values():
        for entry in entries:
            for page in entry.values() if isinstance(entry, dict) else ():
                if isinstance(page, str) and page.startswith(f"{SOURCE}/"):
                    yield page.removeprefix(f"{SOURCE}/")


def _targets(path: str, text: str) -> list[str]:
    """What a file of the repository links to, by path from the root."""
    return [_resolve(path, m[1]) for m in _LINK.finditer(_FENCED.sub("", text))]


def _resolve(path: str, link: str) -> str:
    folder = path if (ROOT / path).is_dir() else posixpath.dirname(path)
    return posixpath.normpath(posixpath.join(folder, link))


def place(path: str) -> str:
    """Where in the site a file of the repository is."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{SOURCE}/{path}" if path.endswith(".md") else f"{SOURCE}/{path}.md"


def _page_of(path: str) -> str:
    """A file as a page: Markdown as it is, a folder as a list of links, and code as code."""
    file = ROOT / path
    if file.is_dir():
        names = sorted(p.name for p in file.iterdir() if p.suffix in (".md", ".py", ".toml"))
        return f"# {path}\n\n" + "\n".join(f"- [{n}]({n})" for n in names) + "\n"
    if file.suffix == ".md":
        return file.read_text()
    return f"# {path}\n\n````{_LANGUAGES.get(file.suffix, 'text')}\n{file.read_text()}````\n"


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Links lead to the site's pages, and marks that are for the tests go."""
    uri = page.file.src_uri
    path = _origin(uri)
    if uri.startswith(f"{SOURCE}/") and not path.endswith(".md"):
        page.meta["search"] = {"exclude": True}

    def moved(link: re.Match[str]) -> str:
        to = _resolve(path, link[1])
        if to.startswith("docs/") and uri == path.removeprefix("docs/"):
            return link[0]
        return os.path.relpath(place(to), posixpath.dirname(uri)) + (link[2] or "")

    parts = re.split(r"(^ *```.*?^ *```+ *$)", markdown, flags=re.DOTALL | re.MULTILINE)
    parts[::2] = [_LINK.sub(moved, text) for text in parts[::2]]
    text = re.sub(r"^( *```\w+) (?:notest|lab).*$", r"\1", "".join(parts), flags=re.MULTILINE)
    return text.replace(_COMMANDS, "\n".join(_reference())) if _COMMANDS in text else text


def _origin(uri: str) -> str:
    """The file of the repository that a page of the site shows."""
    if not uri.startswith(f"{SOURCE}/"):
        return f"docs/{uri}"
    path = uri.removeprefix(f"{SOURCE}/")
    return path if (ROOT / path).exists() else path.removesuffix(".md")


def _reference() -> Iterator[str]:
    """Every command with its options."""
    for name in commands():
        command = typer.main.get_command(build(name))
        with click.Context(command, info_name="commlib") as top:
            yield from _described(command.commands[name], top, name)  # type: ignore[attr-defined]  # it is a group


def _described(command: click.Command, above: click.Context, name: str) -> Iterator[str]:
    with command.make_context(name, [], parent=above, resilient_parsing=True) as context:
        if hasattr(command, "commands"):
            for each in command.list_commands(context):
                yield from _described(command.commands[each], context, each)
            return
        yield from ("", f"## {context.command_path}", "", "```text", f"{context.get_usage()}", "```", "")
        yield _escaped(command.help or "")
        rows = [p.get_help_record(context) for p in command.get_params(context)]
        rows = [(r[0].replace("|", "\\|"), _escaped(r[1])) for r in rows if r is not None and r[0] != "--help"]
        if rows:
            yield from ("", "| | |", "|---|---|")
            yield from (f"| `{option}` | {text} |" for option, text in rows)


def _escaped(text: str) -> str:
    return re.sub(r"([*<\[_])", r"\\\1", text).replace("|", "\\|").replace("\b\n", "")
