"""Programs of earlier starts: read where nothing has changed, made anew where anything did."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import math
import os
import random
import sys
import textwrap
import types
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from compiler_trainer.config.schema import OptimConfig, PassesConfig
from compiler_trainer.models.loss import loss_of_logits
from compiler_trainer.step import made_of as made_of_module
from compiler_trainer.step.compile import compile_step
from compiler_trainer.step.made_of import made_of, options_of
from compiler_trainer.step.shelf import Shelf
from compiler_trainer.step.sources import Unkeyed
from passes.lower.store import Store
from passes.pipeline.tables import Table, as_text, gpipe, one_f_one_b, zero_bubble
from passes.program.mesh import Mesh

FILES = {
    "net": """
        import os
        import torch
        from torch import nn
        from helpers import parts
        from helpers.parts import scale
        SLOPE = 0.1

        class Net(nn.Module):
            factor = 2.0

            def __init__(self, dim=8, vocab=16, bias=True):
                super().__init__()
                self.dim, self.kinds, self.table = dim, {"a": (1, 2.5)}, torch.arange(4)
                self.look = nn.Embedding(vocab, dim)
                self.head = nn.Linear(dim, vocab, bias)
                self.register_buffer("steps", torch.zeros(2))
                self.act = nn.LeakyReLU(SLOPE)

            def forward(self, tokens):
                x = scale(self.act(self.look(tokens))) * self.factor
                if "1" in (os.environ.get("NET_DOUBLES"), os.environ.get("NVIDIA_DOUBLES")):
                    x = x + x
                return self.head(x)
        """,
    "helpers/__init__": "",
    "helpers/parts": """
        from .deeper import HALF
        def scale(x):
            from helpers import late
            return late.once(x) * HALF
        """,
    "helpers/deeper": "HALF = 0.5\n",
    "helpers/late": "def once(x):\n    return x * 1.0\n",
    "helpers/unused": "NOTHING = 1\n",
    "helpers/losses": """
        from compiler_trainer.models.loss import loss_of_logits
        def twice(model, batch, weight=2):
            return loss_of_logits(model, batch) * weight
        """,
}
BATCH = {"tokens": torch.zeros(4, 8, dtype=torch.int64), "labels": torch.zeros(4, 8, dtype=torch.int64)}


class Place:
    """A folder with a model of one's own, imported anew after each change of a file."""

    def __init__(self, folder: Path):
        self.folder = folder
        for name, text in FILES.items():
            path = folder / f"{name}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(textwrap.dedent(text))

    def replace(self, name: str, old: str, new: str) -> None:
        path = self.folder / f"{name}.py"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def model(self, **how) -> nn.Module:
        for name in [n for n in sys.modules if n == "net" or n.partition(".")[0] == "helpers"]:
            del sys.modules[name]
        importlib.invalidate_caches()
        return importlib.import_module("net").Net(**how)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield Place(tmp_path)
    for name in [n for n in sys.modules if n == "net" or n.partition(".")[0] == "helpers"]:
        del sys.modules[name]


def options(passes=None, optim=None, mesh=None, **further):
    update = OptimConfig(**(optim or {}))
    changed = dataclasses.replace(PassesConfig(), **(passes or {}))
    return options_of(changed, update, Mesh.of(mesh or {}), "cpu", **({"microbatches": 1} | further))


def key(model, loss=loss_of_logits, batch=BATCH, given=None):
    return made_of(model, loss, batch, options() if given is None else given).key


# ---- what matters ------------------------------------------------------------------------------------

EDITS = [
    ("net", "SLOPE = 0.1", "SLOPE = 0.2"),
    ("net", "factor = 2.0", "factor = 3.0"),
    ("net", "* self.factor", "/ self.factor"),
    ("net", "x + x", "x - x"),
    ("net", "(1, 2.5)", "(1, 2.25)"),
    ("net", "torch.arange(4)", "torch.arange(4).flip(0)"),
    ("net", "torch.zeros(2)", "torch.ones(2)"),
    ("net", "nn.LeakyReLU(SLOPE)", "nn.ReLU()"),
    ("helpers/parts", "* HALF", "/ HALF"),
    ("helpers/deeper", "0.5", "0.25"),
    ("helpers/late", "1.0", "3.0"),
    ("helpers/__init__", "", "VERSION = 2\n"),
]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: f"{edit[0]}: {edit[2]}".strip())
def test_a_changed_file_is_another_program(place, edit):
    before = key(place.model())
    place.replace(*edit)
    assert key(place.model()) != before


