"""Pages that need no network: plots and tables in one file, light or dark as the reader's system is."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path

from plotly import graph_objects as go
from plotly.offline import get_plotlyjs

BLUE, ORANGE = "#5b8fd9", "#e0a04a"
COLOURS = (BLUE, "#d9655b", ORANGE, "#8a7fd0", "#5fb3a1", "#c77dbb", "#8fae5d")  # those of the page of inspect
LEGEND = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}
LOOK = Path(__file__).with_name("look.css")
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{look}
body {{ margin: 0 auto; padding: 0 20px 20px; max-width: 1320px; overflow-wrap: anywhere }}
h1 {{ font-size: 19px; margin: 0 -20px 14px; padding: 10px 20px; border-bottom: 1px solid var(--line) }}
h2 {{ font-size: 15px; margin: 22px 0 8px }}
figure {{ margin: 0; min-width: 0; border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px }}
figcaption {{ color: var(--quiet) }} figcaption b {{ color: var(--text) }}
.plots {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(360px, 1fr)); gap: 14px; margin: 14px 0 }}
.plots .wide {{ grid-column: 1 / -1 }}
.table {{ overflow-x: auto; margin: 14px 0; overflow-wrap: normal }}
.table::-webkit-scrollbar {{ height: 10px }} .table::-webkit-scrollbar-thumb {{ background: var(--line) }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100% }}
th, td {{ padding: 4px 0 4px 12px; border-bottom: 1px solid var(--line); text-align: right }}
th {{ vertical-align: bottom; font-weight: 500; color: var(--quiet) }} .words td, .words th {{ text-align: left }}
pre {{ overflow-x: auto }}
.best td {{ background: var(--chosen); font-weight: 600 }} .failed td {{ background: var(--removed) }}
.running td {{ color: var(--quiet) }}
</style>
<script>{script}</script>
<h1>{title}</h1>
{body}
<script>
const dark = matchMedia("(prefers-color-scheme: dark)");
function paint() {{
  document.documentElement.dataset.theme = dark.matches ? "dark" : "light";
  const style = getComputedStyle(document.documentElement), of = (name) => style.getPropertyValue(name).trim();
  for (const plot of document.querySelectorAll(".js-plotly-plot")) {{
    const colours = {{ paper_bgcolor: of("--back"), plot_bgcolor: of("--back"), "font.color": of("--text") }};
    for (const axis of Object.keys(plot.layout).filter((key) => /^[xy]axis/.test(key)))
      Object.assign(colours, {{ [`${{axis}}.gridcolor`]: of("--line"), [`${{axis}}.zerolinecolor`]: of("--line") }});
    Plotly.relayout(plot, colours).then(() => Plotly.Plots.resize(plot));  // plots added later have changed its width
  }}
}}
addEventListener("load", paint);
dark.addEventListener("change", paint);
</script>
</html>
"""


def page(title: str, body: str) -> str:
    """Return a full page; `body` is HTML."""
    look = LOOK.read_text(encoding="utf-8")
    return PAGE.format(title=html.escape(title), look=look, script=get_plotlyjs(), body=body)


def figure_html(plot: go.Figure, title: str = "", sentence: str = "", wide: bool = False) -> str:
    """Return a plot with its title and a caption; the plot is as wide as its container."""
    margin, font = {"l": 20, "r": 20, "t": 10, "b": 20}, {"family": "system-ui, sans-serif", "size": 12}
    plot.update_layout(template="plotly_white", margin=margin, font=font, colorway=COLOURS, legend=LEGEND)
    plot.update_xaxes(automargin=True).update_yaxes(automargin=True)
    plot_html = plot.to_html(full_html=False, include_plotlyjs=False, config={"responsive": True, "displaylogo": False})
    caption = f"<figcaption><b>{html.escape(title)}</b> {html.escape(sentence)}</figcaption>"
    return f'<figure class="{"wide" if wide else ""}">{caption}{plot_html}</figure>'


def plots(parts: Iterable[str]) -> str:
    """Return plots side by side, as many as fit in the window."""
    return f'<div class="plots">{"".join(parts)}</div>'


def table(rows: Iterable[str], kind: str = "") -> str:
    """Return a table that scrolls if the window is narrower."""
    return f'<div class="table"><table class="{kind}">{chr(10).join(rows)}</table></div>'


def tr(tag: str, cells: Sequence[str | None], kind: str = "", link: str = "") -> str:
    """Return one row of a table; the first cell links to a file or folder."""
    texts = [html.escape(cell or "") for cell in cells]
    texts[0] = f'<a href="{html.escape(link)}">{texts[0]}</a>' if link else texts[0]
    cell_html = "".join(f"<{tag}>{text}</{tag}>" for text in texts)
    return f'<tr class="{html.escape(kind)}">{cell_html}</tr>'
