"""The pictures of the documentation, from small runs, each with its text: `make pages`.

    python -m tools.screens                  # writes docs/pages/*.png and *.txt
    python -m tools.screens --keep FOLDER    # keeps the runs and uses them again

Tests make the same runs and compare the texts, so that no picture shows words that a page no longer has.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

PAGES = Path(__file__).resolve().parents[1] / "docs/pages"
SIZE, PIXELS = {"width": 1280, "height": 760}, 2  # of a window, and per unit of it
HUES = 64  # colours of a picture: a third of the bytes, and no difference to see
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
# Numbers with their units, which differ between machines, and node names after their operators. Commits.
VARIES = re.compile(r"commit \w+|\d+(?:[.,]\d+)*(?: ?(?:[KMGTP]i?B|[KMGTP]?B|[KMGTPE]|GFLOP/s|MFLOP/s|ms|µs|s)\b)?")
TICKS = re.compile(r"(?:^0k?\n)+", re.MULTILINE)
SMALL = ("model.dim=64", "model.n_layers=2", "model.n_heads=4", "model.n_kv_heads=2", "model.ffn_dim=192",
         "train.seq_len=64", "lower.backend=eager", "checkpoint.interval=null")

# the runs: folder -> arguments of the command
RUNS: dict[str, tuple[str, ...]] = {
    "trained": (*SMALL, "train.steps=80", "eval.interval=20"),
    "dry": ("run.dry=true", "mesh.dp_shard=2", "mesh.cp=2", "mesh.tp=2", "cluster=h100", "train.seq_len=4096"),
    "plan": ("plan", "model=llama3_8b", "cluster=h100", "cluster.gpus=8", "train.seq_len=8192",
             "train.global_batch_size=16", "plan.compile=6"),
    "sweep": ("-m", *SMALL, "train.steps=12", "optim.lr=1e-3,3e-3,1e-2",
              "passes.remat.policy=none,full"),
}


class Screen(NamedTuple):
    """A picture: the run, its page, and an address or a search to open there first."""

    run: str
    page: str
    address: str = ""
    search: str = ""


SCREENS = {
    "run": Screen("trained", "inspect.html", "run"),
    "overview": Screen("dry", "inspect.html", "overview"),
    "communication": Screen("dry", "inspect.html", "communication"),
    "memory": Screen("dry", "inspect.html", "memory"),
    "graph": Screen("dry", "inspect.html", "graph/9", "all_gather @tp"),
    "plan": Screen("plan", "plan.html"),
    "sweep": Screen("sweep", "sweep.html"),
}


def main() -> None:
    """Make the missing runs, and take every picture."""
    parser = argparse.ArgumentParser("tools.screens", description=__doc__)
    parser.add_argument("--keep", type=Path, help="a folder for the runs")
    parser.add_argument("--only", nargs="*", choices=SCREENS, help="these pictures")
    args = parser.parse_args()
    with folder_of(args.keep) as folder, browser() as chromium:
        for name in args.only or SCREENS:
            page = opened(chromium, made(folder, SCREENS[name].run), SCREENS[name])
            picture(page, PAGES / f"{name}.png")
            (PAGES / f"{name}.txt").write_text(text_of(page))
            page.close()
            print(PAGES / f"{name}.png", flush=True)


@contextmanager
def folder_of(folder: Path | None) -> Iterator[Path]:
    """Yield the folder of the runs, a temporary one unless it is named."""
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield Path(scratch)


def made(folder: Path, name: str) -> Path:
    """Return the run of a name, with its page; make it if it is missing."""
    run = folder / name
    if not run.exists():
        command(*RUNS[name], f"run.dir={run}")
    if name in ("trained", "dry"):
        command("inspect", str(run), "--html")
    return run


def command(*arguments: str) -> None:
    """Run the trainer's command with some arguments; raise CalledProcessError."""
    subprocess.run([sys.executable, "-m", "compiler_trainer", *arguments], check=True, stdout=subprocess.DEVNULL)


@contextmanager
def browser() -> Iterator[Any]:
    """Yield Chromium without a display."""
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        raise SystemExit("no Chromium is installed: apt-get install chromium")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()


def opened(chromium: Any, run: Path, screen: Screen) -> Any:
    """Return the page of a run, at the address of a picture; raise SystemExit if its search finds nothing."""
    page = chromium.new_page(viewport=SIZE, device_scale_factor=PIXELS)
    page.goto(f"file://{run.resolve() / screen.page}")
    if screen.page == "inspect.html":
        page.wait_for_selector("body[data-ready]")
        page.evaluate(f"location.hash = {screen.address!r}")
        page.wait_for_function(f"document.body.dataset.shown === '#{screen.address}'")
    if screen.search:
        page.locator("input[type=search]").first.fill(screen.search)
        if page.locator("#lines .row").count() == 0:
            raise SystemExit(f"{run}: nothing is found for {screen.search!r}")
    return page


def picture(page: Any, file: Path) -> None:
    """Write the picture of a page, in its most frequent colours."""
    page.wait_for_timeout(1500)  # drawings fade in
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    counts: list[Any] = image.getcolors(image.width * image.height) or []
    frequent = sorted(counts, reverse=True)[:HUES]
    palette = Image.new("P", (1, 1))
    palette.putpalette([channel for _, colour in frequent for channel in colour])
    image.quantize(palette=palette, dither=Image.Dither.NONE).save(file, optimize=True)


def text_of(page: Any) -> str:
    """Return the visible text of a page, with 0 for a number and for all numbers of an axis."""
    return TICKS.sub("0\n", VARIES.sub("0", page.inner_text("body"))).strip() + "\n"


if __name__ == "__main__":
    main()