def alter(model, path, value):
    owner, _, name = path.rpartition(".")
    setattr(model.get_submodule(owner) if owner else model, name, value)
    return model


STATES = {
    "attribute": lambda m: alter(m, "dim", 9),
    "attribute of a kind": lambda m: alter(m, "dim", 8.0),
    "new attribute": lambda m: alter(m, "fresh", None),
    "slope": lambda m: alter(m, "act.negative_slope", 0.3),
    "in place": lambda m: alter(m, "act.inplace", True),
    "kinds": lambda m: alter(m, "kinds", {"b": (1, 2.5)}),
    "order of kinds": lambda m: alter(m, "kinds", {"a": (2.5, 1)}),
    "table": lambda m: alter(m, "table", torch.arange(4) + 1),
    "table's dtype": lambda m: alter(m, "table", torch.arange(4, dtype=torch.int32)),
    "buffer": lambda m: alter(m, "steps", torch.full((2,), 1e-9)),
    "buffer's shape": lambda m: alter(m, "steps", torch.zeros(3)),
    "weight's shape": lambda m: alter(m, "head", nn.Linear(8, 17)),
    "weight's dtype": lambda m: m.double(),
    "frozen": lambda m: m.requires_grad_(False),
    "one frozen": lambda m: alter(m, "head.bias", nn.Parameter(m.head.bias.detach(), False)),
    "no bias": lambda m: alter(m, "head.bias", None),
    "tied": lambda m: alter(m, "head.weight", m.look.weight),
    "padding": lambda m: alter(m, "look.padding_idx", 0),
    "eval mode": lambda m: m.eval(),
    "one in eval mode": lambda m: alter(m, "act", m.act.eval()),
    "another module": lambda m: alter(m, "act", nn.GELU()),
    "GELU's form": lambda m: alter(m, "act", nn.GELU("tanh")),
    "one more module": lambda m: alter(m, "more", nn.Identity()),
    "class attribute": lambda m: setattr(type(m), "factor", 5.0) or m,
    "a global": lambda m: setattr(sys.modules["net"], "SLOPE", 7.0) or m,
    "a global of an import": lambda m: setattr(sys.modules["helpers.deeper"], "HALF", 7.0) or m,
    "a method": lambda m: setattr(type(m), "forward", loss_of_logits) or m,
}


@pytest.mark.parametrize("name", STATES)
def test_a_changed_model_is_another_program(place, name):
    before = key(place.model())
    assert key(STATES[name](place.model())) != before


GIVEN = {
    **{f"passes.{name}": {"passes": {name: value}} for name, value in {"fold_layers": False, "verify": "none"}.items()},
    **{
        f"passes.{group}.{field.name}": {"passes": {group: dataclasses.replace(getattr(PassesConfig(), group), **{field.name: "x"})}}
        for group in ("cast", "shard", "moe", "context", "chunk_loss", "remat", "communication", "segment")
        for field in dataclasses.fields(getattr(PassesConfig(), group))
    },
    **{f"optim.{field.name}": {"optim": {field.name: "passes.update.optimizers.SGD" if field.name == "_target_" else "x"}} for field in dataclasses.fields(OptimConfig) if field.name != "lr"},
    "mesh": {"mesh": {"dp_shard": 2}},
    "other mesh": {"mesh": {"dp_shard": 4}},
    "axes of a mesh": {"mesh": {"tp": 2}},
    "microbatches": {"microbatches": 2},
    "below": {"below": {"tokens": 9}},
    "evaluate": {"evaluate": False},
}


@pytest.mark.parametrize("name", GIVEN)
def test_a_changed_option_is_another_program(place, name):
    model = place.model()
    assert key(model, given=options(**GIVEN[name])) != key(model)


