"""Strings in a run folder or a sweep never add elements to its page."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from dumped_stages import change
from net_runs import EVENTS, write_run
from torch import fx

from compiler_trainer.inspect.dumps import Stage, load
from compiler_trainer.inspect.render import page
from compiler_trainer.sweep import page as sweep_page
from compiler_trainer.sweep.table import points
from passes.ir import ir
from passes.ir.printer import Printed
from passes.ir.record import NodeRecord, Origin
from passes.ir.spec import Spec

HARMLESS = "harmless"
HOSTILE = ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "</script><script>alert(1)</script>",
           "' onmouseover='alert(1)", "{{js}}", "<a href='javascript:alert(1)'>x</a>"]
NODE = shutil.which("node")
STUB = Path(__file__).parents[2] / "support" / "page_in_node.js"


class Elements(HTMLParser):
    """A parser that counts the tags and attributes of a text; `scripts` holds the contents of scripts by id."""

    def __init__(self, text: str):
        super().__init__()
        self.found: Counter[str] = Counter()
        self.scripts: dict[str, str] = {}
        self.inside: str | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.update([tag, *(f"{tag} {name}" for name, _ in attrs)])
        self.found.update(f"{tag} {name} javascript:" for name, value in attrs if (value or "").startswith("javascript:"))
        self.inside = dict(attrs).get("id") or "" if tag == "script" else None

    def handle_data(self, data: str) -> None:
        if self.inside is not None:
            self.scripts[self.inside] = self.scripts.get(self.inside, "") + data

    def handle_endtag(self, tag: str) -> None:
        self.inside = None


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def harmless(plain, tmp_path_factory) -> Counter[str]:
    """Return the elements that scripts put into a page of harmless strings."""
    place = tmp_path_factory.mktemp("harmless")
    texts = written(marked(plain, place, HARMLESS), HARMLESS, place)
    elements = Elements("\n".join(texts)).found
    assert sum(HARMLESS in text for text in texts) > 20 and elements["td"] > 100
    return elements


def marked(plain: Path, place: Path, word: str) -> Path:
    """Return a copy of a run with a word in every string that tools read."""
    name = word.replace("/", "")
    folder = place / f"run {name}"
    shutil.copytree(plain, folder)
    report = json.loads((folder / "report.json").read_text())
    report["seconds"][word] = 1.0
    report |= {"machine": {word: word}, "timeline": [{"program": "step", **e, "stream": word} for e in EVENTS if e["stream"] != "compute"]}
    report["timeline"][0]["node"] = word
    (folder / "report.json").write_text(json.dumps(report))
    (folder / "config.yaml").write_text(json.dumps({"model": {"name": word, word: word}, word: {word: [word, {word: word}]}, "train": {"dtype": word}}))
    records = [{"step": i, "loss": 2.0 / i, "tokens_per_s": 1.0, word: 1.0, f"expert_load/{word}": 1.0 * i, "dropped_rows": 1.0} for i in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for stage in load(folder).dumped:
        mark_stage(stage, word)
        if "segment" not in stage.title:
            for path in (stage.path, *(stage.path.with_suffix(f".{end}json") for end in ("", "costs.", "graph."))):
                path.rename(path.with_name(path.name.replace(".", f"_{name}.", 1)))
    return folder


def mark_stage(stage: Stage, word: str) -> None:
    """Put the word into a stage's graph, report and costs."""
    inputs = [ir.Input(word, "parameter", Spec.whole((2,))), ir.Input(word, word, Spec((), ((word, "sum"),)))]
    value, origin = torch.empty(2), Origin(word, (word, word))

    def edit(graph: fx.Graph) -> None:
        with graph.inserting_before(next(iter(graph.nodes))):
            first, second = graph.placeholder("in_1"), graph.placeholder("in_2")
        ir.set_record(first, NodeRecord(value))
        ir.set_record(second, NodeRecord(Printed(word)))
        with graph.inserting_before(graph.output_node()):
            for name, args in (("odd", (first, word)), ("last", (second,))):
                node = graph.create_node("call_function", Printed(word), args, name=name)
                ir.set_record(node, NodeRecord(value, Spec((), ((word, "sum"),)), phase="forward", layer=None, origin=origin))

    change(stage, edit, inputs=(*inputs, *stage.graph.inputs))
    text = stage.path
    text.write_text(text.read_text().replace("%odd ", f"%{word} ").replace("\n", f" {word}\n", 1))
    path = text.with_suffix(".json")
    report = json.loads(path.read_text())
    report["report"]["counts"][word] = 1
    report["report"]["notes"].append(word)
    report["report"]["reshards"].append(dict.fromkeys(("node", "source", "before", "after", "reason"), word) | {"sent_bytes": 10**9, "collectives": [word]})
    report["accounting"]["traffic"].append({"kind": word, "axis": word, "calls": 1, "sent_bytes": 10**9})
    report["accounting"] |= {"peak_node": word, "peak_line": word, "alive": {word: 1}, "flops": {word: 1}}
    path.write_text(json.dumps(report))
    path = text.with_suffix(".costs.json")
    costs = json.loads(path.read_text())
    costs["collectives"] += [["odd", word, word, 10**9], ["last", word, word, 1]]
    costs["flops"].append(["odd", 1])
    costs["storages"] += [["odd", "last", 10**9, word], ["in_1", word, 10**9, word]]
    path.write_text(json.dumps(costs))


