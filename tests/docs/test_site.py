"""The documentation as a site: a strict build, the pages of GitHub, and search without a server."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from browser import opened
from doc_pages import ROOT
from markdown_it import MarkdownIt

pytest.importorskip("mkdocs")

ELEMENTS = re.compile(r"<(li|ol|table|tr|td|th|h[1-6]|code|img|strong|em)\b")
GENERATED = ROOT / "docs/reference/python.md"  # its docstrings are only in the site
WIDTHS = (1400, 800)
SHOWN = ("index.html", "docs/index.html", "docs/guides/finetune.html", "docs/reference/options.html", "docs/reference/python.html", "docs/measured/published.html")


def build(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "mkdocs", "build", "-f", root / "tools/site/mkdocs.yml", "-d", out]
    return subprocess.run(list(map(str, words)), capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Build the site; `strict` makes each broken link, anchor or unlisted page an error."""
    out = tmp_path_factory.mktemp("site")
    built = build(ROOT, out)
    assert built.returncode == 0, built.stdout + built.stderr
    return out


def html_of(site: Path, page: Path) -> Path:
    """Return the file of a page of the repository."""
    name = page.relative_to(ROOT).as_posix().removesuffix(".md")
    return site / f"{re.sub('README$', 'index', name)}.html"


def pages() -> list[Path]:
    return [*ROOT.glob("*.md"), ROOT / "passes/README.md", *ROOT.glob("docs/**/*.md")]


def test_each_page_has_the_parts_that_github_shows(site):
    """Python-Markdown differs from GitHub in lists right after a paragraph, and in ones indented by two spaces."""
    github = MarkdownIt("commonmark").enable("table")
    assert len(pages()) > 60
    for page in set(pages()) - {GENERATED}:
        article = re.search(r"<article.*?</article>", html_of(site, page).read_text(), re.DOTALL)
        assert article, page
        wanted, shown = (Counter(ELEMENTS.findall(text)) for text in (github.render(page.read_text()), article[0]))
        assert shown == wanted, page


def test_no_page_asks_another_server(site):
    loads = re.compile(r'<(?:script|img|iframe|source)\b[^>]*\bsrc="?(https?:[^">]*)|<link\b[^>]*\bhref="?(https?:[^">]*)')
    for file in site.rglob("*.html"):
        assert not loads.findall(file.read_text()), file


@pytest.mark.full
def test_a_broken_link_anchor_or_an_unlisted_page_fails(tmp_path):
    for folder in ("docs", "passes", "compiler_trainer", "tools/site"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (*ROOT.glob("*.md"), ROOT / "LICENSE"):
        shutil.copy(file, tmp_path)
    with (tmp_path / "docs/start.md").open("a") as page:
        page.write("\n[one](nowhere.md) [two](guides/plan.md#no-such-part) [three](../passes/absent.py)\n")
    built = build(tmp_path, tmp_path / "out")
    assert built.returncode and all(name in built.stderr for name in ("nowhere.md", "no-such-part", "absent.py"))
    (tmp_path / "docs/guides/unlisted.md").write_text("# New\n")
    built = build(tmp_path, tmp_path / "out")
    assert built.returncode and "unlisted.md" in built.stderr


@pytest.mark.sample(1)
@pytest.mark.parametrize("width", WIDTHS)
def test_pages_fit_the_window_and_tables_a_wide_one(browser, site, width):
    for name in SHOWN:
        shown = opened(browser, site / name, width)
        assert shown.evaluate("document.documentElement.scrollWidth") <= width, name
        scrolled = shown.evaluate("[...document.querySelectorAll('.md-typeset__scrollwrap')].filter(e => e.scrollWidth > e.clientWidth + 1).length")
        assert scrolled == 0 or width < 1400, name
        assert shown.errors == [], name
        shown.close()


def test_public_names_are_there_with_their_arguments(site):
    text = html_of(site, GENERATED).read_text()
    assert 'id="compiler_trainer.step.compile.compile_step"' in text and "samples are dicts of tensors" in text
    assert "&lt;!-- api" not in text and "<!-- api" not in text


def test_search_works_in_files(browser, site):
    shown = opened(browser, site / "index.html", WIDTHS[0])
    shown.locator("input[name=query]").click()
    shown.keyboard.type("ring attention")
    first = shown.locator(".md-search-result__item h1").first
    first.wait_for()
    assert first.inner_text() == "Long sequences" and shown.errors == []