BATCHES = {
    "rows": {name: torch.zeros(2, 8, dtype=torch.int64) for name in BATCH},
    "length": {name: torch.zeros(4, 4, dtype=torch.int64) for name in BATCH},
    "dtype": {name: torch.zeros(4, 8, dtype=torch.int32) for name in BATCH},
    "entries": BATCH | {"positions": BATCH["tokens"]},
    "names": {"tokens": BATCH["tokens"], "labels_": BATCH["labels"]},
    "strides": {name: torch.zeros(8, 4, dtype=torch.int64).t() for name in BATCH},
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_changed_batch_is_another_program(place, name):
    model = place.model()
    assert key(model, batch=BATCHES[name]) != key(model)


def test_a_changed_loss_or_argument_of_it_is_another_program(place):
    model = place.model()
    twice = importlib.import_module("helpers.losses").twice
    losses = loss_of_logits, twice, functools.partial(twice, weight=1), functools.partial(twice, weight=2)
    assert len({key(model, loss) for loss in losses}) == len(losses)


SWITCHES = {
    "deterministic": (torch.use_deterministic_algorithms, True, False),
    "default dtype": (torch.set_default_dtype, torch.float64, torch.float32),
    "precision": (torch.set_float32_matmul_precision, "medium", "highest"),
    "flash": (torch.backends.cuda.enable_flash_sdp, False, True),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_what_is_switched_in_pytorch_is_another_program(place, name):
    switch, on, off = SWITCHES[name]
    model = place.model()
    before = key(model)
    switch(on)
    try:
        assert key(model) != before
    finally:
        switch(off)


VARIABLES = {"NET_DOUBLES": "1", "NVIDIA_DOUBLES": "1", "PYTORCH_CUDA_ALLOC_CONF": "x", "TORCHINDUCTOR_FREEZING": "1", "TRITON_INTERPRET": "1"}


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_that_code_reads_is_another_program(place, name, monkeypatch):
    model = place.model()
    before = key(model)
    monkeypatch.setenv(name, VARIABLES[name])
    assert key(model) != before


VERSIONS = {"torch": (torch, "__version__"), "git": (torch.version, "git_version"), "python": (sys, "version")}


@pytest.mark.parametrize("name", VERSIONS)
def test_another_version_is_another_program(place, name, monkeypatch):
    model = place.model()
    before = key(model)
    monkeypatch.setattr(*VERSIONS[name], "another")
    assert key(model) != before


def test_another_rule_or_pass_of_ours_is_another_program(place, tmp_path, monkeypatch):
    """Every file of both packages counts."""
    from compiler_trainer.step import sources

    folder = tmp_path / "ours"
    (folder / "rules").mkdir(parents=True)
    (folder / "rules" / "a.py").write_text("x = 1")
    before = sources.digest_of([folder])
    (folder / "rules" / "a.py").write_text("x = 2")
    edited = sources.digest_of([folder])
    (folder / "rules" / "b.py").write_text("")
    assert len({before, edited, sources.digest_of([folder])}) == 3
    model = place.model()
    whole = key(model)
    monkeypatch.setattr(made_of_module, "ours", lambda: edited)
    assert key(model) != whole


# ---- what does not -----------------------------------------------------------------------------------

SAME = {
    "seed": lambda m: (torch.manual_seed(7), m)[1],
    "weights": lambda m: (m.head.weight.data.normal_(), m)[1],
    "all weights": lambda m: ([p.data.add_(1) for p in m.parameters()], m)[1],
    "gradients": lambda m: (m.look(torch.tensor([1])).sum(), m)[1],
    "built again": lambda m: m,
}


@pytest.mark.parametrize("name", SAME)
def test_weights_and_seeds_do_not_matter(place, name):
    before = key(place.model())
    assert key(SAME[name](place.model())) == before


@pytest.mark.parametrize("name", ["HOME", "PATH", "LANG", "USER", "MASTER_PORT", "LOCAL_RANK", "SLURM_JOB_ID", "EDITOR",
    "CUDA_HOME", "HF_TOKEN", "NVIDIA_VISIBLE_DEVICES", "TRITON_CACHE_DIR", "TORCH_NCCL_ASYNC_ERROR_HANDLING"])
def test_variables_that_code_does_not_read_do_not_matter(place, name, monkeypatch):
    model = place.model()
    before = key(model)
    monkeypatch.setenv(name, "another")
    assert key(model) == before


def test_recurrent_layers_of_torch_are_told_by_what_they_are():
    """They hold weak references to their weights."""
    layer = lambda **how: key(nn.GRU(4, 4, **how))  # noqa: E731
    assert layer() == layer() != layer(num_layers=2) != layer(bidirectional=True)


def test_the_build_of_a_release_does_not_matter(place, monkeypatch):
    before = key(model := place.model())
    monkeypatch.setattr(torch, "__version__", f"{torch.__version__.partition('+')[0]}+cu130")
    assert key(model) == before


def test_the_rate_other_values_and_files_that_nobody_imports_do_not_matter(place, monkeypatch, tmp_path):
    before = key(place.model())
    place.replace("helpers/unused", "1", "2")
    (tmp_path / "notes.py").write_text("x = 1")
    (tmp_path / "notes.txt").write_text("x")
    monkeypatch.chdir(tmp_path)
    values = {name: torch.ones(4, 8, dtype=torch.int64) for name in BATCH}
    assert key(place.model(), batch=values, given=options(optim={"lr": 0.5})) == before
    os.utime(tmp_path / "net.py", (1, 1))
    assert key(place.model()) == before


# ---- what cannot be known ----------------------------------------------------------------------------


def closure():
    return lambda model, batch: loss_of_logits(model, batch)


@pytest.mark.parametrize(
    "loss",
    [closure(), functools.partial(closure(), 1), nn.Linear, types.SimpleNamespace(), random.Random(1)],
    ids=["closure", "partial", "class", "namespace", "object"],
)
def test_what_has_no_text_is_made_anew(place, loss):
    with pytest.raises(Unkeyed):
        if loss is nn.Linear:
            key(alter(place.model(), "act", type("Local", (nn.Module,), {})()))
        key(place.model(), loss)


READS = [
    "open('numbers.txt')", "os.environ[SLOPE]", "dict(os.environ)", "importlib.import_module('x')", "eval('1')",
    "pathlib.Path('x').read_text()", "torch.load('x')", "np.load('x')", "sys.argv", "__import__('x')",
]  # fmt: skip


@pytest.mark.parametrize("read", READS)
def test_code_that_reads_what_its_text_does_not_tell_is_made_anew(place, read):
    place.replace("helpers/late", "return", f"{read}\n    return")
    with pytest.raises(Unkeyed, match=r"late\.py"):
        key(place.model())


def test_hooks_and_patched_forwards_are_made_anew(place):
    hooked, patched = place.model(), place.model()
    hooked.register_forward_hook(lambda module, given, out: out * 2)
    patched.forward = types.MethodType(lambda self, tokens: self.head(self.look(tokens)), patched)
    for model in (hooked, patched):
        with pytest.raises(Unkeyed):
            key(model)


# ---- the store ---------------------------------------------------------------------------------------


def start(place, shelf, **how):
    """(the losses of two steps, the report) of a start."""
    torch.manual_seed(0)
    how = {"optim": {"lr": 0.1}, "ranks": "lockstep", "mesh": {"dp_shard": 2}} | how
    step = compile_step(place.model(), loss_of_logits, BATCH, shelf=shelf, **how)
    batch = {name: torch.arange(32).reshape(4, 8) % 16 for name in BATCH}
    return [step(batch)["loss"], step(batch)["loss"], step.evaluate(batch)], step.report


def test_a_second_start_reads_the_program_and_computes_the_same(place, tmp_path):
    shelf = Shelf(store=Store(tmp_path / "programs"))
    first, made = start(place, shelf)
    second, read = start(place, shelf)
    assert first == second and not made["program"]["read"] and read["program"]["read"]
    assert json.dumps(made["passes"]) == json.dumps(read["passes"]) and set(read["seconds"]) == {"program", "step.lower"}
    place.replace("helpers/deeper", "0.5", "0.25")
    third, again = start(place, shelf)
    assert third != first and not again["program"]["read"]


def test_graphs_are_stored_with_the_program(place, tmp_path):
    from passes.check.runner import Dumper

    store, folders = Store(tmp_path / "programs"), [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        start(place, Shelf(folder, store), observe=Dumper(folder))
    a, b = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders)
    assert a == b and len(a) > 30


def test_a_program_that_was_stored_without_graphs_is_made_anew_for_them(place, tmp_path):
    from passes.check.runner import Dumper

    store, folder = Store(tmp_path / "programs"), tmp_path / "graphs"
    folder.mkdir()
    start(place, Shelf(None, store))
    assert not start(place, Shelf(folder, store), observe=Dumper(folder))[1]["program"]["read"] and list(folder.iterdir())


def test_check_stored_finds_a_program_that_is_not_what_is_made_now(place, tmp_path, monkeypatch):
    shelf, how = Shelf(store=Store(tmp_path / "programs")), {"lower": {"backend": "eager", "check_stored": True}}
    start(place, shelf)
    assert not start(place, shelf, **how)[1]["program"]["read"]
    stale = next(path for path in (tmp_path / "programs").iterdir())
    place.replace("helpers/deeper", "0.5", "0.25")
    model = place.model()
    monkeypatch.setattr("compiler_trainer.step.shelf.Shelf.find", lambda self, key: found_under(self, stale.name))
    with pytest.raises(RuntimeError, match="not what is made now"):
        compile_step(model, loss_of_logits, BATCH, shelf=shelf, optim={"lr": 0.1}, mesh={"dp_shard": 2}, ranks="lockstep", **how)


def found_under(shelf, key):
    from compiler_trainer.step.shelf import unpacked

    return unpacked(shelf.store.get(key))


def test_damage_is_noticed_and_made_anew(place, tmp_path):
    shelf, drawn = Shelf(store=Store(tmp_path / "programs")), random.Random(0)
    _, report = start(place, shelf)
    path = tmp_path / "programs" / report["program"]["stored_as"]
    whole = path.read_bytes()
    for number in range(200):
        damaged = bytearray(whole)
        at = drawn.randrange(len(whole))
        if number % 3 == 0:
            damaged[at] ^= 1 << drawn.randrange(8)
        elif number % 3 == 1:
            del damaged[at:]
        else:
            damaged = bytearray()
        path.write_bytes(bytes(damaged))
        with pytest.warns(UserWarning, match="damaged"):
            assert shelf.find(path.name) is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses, again = start(place, shelf)
    assert not again["program"]["read"]
    assert start(place, shelf)[1]["program"]["read"]


def test_another_operator_s_program_is_not_read(place, tmp_path):
    """A text that names what this process does not have is said, and made anew."""
    import zlib

    shelf = Shelf(store=Store(tmp_path / "programs"))
    _, report = start(place, shelf)
    name = report["program"]["stored_as"]
    kept = json.loads(zlib.decompress(shelf.store.get(name)))
    kept["programs"] = kept["programs"].replace("aten.embedding.default", "nowhere.embedding.default")
    shelf.store.put(name, zlib.compress(json.dumps(kept).encode()))
    with pytest.warns(UserWarning, match="cannot be read"):
        assert shelf.find(name) is None
    assert math.isfinite(start(place, shelf)[0][0])


def test_a_schedule_in_a_file_is_read_anew(place, tmp_path):
    shelf, file = Shelf(store=Store(tmp_path / "programs")), tmp_path / "table.txt"

    def started(table: Table) -> tuple[list[float], bool]:
        file.write_text(as_text(table))
        pipeline = {"pipeline": {"schedule": str(file)}}
        losses, report = start(place, shelf, mesh={"pp": 2}, microbatches=2, passes=pipeline)
        return losses, report["program"]["read"]

    first, again, split = started(one_f_one_b(2, 2)), started(gpipe(2, 2)), started(zero_bubble(2, 2))
    assert [is_read for _, is_read in (first, again, split)] == [False, True, False]  # the order alone changes no program
    assert first[0] == again[0] == pytest.approx(split[0])
