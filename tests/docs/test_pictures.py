"""The pictures of the documentation: sharp, small, shown somewhere, and with the words that the pages have today."""

from __future__ import annotations

import pytest
from doc_pages import PAGES, ROOT
from PIL import Image

from passes.torch_private import VERSION
from tools import screens

LARGEST_BYTES = 300_000
SLOW = ("plan", "sweep", "run", "overview")
NAMES = [pytest.param(name, marks=[pytest.mark.full] if name in SLOW else []) for name in screens.SCREENS]


@pytest.mark.parametrize("name", screens.SCREENS)
def test_a_picture_is_sharp_and_small_and_shown(name):
    file = screens.PAGES / f"{name}.png"
    assert file.stat().st_size < LARGEST_BYTES
    assert Image.open(file).size == tuple(screens.PIXELS * screens.SIZE[side] for side in ("width", "height"))
    assert any(f"pages/{name}.png)" in page.read_text() for page in PAGES)


def test_every_file_of_the_folder_belongs_to_a_picture():
    assert {path.name for path in (ROOT / "docs/pages").iterdir()} == {f"{name}.{ending}" for name in screens.SCREENS for ending in ("png", "txt")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.mark.full
@pytest.mark.skipif(VERSION < (2, 13) or VERSION >= (2, 14), reason="the pictures are of PyTorch 2.13; others name other nodes")
@pytest.mark.parametrize("name", NAMES)
def test_the_page_has_the_words_of_its_picture(browser, runs, name):
    screen = screens.SCREENS[name]
    page = screens.opened(browser, screens.made(runs, screen.run), screen)
    assert screens.text_of(page) == (screens.PAGES / f"{name}.txt").read_text(), "run make pages"
    page.close()


def test_numbers_that_vary_are_left_out():
    texts = "1,234.5 tokens/s in 12.5 µs, 3.00 MiB, 889 MFLOP/s; commit 0a1b2c", "99 tokens/s in 2 ms, 512 KiB, 1.36 GFLOP/s; commit ffffff"
    assert {screens.VARIES.sub("0", text) for text in texts} == {"0 tokens/s in 0, 0, 0; 0"}
