"""Programs of earlier starts are read if exported graph, options and versions are the same, else compiled again."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import math
import random
import subprocess
import sys
import textwrap
import types
import warnings
from pathlib import Path

import pytest
import torch
from oracle import perceptron, points, squared_error
from torch import nn

from compiler_trainer.config.device import passes_on
from compiler_trainer.config.schema import OptimConfig, PassesConfig
from compiler_trainer.models.loss import loss_of_logits
from compiler_trainer.pipeline import build_pipeline
from compiler_trainer.request import CompileRequest
from compiler_trainer.step import program_key
from compiler_trainer.step.compile import compile_step
from compiler_trainer.step.exported import export
from compiler_trainer.step.program_cache import ProgramCache
from compiler_trainer.step.program_key import Unkeyed, key_of
from passes.ir.mesh import Mesh
from passes.lower.store import Store
from passes.pipeline.schedules import Schedule, as_text, gpipe, one_f_one_b, zero_bubble
from passes.rules import ADDED, RULES, add_rule

NET = """
    import os
    from pathlib import Path
    import torch
    from torch import nn
    import helper
    SLOPE = 0.1

    class Net(nn.Module):
        factor = 2.0

        def __init__(self, dim=8, vocab=16):
            super().__init__()
            self.unused, self.table = 1, torch.arange(8.0)
            self.look = nn.Embedding(vocab, dim)
            self.head = nn.Linear(dim, vocab)
            self.register_buffer("steps", torch.zeros(dim))
            self.act, self.drop = nn.LeakyReLU(SLOPE), nn.Dropout(0.5)

        def forward(self, tokens):
            x = helper.scale(self.drop(self.act(self.look(tokens)))) * self.factor + self.table + self.steps
            if os.environ.get("NET_DOUBLES") == "1":
                x = x + x
            file = Path(__file__).with_name("shift.txt")
            return self.head(x + float(file.read_text()) if file.exists() else x)
    """
HELPER = "HALF = 0.5\ndef scale(x):\n    return x * HALF\n"
ON_CPU = passes_on(PassesConfig(), on_gpu=False)
BATCH = {"tokens": torch.zeros(4, 8, dtype=torch.int64), "labels": torch.zeros(4, 8, dtype=torch.int64)}


class Place:
    """A folder with a model that is imported again after each change of a file."""

    def __init__(self, folder: Path):
        self.folder = folder
        for name, text in {"net": NET, "helper": HELPER}.items():
            (folder / f"{name}.py").write_text(textwrap.dedent(text))

    def replace(self, name: str, old: str, new: str) -> None:
        path = self.folder / f"{name}.py"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def model(self, **sizes) -> nn.Module:
        forget()
        return importlib.import_module("net").Net(**sizes)


def forget():
    for name in ("net", "helper"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield Place(tmp_path)
    forget()


def key(model, loss=loss_of_logits, batch=BATCH, **fields):
    request = CompileRequest(model=model, loss_fn=loss, batch=batch, passes=ON_CPU, **fields)
    return key_of(request, export(request, build_pipeline(request).folding, lambda what: None)).digest


# ---- changes of the key ------------------------------------------------------------------------------


def altered(model, path, value):
    owner, _, name = path.rpartition(".")
    setattr(model.get_submodule(owner) if owner else model, name, value)
    return model


def hooked(model):
    model.act.register_forward_hook(lambda module, inputs, out: out * 2)
    return model


EDITS = {
    "a global": ("net", "SLOPE = 0.1", "SLOPE = 0.2"),
    "a class attribute": ("net", "factor = 2.0", "factor = 3.0"),
    "an operator": ("net", "* self.factor", "/ self.factor"),
    "an import": ("helper", "0.5", "0.25"),
}
MODELS = {
    "an attribute": lambda m: altered(m, "factor", 4.0),
    "a module's attribute": lambda m: altered(m, "act.negative_slope", 0.3),
    "a constant": lambda m: altered(m, "table", torch.arange(8.0) + 1),
    "a constant's dtype": lambda m: altered(m, "table", torch.arange(8)),
    "a buffer's dtype": lambda m: altered(m, "steps", torch.zeros(8, dtype=torch.int64)),
    "a buffer's shape": lambda m: altered(m, "steps", torch.zeros(1)),
    "a weight's shape": lambda m: altered(m, "head", nn.Linear(8, 17)),
    "a weight's dtype": lambda m: altered(m.double(), "steps", torch.zeros(8)),
    "one frozen": lambda m: altered(m, "head.bias", nn.Parameter(m.head.bias.detach(), False)),
    "no bias": lambda m: altered(m, "head.bias", None),
    "tied": lambda m: altered(m, "head.weight", m.look.weight),
    "another name": lambda m: altered(altered(m, "look_up", m.look), "forward", types.MethodType(lambda self, t: self.head(self.look_up(t)), m)),
    "padding": lambda m: altered(m, "look.padding_idx", 0),
    "eval mode": lambda m: m.eval(),
    "one in eval mode": lambda m: altered(m, "drop", m.drop.eval()),
    "another module": lambda m: altered(m, "act", nn.GELU()),
    "a patched forward": lambda m: altered(m, "forward", types.MethodType(lambda self, t: self.head(self.look(t)), m)),
    "a hook": hooked,
    "a global, changed": lambda m: setattr(sys.modules["helper"], "HALF", 7.0) or m,
}


@pytest.mark.parametrize("name", EDITS)
def test_a_changed_file_changes_the_key(place, name):
    before = key(place.model())
    place.replace(*EDITS[name])
    assert key(place.model()) != before


@pytest.mark.parametrize("name", MODELS)
def test_a_changed_model_changes_the_key(place, name):
    before = key(place.model())
    assert key(MODELS[name](place.model())) != before


def test_a_variable_or_a_file_that_the_forward_reads_changes_the_key(place, monkeypatch, tmp_path):
    keys = [key(place.model())]
    (tmp_path / "shift.txt").write_text("0.5")
    keys.append(key(place.model()))
    monkeypatch.setenv("NET_DOUBLES", "1")
    keys.append(key(place.model()))
    assert len(set(keys)) == 3


OTHERS = {"param_dtype": "bfloat16"}
GROUPS = ("cast", "shard", "moe", "context", "chunk_loss", "remat", "communication", "segment", "pipeline", "accumulate")
OPTIONS = {
    "passes.fold_layers": dataclasses.replace(ON_CPU, fold_layers=False),
    "passes.verify": dataclasses.replace(ON_CPU, verify="none"),
    **{
        f"passes.{group}.{field.name}": dataclasses.replace(
            ON_CPU,
            **{group: dataclasses.replace(getattr(ON_CPU, group), **{field.name: OTHERS.get(field.name, "x")})},
        )
        for group in GROUPS
        for field in dataclasses.fields(getattr(PassesConfig(), group))
    },
}
FIELDS = {
    "mesh": {"mesh": Mesh.of({"dp_shard": 2})},
    "another mesh": {"mesh": Mesh.of({"dp_shard": 4})},
    "the axes of a mesh": {"mesh": Mesh.of({"tp": 2})},
    "microbatches": {"microbatches": 2},
    "skipped steps": {"skip_nonfinite": True},
    "evaluation": {"evaluate": False},
    "training": {"train": False},
    "the device": {"device_name": "another"},
}


@pytest.fixture(scope="module")
def exported():
    request = CompileRequest(model=perceptron(), loss_fn=squared_error, batch=points()[0], passes=ON_CPU)
    return request, export(request, None, lambda what: None)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_changed_option_changes_the_key(exported, name):
    request, graphs = exported
    assert key_of(dataclasses.replace(request, passes=OPTIONS[name]), graphs) != key_of(request, graphs)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(OptimConfig) if field.name not in ("lr", "_target_")])
def test_a_changed_option_of_the_optimizer_changes_the_key(exported, field):
    request, graphs = exported
    assert key_of(dataclasses.replace(request, optim=OptimConfig(**{field: "x"})), graphs) != key_of(request, graphs)


@pytest.mark.parametrize("name", FIELDS)
def test_a_changed_field_of_the_request_changes_the_key(exported, name):
    request, graphs = exported
    assert key_of(dataclasses.replace(request, **FIELDS[name]), graphs) != key_of(request, graphs)


def test_every_field_of_a_request_is_in_the_key_or_known_not_to_matter():
    tested = {"mesh", "microbatches", "skip_nonfinite", "evaluate", "train", "device_name", "passes", "optim"}
    exported = {"model", "loss_fn", "batch", "device"}
    without_effect = {
        "entry_bounds": "checked when the graph is exported",
        "values": "such programs are not stored",
        "seed": "read with `values` only",
        "cluster": "told by the balance, and whole if async_tp=auto",
    }
    assert {field.name for field in dataclasses.fields(CompileRequest)} == tested | exported | without_effect.keys()


BATCHES = {
    "rows": {name: torch.zeros(2, 8, dtype=torch.int64) for name in BATCH},
    "length": {name: torch.zeros(4, 4, dtype=torch.int64) for name in BATCH},
    "dtype": {name: torch.zeros(4, 8, dtype=torch.int32) for name in BATCH},
    "entries": BATCH | {"positions": BATCH["tokens"]},
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_changed_batch_changes_the_key(place, name):
    model = place.model()
    if name == "dtype":
        model.look.forward = lambda tokens: nn.functional.embedding(tokens.long(), model.look.weight)
    assert key(model, batch=BATCHES[name]) != key(model)


def twice(model, batch, weight=2):
    return loss_of_logits(model, batch) * weight


def test_a_changed_loss_changes_the_key(place):
    model = place.model()
    losses = [loss_of_logits, twice, functools.partial(twice, weight=3), lambda model, batch: twice(model, batch, 4)]
    assert len({key(model, loss) for loss in losses}) == len(losses)


class Halved(torch.autograd.Function):
    """The identity with a halved gradient."""

    factor = 0.5

    @staticmethod
    def forward(ctx, x):
        ctx.factor = Halved.factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor


def after(function, model, batch):
    logits = function(model(batch["tokens"]))
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


halved = functools.partial(after, lambda x: Halved.apply(x))


def test_a_backward_of_ones_own_is_in_the_key(place, monkeypatch):
    model = place.model()
    before, second = key(model, halved), key(model, halved)
    monkeypatch.setattr(Halved, "factor", 0.25)
    assert before == second != key(model, halved)
    monkeypatch.setattr(Halved, "backward", staticmethod(lambda ctx, gradient: gradient.sin()))
    assert key(model, halved) != before


class Product(torch.autograd.Function):
    """The product of two tensors."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, gradient):
        a, b = ctx.saved_tensors
        return gradient * b, gradient * a