def written(folder: Path, word: str, place: Path) -> list[str]:
    """Return all HTML that the page's scripts write, on every tab and for lines of the last stage, odd ones included.
    """
    run = load(folder)
    scripts = Elements(page(run)).scripts
    last = run.trained[-1]
    lines = [node.line for node in (*last.nodes[:2], *last.nodes[2:-2:25], *last.nodes[-2:])]
    visits = ["run", "overview", "reshards", "memory", "communication", "experts", "diff/0/6", f"sharding/{word}",
              *(f"{tab}/{last.number}/{line}" for tab in ("memory", "graph") for line in lines)]
    file = place / "page.json"
    file.write_text(json.dumps({"js": scripts.pop(""), "texts": scripts, "visits": visits, "searches": [word, "%", "a"]}))
    assert NODE is not None
    done = subprocess.run([NODE, STUB, file], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    html: list[str] = json.loads(done.stdout)
    return html


@pytest.mark.parametrize("word", HOSTILE)
@pytest.mark.sample(2)
def test_the_file_has_the_elements_of_a_harmless_one(plain, tmp_path, word):
    hostile, harmless = (Elements(page(load(marked(plain, tmp_path, w)))) for w in (word, HARMLESS))
    assert hostile.found == harmless.found and hostile.scripts.keys() == harmless.scripts.keys()


@pytest.mark.skipif(NODE is None, reason="no Node is installed")
@pytest.mark.parametrize("word", HOSTILE)
@pytest.mark.sample(2)
def test_what_scripts_put_into_the_page_has_no_other_kinds_of_elements(plain, harmless, tmp_path, word):
    hostile = Elements("\n".join(written(marked(plain, tmp_path, word), word, tmp_path))).found
    assert not hostile.keys() - harmless.keys()  # the number of each depends on how a line of a graph is split


POINT: dict[str, Any] = {
    "point": 0, "status": "failed", "started": "", "config": {}, "overrides": {}, "environment": {},
    "result": {"tokens_per_s": 1.0, "peak_mem_bytes": 1, "compile_s": 1.0, "loss": 1.0},
}  # fmt: skip


def sweep(folder: Path, word: str) -> Path:
    """Return a sweep of two points with a word in every string."""
    for number, status in enumerate(("failed", "done")):
        place = folder / f"sweep {word.replace('/', '')}" / str(number)
        place.mkdir(parents=True)
        result = POINT | {"point": number, "status": status, "error": word, "traceback": word, "started": word}
        result |= {"overrides": {word: f"{word}{number}", "list": [word, number]}, "config": {word: word}}
        result |= {"environment": dict.fromkeys(("ranks", "device", "cores", "torch", "commit", word), word)}
        (place / "point.json").write_text(json.dumps(result))
        (place / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 1.0, word: 1.0}) + "\n")
    return place.parent


@pytest.mark.parametrize("word", HOSTILE)
@pytest.mark.sample(2)
def test_a_sweeps_page_has_the_elements_of_a_harmless_one(tmp_path, word):
    by_word = {}
    for w in (word, HARMLESS):
        folder = sweep(tmp_path, w)
        sweep_page.write(points(folder), folder)
        by_word[w] = Elements((folder / sweep_page.FILE).read_text()).found
        plots = (sweep_page.over_options(points(folder), "loss", [word]), sweep_page.bars(points(folder), "loss", 1))
        texts = [str((line.hovertext, line.x, line.y, line.name)) for plot in plots for line in plot.data]
        assert texts and ("<" not in w or all(w not in text for text in texts))
    assert by_word[word] == by_word[HARMLESS]
