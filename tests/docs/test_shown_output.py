"""README and the guides show the output that the command prints."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import ROOT, Command, commands

from compiler_trainer.cli.verbs.plan import question
from compiler_trainer.config.device import resolve_auto
from compiler_trainer.config.schema import Config, MeshConfig
from compiler_trainer.models.subject import subject
from compiler_trainer.planning.dry import compile_dry
from compiler_trainer.planning.search import all_forms
from compiler_trainer.planning.space import sizes_of
from passes.ir.printer import print_program

README, PLANNER = (ROOT / "README.md").read_text(), (ROOT / "docs/internals/planner.md").read_text()
PLAN, RUN = [c for c in commands() if c.page == "README.md" and c.words[0] == "compiler-trainer"][:2]
SHORTENED = re.compile(r"_default|_tensor|\.Tensor|p_model_layers_0_feed_forward_|_weight")
(TUNE,) = [c for c in commands() if "model.path=smol" in c.words and "guides" in c.page]


def shown(command: Command) -> list[str]:
    """Return the lines that a page shows below a command."""
    lines = (ROOT / command.page).read_text().splitlines()[command.line - 1 :]
    below = itertools.islice(itertools.dropwhile(lambda line: line.endswith("\\"), lines), 1, None)
    return list(itertools.takewhile(lambda line: not line.startswith(("```", "$ ")), below))


def printed(command: Command, folder: Path) -> list[str]:
    """Run a command and return the lines it prints."""
    words = [sys.executable, "-m", "compiler_trainer", *command.words[1:], f"run.dir={folder / 'run'}"]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    return done.stdout.splitlines()


def cells(line: str) -> list[str]:
    """Return the cells of a table row."""
    return [part.strip() for part in re.split(r"[│┃]|  +", line) if part.strip()]


def count_of_settings(options: list[str]) -> str:
    """Return the number of settings that `plan` searches."""
    request = question(options, options, {}).request
    return f"{len(all_forms(request, sizes_of(request.cfg, subject(request.cfg).module))):,}"


def test_the_number_of_settings_is_that_of_the_plan():
    count = count_of_settings(PLAN.options)
    assert shown(PLAN)[-1].startswith(f"{count} settings in closed form")
    assert f"{count} for 8B on 8 GPUs" in PLANNER


@pytest.mark.full
def test_the_number_of_settings_of_a_large_plan():
    large = ["model=llama3_405b", "cluster=h100", "cluster.gpus=1024", "train.seq_len=8192", "train.global_batch_size=512"]
    assert f"{count_of_settings(large)} for 405B on 1,024" in PLANNER


@pytest.mark.full
def test_readme_shows_what_plan_prints(tmp_path):
    rows = [cells(line) for line in printed(PLAN, tmp_path)]
    for line in shown(PLAN):
        columns = [cell for cell in cells(line) if cell != "..."]
        assert any(columns == row[: len(columns)] for row in rows), line


@pytest.mark.full
def test_readme_and_guide_show_what_a_run_prints(tmp_path):
    lines = printed(RUN, tmp_path)
    opening, steps = lines[: lines.index("compiling (inductor)") + 1], {shape(line) for line in lines}
    for line in shown(RUN):
        assert line == "..." or line in opening or line.startswith("step ") and shape(line) in steps, line
    assert {shape(line) for line in shown(TUNE) if line.startswith("step ")} <= steps


def shape(line: str) -> str:
    """Replace the numbers of a line with #."""
    return re.sub(r"[\d.,:e+-]*\d", "#", line)


def test_readme_shows_what_shard_makes():
    cfg = resolve_auto(Config(mesh=MeshConfig(dp_shard=2, tp=2)), on_gpu=False)
    programs: list[str] = []
    compile_dry(cfg, lambda program, record: programs.append(print_program(program)) if record.name == "shard" else None)
    lines = [" ".join(SHORTENED.sub("", line).split()) for line in programs[0].splitlines()]
    block = README[README.index("One file a pass.") :].split("\n\n")[1].splitlines()
    assert len(block) == 6
    for line in block:
        wanted = re.compile(re.escape(" ".join(line.split())).replace(r"\.\.\.", ".*"))
        assert any(wanted.match(candidate) for candidate in lines), line