def test_a_function_of_one_tensor_twice_has_a_key(place):
    model = place.model()
    assert key(model, functools.partial(after, lambda x: Product.apply(x, x))) != key(model)


SWITCHES = {
    "deterministic": (torch.use_deterministic_algorithms, True, False),
    "default dtype": (torch.set_default_dtype, torch.float64, torch.float32),
    "precision": (torch.set_float32_matmul_precision, "medium", "highest"),
    "flash": (torch.backends.cuda.enable_flash_sdp, False, True),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_of_pytorch_changes_the_key(exported, name):
    switch, on, off = SWITCHES[name]
    before = key_of(*exported)
    switch(on)
    try:
        assert key_of(*exported) != before
    finally:
        switch(off)


VERSIONS = {"torch": (torch, "__version__"), "git": (torch.version, "git_version"), "python": (sys, "version")}


@pytest.mark.parametrize("name", VERSIONS)
def test_another_version_changes_the_key(exported, name, monkeypatch):
    before = key_of(*exported)
    monkeypatch.setattr(*VERSIONS[name], "another")
    assert key_of(*exported) != before


def test_a_changed_file_of_ours_changes_the_key(exported, tmp_path, monkeypatch):
    (tmp_path / "passes" / "rules").mkdir(parents=True)
    monkeypatch.setattr(program_key, "HOME", tmp_path)
    keys = []
    for name, text in (("a", "x = 1"), ("a", "x = 2"), ("b", "")):
        (tmp_path / "passes" / "rules" / f"{name}.py").write_text(text)
        program_key.digest_of_ours.cache_clear()
        keys.append(key_of(*exported).digest)
    program_key.digest_of_ours.cache_clear()
    assert len(set(keys)) == 3


# ---- no change of the key ----------------------------------------------------------------------------

SAME = {
    "built again": lambda m: m,
    "weights": lambda m: ([p.data.add_(1) for p in m.parameters()], m)[1],
    "an attribute that nothing reads": lambda m: altered(m, "unused", 2),
    "a new attribute": lambda m: altered(m, "fresh", {1}),
    "a buffer's values": lambda m: altered(m, "steps", torch.ones(8)),
}


@pytest.mark.parametrize("name", SAME)
def test_what_the_graph_does_not_hold_leaves_the_key(place, name):
    before = key(place.model())
    assert key(SAME[name](place.model())) == before


def test_the_rate_and_other_values_leave_the_key(place):
    values = {name: torch.ones(4, 8, dtype=torch.int64) for name in BATCH}
    assert key(place.model(), batch=values, optim=OptimConfig(lr=0.5)) == key(place.model())


def test_the_build_of_a_release_leaves_the_key(exported, monkeypatch):
    before = key_of(*exported)
    monkeypatch.setattr(torch, "__version__", f"{torch.__version__.partition('+')[0]}+cu130")
    assert key_of(*exported) == before


@pytest.mark.full
def test_other_processes_have_the_same_key():
    """The order of their sets does not matter."""
    processes = [
        subprocess.run([sys.executable, __file__], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True)
        for seed in ("1", "2")
    ]
    assert all(done.returncode == 0 for done in processes), processes[0].stderr
    assert len({done.stdout for done in processes}) == 1 and len(processes[0].stdout.split()) == 2


# ---- jobs without a key -----------------------------------------------------------------------------


@torch.library.custom_op("plug::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


double.register_fake(lambda x: torch.empty_like(x))


@torch.library.custom_op("plug::triple", mutates_args=())
def triple(x: torch.Tensor) -> torch.Tensor:
    return x * 3


triple.register_fake(lambda x: torch.empty_like(x))
triple.register_autograd(lambda ctx, gradient: gradient * 3)


@pytest.mark.parametrize("operator", [double, triple])
def test_an_operator_of_ones_own_has_no_key(place, operator):
    with pytest.raises(Unkeyed, match=r"the kernel of plug\.(double|triple)\.default is user code"):
        key(place.model(), functools.partial(after, operator))


class Never:
    """A pass that must not run in these tests."""


def test_parts_of_ones_own_have_no_key(exported, monkeypatch):
    request, graphs = exported
    with pytest.raises(Unkeyed, match="^passes.extra names user code$"):
        key_of(dataclasses.replace(request, passes=dataclasses.replace(ON_CPU, extra=({"_target_": "test_stored.Never"},))), graphs)
    with pytest.raises(Unkeyed, match="^optim._target_ names user code$"):
        key_of(dataclasses.replace(request, optim=OptimConfig("custom", _target_="test_stored.Never")), graphs)
    monkeypatch.setitem(RULES, "plug::one", None)
    monkeypatch.setitem(ADDED, "plug::one", "")
    before = key_of(request, graphs)
    for rule in ("...d -> ...d", "... -> ..."):
        add_rule("plug::one", rule)
        assert key_of(request, graphs) != before
        before = key_of(request, graphs)
    add_rule("plug::one", lambda node: None)
    with pytest.raises(Unkeyed, match="^the rule of plug::one is a function$"):
        key_of(request, graphs)


def test_a_job_without_a_key_is_compiled_each_time_and_says_why(place, tmp_path):
    cache = ProgramCache(store=Store(tmp_path / "programs"))
    optim = OptimConfig("custom", _target_="passes.update.optimizers.SGD", lr=0.1)
    for _ in range(2):
        _, report = start(place, cache, optim=optim)
        assert not report["program"]["read"]
        assert report["notes"] == ["the program is not stored: optim._target_ names user code"]


# ---- the store ---------------------------------------------------------------------------------------


def start(place, cache, **how):
    """Return (the losses of two steps and of an evaluation, the report) of a start."""
    torch.manual_seed(0)
    how = {"optim": {"lr": 0.1}, "ranks": "lockstep", "mesh": {"dp_shard": 2}} | how
    step = compile_step(place.model(), loss_of_logits, BATCH, cache=cache, **how)
    batch = {name: torch.arange(32).reshape(4, 8) % 16 for name in BATCH}
    return [step(batch)["loss"], step(batch)["loss"], step.evaluate(batch)], step.report


def test_a_second_start_reads_the_program_and_computes_the_same(place, tmp_path):
    cache = ProgramCache(store=Store(tmp_path / "programs"))
    first, made = start(place, cache)
    second, read = start(place, cache)
    assert first == second and not made["program"]["read"] and read["program"]["read"]
    assert json.dumps(made["passes"]) == json.dumps(read["passes"])
    assert set(read["seconds"]) == {"capture", "program", "step.lower"}
    place.replace("helper", "0.5", "0.25")
    third, repeated = start(place, cache)
    assert third != first and not repeated["program"]["read"]


def test_graphs_are_stored_with_the_program(place, tmp_path):
    from passes.check.runner import Dumper

    store, folders = Store(tmp_path / "programs"), [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        start(place, ProgramCache(folder, store), observe=Dumper(folder))
    a, b = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders)
    assert a == b and len(a) > 30


def test_a_program_that_was_stored_without_graphs_is_compiled_again_for_them(place, tmp_path):
    from passes.check.runner import Dumper

    store, folder = Store(tmp_path / "programs"), tmp_path / "graphs"
    folder.mkdir()
    start(place, ProgramCache(None, store))
    _, report = start(place, ProgramCache(folder, store), observe=Dumper(folder))
    assert not report["program"]["read"] and list(folder.iterdir())


def test_damage_is_noticed_and_compiled_again(place, tmp_path):
    cache, drawn = ProgramCache(store=Store(tmp_path / "programs")), random.Random(0)
    _, report = start(place, cache)
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
            assert cache.find(path.name) is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, second = start(place, cache)
    assert not second["program"]["read"]
    assert start(place, cache)[1]["program"]["read"]


def test_a_program_of_an_operator_that_is_missing_is_compiled_again(place, tmp_path):
    import zlib

    cache = ProgramCache(store=Store(tmp_path / "programs"))
    _, report = start(place, cache)
    name = report["program"]["stored_as"]
    content = json.loads(zlib.decompress(cache.store.get(name)))
    content["programs"] = content["programs"].replace("aten.embedding.default", "nowhere.embedding.default")
    cache.store.put(name, zlib.compress(json.dumps(content).encode()))
    with pytest.warns(UserWarning, match="cannot be read"):
        assert cache.find(name) is None
    assert math.isfinite(start(place, cache)[0][0])


def test_a_schedule_in_a_file_is_read_again(place, tmp_path):
    cache, file = ProgramCache(store=Store(tmp_path / "programs")), tmp_path / "schedule.txt"

    def started(schedule: Schedule) -> tuple[list[float], bool]:
        file.write_text(as_text(schedule))
        pipeline = {"pipeline": {"schedule": str(file)}}
        losses, report = start(place, cache, mesh={"pp": 2}, microbatches=2, passes=pipeline)
        return losses, report["program"]["read"]

    first, second, split = started(one_f_one_b(2, 2)), started(gpipe(2, 2)), started(zero_bubble(2, 2))
    assert [is_read for _, is_read in (first, second, split)] == [False, True, False]  # only the order differs, and not the programs
    assert first[0] == second[0] == pytest.approx(split[0])


if __name__ == "__main__":
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
    print(key(model), key(model, halved))
