"""The page of a run, opened in headless Chromium: it is fast, logs nothing, and agrees with Python."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from browser import CHROMIUM, cut, opened
from dumped_stages import change
from net_runs import EVENTS, write_run
from torch import fx

from compiler_trainer.inspect import glance
from compiler_trainer.inspect.dumps import Run, load
from compiler_trainer.inspect.render import described_counts, page
from compiler_trainer.inspect.words import PASSES
from passes.ir import ir
from passes.ir.mesh import Mesh
from passes.ir.order import ZIGZAG
from passes.ir.spec import Factor, Spec, boxes

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    return load(write_run(tmp_path_factory.mktemp("run")))


def show(browser, run: Run, file: Path, width: int = 1300, scheme: str = "light"):
    """Return the page of a run, loaded."""
    file.write_text(page(run), encoding="utf-8")
    shown = opened(browser, file, width, scheme)
    shown.wait_for_selector("body[data-ready]")
    return shown


def go(shown, address: str) -> None:
    shown.evaluate(f"location.hash = {address!r}")
    shown.wait_for_function(f"document.body.dataset.shown === '#{address}'")


def text(shown, place: str) -> str:
    return shown.locator(place).inner_text()


def test_the_run_comes_first(browser, run, tmp_path):
    metrics = [{"step": i + 1, "loss": 5.0 - i, "lr": 0.5, "tokens": 8 * i, "tokens_per_s": 100.0 + i} for i in range(4)]
    metrics[-1]["eval_loss"] = 2.25
    shown = show(browser, replace(run, metrics=metrics, config={"optim": {"name": "sgd"}}), tmp_path / "page.html")
    assert "at the end 2, validation 2.25" in text(shown, "#loss") and shown.locator("#loss circle").count() == 1
    assert shown.locator("#loss svg text").all_text_contents() == ["2", "2.5", "3", "3.5", "4", "4.5", "5", "1", "2", "3", "4"]  # both axes
    assert "101.5" not in text(shown, "#facts") and "102 tokens/s (median)" in text(shown, "#facts")
    assert "optim.name" in text(shown, "#changed") and shown.locator("#compiled tr").count() > 1
    assert shown.errors == []

    shown = show(browser, replace(run, metrics=[]), tmp_path / "page.html")
    assert "has trained nothing" in text(shown, "#run") and shown.errors == []


SLOTS = [[("F0.0", 0.0, 1.0), ("F1.0", 1.0, 2.0), ("B0.0", 4.0, 6.0), ("B1.0", 7.0, 9.0), ("U0", 9.0, 9.5)],
         [("F0.1", 1.0, 2.0), ("B0.1", 2.0, 4.0), ("F1.1", 4.0, 5.0), ("B1.1", 5.0, 7.0)]]  # fmt: skip
STAGES = {
    "schedule": "1f1b", "idle": 0.25, "ranks_of_stages": [0, 1], "layers": [["layers.0", "layers.1"], ["layers.2"]], "task_ms": {"F0": 1.0},
    "busy_ms": [6.5, 6.0], "forwards_kept": [2, 1],
    "memory": [{"device_bytes": 2**30, "bytes": 2**29, "fits": n == 0, "kinds": {"parameters": 2**29}} for n in range(2)],
    "sent_a_microbatch": [{"source": 0, "to": 1, "bytes": 2**20, "values": ["add"]}],
}  # fmt: skip


def test_the_table_of_pipeline_stages_is_a_picture(browser, run, tmp_path):
    drawn = {"schedule": "1f1b", "unit": "ms", "idle": 0.25, "slots": SLOTS}
    report = run.report | {"pipeline": drawn, "prediction": {"pipeline": STAGES}}
    shown = show(browser, replace(run, report=report), tmp_path / "page.html")
    go(shown, "pipeline")
    assert "1f1b on 2 pipeline ranks: idle 25.0 %" in text(shown, "#pipeline h2 >> nth=0") and "pp 2" in text(shown, "#mesh")
    assert shown.locator("#slots rect[fill]").count() == sum(map(len, SLOTS))
    assert shown.locator("#slots text.slot").all_text_contents() == ["0", "1", "0", "1", "0", "0", "1", "1"]
    titles = shown.locator("#slots rect[fill] title").all_text_contents()
    assert titles[0] == "F0.0: forward of microbatch 0 in stage 0, 1.00 ms from 0.00 µs on" and titles[4].startswith("U0: update, 500 µs")
    boxes = [shown.locator("#slots rect[fill]").nth(i).bounding_box() for i in (2, 3)]
    assert boxes[0]["width"] == pytest.approx(boxes[1]["width"], abs=1) and boxes[1]["x"] > boxes[0]["x"] + 1.4 * boxes[0]["width"]
    assert "layers.0 to layers.1 (2)" in text(shown, "#ranks") and "does not fit" in text(shown, "#ranks tr >> nth=2")
    assert "1.00 MiB to 1" in text(shown, "#ranks tr >> nth=1") and shown.errors == []

    shown = show(browser, replace(run, report=run.report | {"pipeline": drawn | {"unit": "forwards"}}), tmp_path / "page.html")
    go(shown, "pipeline")
    assert "a dry run" in text(shown, "#pipeline") and shown.locator("#ranks").count() == 0 and shown.errors == []


METRICS = [
    {"step": i + 1, "loss": 5.0 - i / 9, "grad_norm": 1.0 + i, "lr": 3e-4, "mfu": 0.41, "tflops": 1e-4, "step_ms": 1234.5,
     "peak_mem_bytes": 10**9, "expert_load/layers.0.feed_forward.experts": 1.0 + i}
    for i in range(30)
]  # fmt: skip


def test_metrics_have_names_and_units(browser, run, tmp_path):
    shown = show(browser, replace(run, metrics=METRICS), tmp_path / "page.html")
    cards = dict(zip(shown.locator("#run .card h3").all_text_contents(), shown.locator("#run .card .big").all_text_contents(), strict=True))
    assert cards["Learning rate"] == "0.0003" and cards["MFU: model FLOPs over the GPU's peak"] == "41 %"
    assert cards["Time of a step"] == "1.23 s" and cards["Model FLOPs of a rank, without recomputation"] == "100 MFLOP/s"
    assert cards["Peak memory of a rank"] == "954 MiB"


def test_a_single_held_out_loss_is_a_dashed_line(browser, run, tmp_path):
    metrics = [dict(record) for record in METRICS]
    for number, record in enumerate((metrics[10], metrics[20])):
        record["eval_loss"] = 4.0
        shown = show(browser, replace(run, metrics=metrics), tmp_path / "page.html")
        assert shown.locator("#loss .alone").count() == (1, 0)[number] and shown.locator("#loss circle").count() == number + 1


@pytest.mark.parametrize(("width", "scheme"), [(800, "light"), (800, "dark"), (1400, "dark")])
def test_nothing_is_cut(browser, run, tmp_path, width, scheme):
    names = [name for name, *_ in run.trained[-1].costs["collectives"]]
    events = [{**e, "node": names[0], "program": "step"} for e in EVENTS]
    complete = replace(run, metrics=METRICS, report=run.report | {"timeline": events})
    shown = show(browser, complete, tmp_path / "page.html", width, scheme)
    tabs = shown.evaluate("Object.keys(TABS)")
    assert len(tabs) == 9
    for address in (*tabs, f"graph/{run.trained[-1].number}/30"):
        go(shown, address)
        assert cut(shown) == [], address
    assert text(shown, "#theme") == "◐" and shown.errors == []


def test_a_window_that_is_made_narrower_cuts_nothing(browser, run, tmp_path):
    shown = show(browser, replace(run, metrics=METRICS), tmp_path / "page.html", 1400)
    shown.set_viewport_size({"width": 800, "height": 800})
    assert cut(shown) == []


def test_passes_and_counts_are_in_words(browser, run, tmp_path):
    shown = show(browser, run, tmp_path / "page.html")
    go(shown, "overview")
    for stage, row in zip(run.dumped, shown.locator("#passes tbody tr").all_inner_texts(), strict=True):
        assert f"{stage.program}: {stage.name}" in row and PASSES[stage.name] in row
    assert list(described_counts({"drop": 3, "masks": 0, "psum_before": 4, "psum_after": 0})) == [("without effect", None, 3), ("psum", 4, 0)]


def test_an_answer_that_is_none_takes_a_line_and_no_card(browser, run, tmp_path):
    shown = show(browser, run, tmp_path / "page.html")
    for answer in ("reshard", "exposed"):
        shown.evaluate(f"run.glance.{answer} = null")
    go(shown, "overview")
    assert shown.locator("#overview .card").count() == 1
    assert "No reshards" in text(shown, "#overview") and "No collectives" in text(shown, "#overview")


def test_three_answers_are_at_a_glance(browser, run, tmp_path):
    shown, stage = show(browser, run, tmp_path / "page.html"), run.trained[-1]
    go(shown, "overview")
    reshard = glance.reshards(run)[0]
    card = text(shown, "#glance-reshard")
    assert f"%{reshard['node']}\n" in card and reshard["source"] in card and reshard["before"] in card
    assert shown.evaluate("run.glance.reshard.sent_bytes") == reshard["sent_bytes"] == max(
        r["sent_bytes"] for s in run.stages for r in s.report["report"]["reshards"])

    costs, card = stage.report["accounting"], text(shown, "#glance-peak")
    assert f"%{costs['peak_node']}" in card
    assert shown.evaluate("run.glance.peak.bytes") == costs["peak_bytes"]
    assert dict(shown.evaluate("run.glance.peak.kinds")) == costs["alive"]
    largest = glance.alive(stage, stage.by_name[costs["peak_node"]].line)[0]
    assert f"%{largest.node}" in card

    exposed, card = glance.collectives(run, stage)[0], text(shown, "#glance-exposed")
    assert f"%{exposed.node}\n" in card and f"{exposed.kind} over {exposed.axis}" in card and "nothing hides it" in card
    assert shown.errors == []


def test_every_tab_shows_its_data(browser, run, tmp_path):
    shown, stage = show(browser, run, tmp_path / "page.html"), run.trained[-1]
    go(shown, "reshards")
    assert shown.locator("#reshard-table tbody tr").count() == len(glance.reshards(run))
    go(shown, "memory")
    alive = glance.alive(stage, glance.peak_line(stage)[0])
    assert f"%{alive[0].node}" in text(shown, "#alive tbody tr:first-child")
    assert shown.locator("#alive tbody tr").count() == min(len(alive), 100) + (len(alive) > 100)
    shown.evaluate("main().memory.times.fill(13)")
    first_row = "showMemory().then(() => document.querySelector('#alive tbody tr:first-child').innerText)"
    assert f"13 x {stage.by_name[alive[0].node].value}" in shown.evaluate(first_row)
    go(shown, "communication")
    assert shown.locator("#by-axis tbody tr").count() == len(stage.report["accounting"]["traffic"])
    assert shown.locator("#collectives tbody tr").count() == len(stage.costs["collectives"])
    assert "run.dry=true" in text(shown, "#timeline")
    shown.locator("#collectives tbody a").first.click()
    shown.wait_for_function("document.body.dataset.shown.startsWith('#graph/')")
    assert f"%{glance.collectives(run, stage)[0].node} =" in text(shown, ".row.on")
    assert shown.errors == []


def test_the_load_of_experts_is_drawn(browser, run, tmp_path):
    metrics = [{"step": i + 1, "expert_load/layers.0": 1.5, "expert_load/layers.1": 1.0 + i, "dropped_rows": 7.0 * i} for i in range(5)]
    shown = show(browser, replace(run, metrics=metrics), tmp_path / "page.html")
    go(shown, "experts")
    assert "5.00" in text(shown, "#experts-legend") and "28" in text(shown, "#experts-beside .big")
    canvas = shown.locator("#experts-canvas")
    last = canvas.bounding_box()["width"] - 30
    for row, title in enumerate(("layers.0, step 5: 1.50 times the mean", "layers.1, step 5: 5.00 times the mean")):
        canvas.hover(position={"x": last, "y": 22 * row + 11})
        assert canvas.get_attribute("title") == title
    assert shown.errors == []

    shown = show(browser, run, tmp_path / "page.html")
    assert "experts" not in text(shown, "#tabs")


def test_a_diff_is_exact(browser, run, tmp_path):
    shown = show(browser, run, tmp_path / "page.html")
    before, after = (run.program("step")[i] for i in (0, -1))
    go(shown, f"diff/{before.number}/{after.number}")
    counts = dict(reversed(part.split(" ")) for part in text(shown, "#diff-counts").split(", "))
    old, new = ({line.partition(" = ")[0]: line for line in stage.text.splitlines()} for stage in (before, after))
    assert int(counts["removed"]) == len(old.keys() - new.keys()) and int(counts["added"]) == len(new.keys() - old.keys())
    changed = sum(old[key] != new[key] for key in old.keys() & new.keys())
    assert 0 < int(counts["changed"]) <= changed <= int(counts["changed"]) + int(counts["moved"])
    assert shown.errors == []


def test_slices_are_those_of_the_specs(browser, run, tmp_path):
    shown = show(browser, run, tmp_path / "page.html")
    for axis, sizes in (("dp_shard", {"dp_shard": 3, "tp": 2}), ("cp", {"dp_shard": 2, "cp": 3, "tp": 2})):
        mesh, zigzag = Mesh.of(sizes), [axis for axis in sizes if axis == "cp"]
        for name, value in (("mesh", dict(mesh.sizes)), ("zigzag", zigzag), ("blocks", {}), ("flattened", mesh.flattened)):
            shown.evaluate(f"run.{name} = {json.dumps(value)}")
        over = mesh.stored_over
        for dims in ((Factor(13, (axis,)),), (Factor(5, ("tp",)), Factor(4)), (Factor(3), Factor(7, ("tp", over)))):
            spec = Spec((dims, (Factor(6),))).ordered(ZIGZAG)
            for place in mesh:
                drawn = shown.evaluate(f"slices({str(spec)!r}, {json.dumps(place)})")
                cells = {cell for start, length in drawn[0] for cell in range(start, start + length)}
                expected = {cell for box in boxes(spec, mesh, place) if box.size for cell in range(box.offset[0], box.offset[0] + box.size[0])}
                assert cells == expected, (str(spec), place)
    assert shown.errors == []


def test_a_predicted_timeline_is_drawn(browser, run, tmp_path):
    names = [name for name, *_ in run.trained[-1].costs["collectives"]]
    events = [{**e, "node": names[int(e["node"])] if e["stream"] != "compute" else "x", "program": "step"} for e in EVENTS]
    report = {**run.report, "timeline": events}
    shown = show(browser, Run(run.folder, run.config, report, run.metrics, run.dumped), tmp_path / "page.html")
    go(shown, "overview")
    card = text(shown, "#glance-exposed")
    assert f"%{names[1]}\n" in card and "3.00 ms at " in card and "4.00 ms for all collectives" in card
    go(shown, "communication")
    assert "4.00 ms exposed: 40 % of 10.0 ms" in text(shown, "#communication-note")
    assert shown.evaluate("timeline.waits") == [[2, 3], [4, 7]]  # 4 ms in all
    widths = shown.evaluate("[...document.querySelectorAll('#by-axis .meter')].map((bar) => bar.clientWidth || bar.offsetWidth)")
    assert len(set(widths)) > 1 and widths == sorted(widths, reverse=True)
    shown.locator("#timeline canvas").hover()
    shown.mouse.wheel(0, -300)
    assert shown.evaluate("timeline.to - timeline.from") < 10
    assert shown.errors == []


def grow(folder: Path, run: Run) -> Run:
    """Return a run whose last stage has 100,000 nodes: its forward, repeated a thousand times."""
    shutil.copytree(run.folder, folder)
    copied = load(folder).trained[-1]
    nodes = [node for node in copied.graph.graph.nodes if node.op == "call_function"][:100]

    def edit(graph: fx.Graph) -> None:
        with graph.inserting_before(graph.output_node()):
            for i in range(100_000 // len(nodes)):
                for node in nodes:
                    ir.copy_node(graph, node, {n: n for n in node.all_input_nodes})._rename(f"{node.name}_again_{i}")

    change(copied, edit)
    return load(folder)


@pytest.mark.full
def test_a_hundred_thousand_nodes(browser, run, tmp_path, record_property):
    large = grow(tmp_path / "large", run)
    shown = show(browser, large, tmp_path / "page.html")
    took = {"open": float(shown.evaluate("document.body.dataset.ready"))}
    go(shown, f"graph/{large.trained[-1].number}")
    name = large.trained[-1].nodes[-1].name
    shown.keyboard.press("/")
    shown.wait_for_function("document.activeElement.id === 'search'")
    for query, count in ((name, 1), ("again", len(large.trained[-1].nodes) - len(run.trained[-1].nodes))):
        shown.locator("#search").fill(query)
        shown.wait_for_function(f"document.getElementById('found').textContent.startsWith('{count:,} of')")
        took[f"search, {count:,} found"] = float(shown.evaluate("document.getElementById('found').dataset.ms"))
    assert shown.locator("#lines .row").count() < 100
    shown.locator("#search").fill(name)
    shown.keyboard.press("Enter")
    shown.wait_for_function("document.body.dataset.shown.split('/').length === 3")
    assert f"%{name} =" in text(shown, ".row.on") and name in text(shown, "#node h3")
    assert shown.errors == []
    record_property("counted", "page of 100,000 nodes, ms: " + ", ".join(f"{part} {ms:.0f}" for part, ms in took.items()))


def test_the_page_is_the_same_for_the_same_run(run):
    assert page(run) == page(load(run.folder))
