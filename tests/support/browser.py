"""Pages in Chromium without a display, and a search for parts that a reader would see cut off."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
         "--disable-component-update --disable-sync").split()
SMALLEST_PX = 11
# texts drawn on canvases are recorded with their positions
REMEMBER = """
const plain = CanvasRenderingContext2D.prototype.fillText;
window.letters = [];
CanvasRenderingContext2D.prototype.fillText = function (text, x, y, ...more) {
  const wide = Math.min(this.measureText(text).width, more[0] ?? Infinity), left = this.textAlign === "right" ? x - wide : x;
  letters.push({ text, left, right: left + wide, y, canvas: this.canvas, px: parseFloat(this.font) });
  return plain.call(this, text, x, y, ...more);
};
"""
CUT = """(smallest) => {
  const found = [], seen = (e) => e.checkVisibility() && e.getBoundingClientRect().width > 0;
  const scrolls = (e) => e && (/auto|scroll/.test(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
  const name = (e) => `<${e.tagName.toLowerCase()} ${e.id || e.getAttribute("class") || ""}> ${e.textContent.trim().slice(0, 40)}`;
  if (document.documentElement.scrollWidth > innerWidth) found.push(`the page is ${document.documentElement.scrollWidth} pixels wide`);
  for (const e of document.body.querySelectorAll("*")) {
    if (!seen(e) || e.closest(".modebar-container, #js-plotly-tester, script")) continue;
    const { left, right } = e.getBoundingClientRect();
    if (!scrolls(e.parentElement) && (left < -1 || right > innerWidth + 1)) found.push(`out of the window: ${name(e)}`);
    if (getComputedStyle(e).overflowX === "hidden" && e.scrollWidth > e.clientWidth + 1 && !e.closest("svg")) found.push(`cut: ${name(e)}`);
  }
  for (const svg of document.querySelectorAll("svg:not(svg svg)")) {
    const place = svg.closest("figure")?.getBoundingClientRect();
    if (place && svg.getBoundingClientRect().right > place.right + 1) found.push(`wider than its place: ${name(svg.closest("figure"))}`);
    const box = svg.getBoundingClientRect(), texts = [...svg.querySelectorAll("text")].filter((t) => seen(t) && t.textContent.trim());
    for (const t of texts) {
      const r = t.getBoundingClientRect(), m = t.getScreenCTM(), px = parseFloat(getComputedStyle(t).fontSize) * Math.hypot(m.a, m.b);
      if (px < smallest - 0.01) found.push(`${px.toFixed(1)} pixels: ${name(t)}`);
      if (r.left < box.left - 1 || r.right > box.right + 1 || r.top < box.top - 1 || r.bottom > box.bottom + 1) found.push(`out of its plot: ${name(t)}`);
    }
    const named = texts.filter((t) => !t.closest(".textpoint")).map((t) => [t, t.getBoundingClientRect()]);
    named.forEach(([a, p], i) => named.slice(i + 1).forEach(([b, q]) => {
      const wide = Math.min(p.right, q.right) - Math.max(p.left, q.left), high = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
      if (wide > 2 && high > 4) found.push(`on each other: ${name(a)} and ${name(b)}`);
    }));
  }
  for (const { text, left, right, y, canvas, px } of window.letters.filter((l) => seen(l.canvas)))
    if (left < 0 || right > canvas.clientWidth || y > canvas.clientHeight || px < smallest) found.push(`on a canvas: ${text} from ${left} to ${right}, ${px} pixels`);
  return found;
}"""


def opened(browser: Any, file: Path, width: int = 1300, scheme: str = "light") -> Any:
    """Return a page; `errors` has its console errors and network requests."""
    shown = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    shown.errors = []
    shown.on("console", lambda message: shown.errors.append(message.text) if message.type in ("error", "warning") else None)
    shown.on("pageerror", lambda error: shown.errors.append(str(error)))
    shown.on("request", lambda request: shown.errors.append(request.url) if not request.url.startswith(("file:", "data:")) else None)
    shown.add_init_script(REMEMBER)
    shown.goto(f"file://{file.resolve()}")
    return shown


def cut(shown: Any) -> list[str]:
    """Return the texts that reach out of the window or their plot, overlap other text, or are too small to read."""
    shown.wait_for_timeout(100)  # plots adapt to the size of their container
    found: list[str] = shown.evaluate(CUT, SMALLEST_PX)
    return found
