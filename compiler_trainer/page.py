"""Pages that need no network: plots and tables in one file, light or dark as the reader's system is."""

from __future__ import annotations

import html
from collections.abc import Sequence

from plotly import graph_objects as go
from plotly.offline import get_plotlyjs

BLUE, ORANGE = "#3465a4", "#ce5c00"
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
:root {{ color-scheme: light dark; --text: #222; --back: #fff; --line: #ddd; --failed: #fbe9e7; --link: #1a5fb4 }}
@media (prefers-color-scheme: dark) {{
  :root {{ --text: #dde3ea; --back: #14181e; --line: #303843; --failed: #3d1d1f; --link: #7db3f5 }}
}}
body {{ font: 15px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 1280px }}
body {{ color: var(--text); background: var(--back) }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
th, td {{ padding: .2em .7em; border-bottom: 1px solid var(--line); text-align: right }}
.words td, .words th {{ text-align: left }}
a {{ color: var(--link) }} .failed td {{ background: var(--failed) }} .running td {{ color: #888 }}
</style>
<script>{script}</script>
<h1>{title}</h1>
{body}
<script>
const dark = matchMedia("(prefers-color-scheme: dark)");
function paint() {{
  const style = getComputedStyle(document.documentElement), of = (name) => style.getPropertyValue(name).trim();
  for (const plot of document.querySelectorAll(".js-plotly-plot")) {{
    const colours = {{ paper_bgcolor: of("--back"), plot_bgcolor: of("--back"), "font.color": of("--text") }};
    for (const axis of Object.keys(plot.layout).filter((key) => /^[xy]axis/.test(key)))
      Object.assign(colours, {{ [`${{axis}}.gridcolor`]: of("--line"), [`${{axis}}.zerolinecolor`]: of("--line") }});
    Plotly.relayout(plot, colours);
  }}
}}
addEventListener("load", paint);
dark.addEventListener("change", paint);
</script>
</html>
"""


def page(title: str, body: str) -> str:
    """A whole page; `body` is HTML."""
    return PAGE.format(title=html.escape(title), script=get_plotlyjs(), body=body)


def drawn(plot: go.Figure) -> str:
    """A plot as a part of a page."""
    return plot.to_html(full_html=False, include_plotlyjs=False)


def tr(tag: str, cells: Sequence[str | None], kind: str = "", link: str = "") -> str:
    """One row of a table; the first cell leads to a folder."""
    texts = [html.escape(cell or "") for cell in cells]
    texts[0] = f'<a href="{html.escape(link)}/">{texts[0]}</a>' if link else texts[0]
    inside = "".join(f"<{tag}>{text}</{tag}>" for text in texts)
    return f'<tr class="{html.escape(kind)}">{inside}</tr>'
