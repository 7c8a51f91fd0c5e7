"""MkDocs hooks: the site's pages are the repository's Markdown files, in the order of docs/README.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
INDEX, FIRST = "docs/README.md", "docs/start.md"
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "passes/README.md", "docs/**/*.md")
SECTIONS = {  # the tables of docs/README.md; its paragraphs name their section themselves
    "I want to": "Guides",
    "Something is wrong (troubleshooting)": "Troubleshooting",
    "I want to extend the compiler": "Extend",
}
RANKS = {"Start": 4, "Guides": 4, "Troubleshooting": 4, "Reference": 2, "Measured": 0.5}  # of a section in the search
HEAD = re.compile(r"^(?:\| ([^|]+) \| page \||\*\*([^*]+):\*\*)", re.MULTILINE)
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)\)")  # no anchor: those lead to a part of a page that is listed elsewhere
API = re.compile(r"^<!-- api\n(.*?)\n-->$", re.MULTILINE | re.DOTALL)  # public names; a comment on GitHub
TARGET = re.compile(r"\]\(([^)#\s]+)")

Nav = list[dict[str, "str | Nav"]]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the navigation."""
    config.nav = navigation()
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, and the files that they link to, under their paths in the repository."""
    for path in sorted({*pages(), *linked()}):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_read_source(page: Page, config: MkDocsConfig) -> str:
    """Return the text of a page after its rank in the search, which its section determines, with its docstrings."""
    rank = RANKS.get(page.parent.title, 1) if page.parent else 1
    text = API.sub(lambda match: "\n".join(map(directive, match[1].splitlines())), page.file.content_string)
    return f"---\nsearch: {{boost: {rank}}}\n---\n{text}"


def directive(line: str) -> str:
    """Return the directive of mkdocstrings for a line such as `compiler_trainer.api.Trainer: train, stop`."""
    name, members = line.split(":")
    return f"::: {name}\n    options:\n      members: [{members.strip()}]\n"


def pages() -> set[Path]:
    """Return the Markdown files that are pages of the site."""
    return {path for pattern in PAGES for path in ROOT.glob(pattern)}


def linked() -> Iterator[Path]:
    """Yield the pictures, data and sources that pages link to; MkDocs reports the links that lead nowhere."""
    for page in pages():
        for target in TARGET.findall(page.read_text()):
            path = (page.parent / target).resolve()
            if "://" not in target and path.is_file():
                yield path


def navigation() -> Nav:
    """Return the sections of docs/README.md with their pages, each page where it is linked first."""
    nav: Nav = [{"Start": [{"Overview": "README.md"}, {"First run": FIRST}, {"By task": INDEX}]}]
    listed = {FIRST}
    text = (ROOT / INDEX).read_text()
    heads = list(HEAD.finditer(text))
    for head, following in zip(heads, [*heads[1:], None]):
        section: Nav = []
        for title, target in LINK.findall(text[head.end() : following.start() if following else None]):
            page = ((ROOT / INDEX).parent / target).resolve().relative_to(ROOT).as_posix()
            if page not in listed:
                name = " ".join(title.split())
                section.append({name[0].upper() + name[1:]: page})
                listed.add(page)
        nav.append({head[2] or SECTIONS[head[1]]: section})
    return nav
