"""Bodies that restarts load without the compiler."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from passes.lower.cpu_start.ready import UNTOUCHED, Ready, without_compiler
from passes.lower.store import Store
from passes.torch_private import compiler_folder

HEAD = """
import torch
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import maybe_profile
import torch as extern_kernels
async_compile = AsyncCompile()
kernel_0 = async_compile.cpp_pybinding(['float*'], r'''void kernel(float* x) {}''')
async_compile.wait(globals())
del async_compile
def call(args):
    x, = args
    kernel_0(x)
    return (x,)
"""
TAIL = "\ndef get_args():\n    from torch._dynamo.testing import rand_strided\n"


def test_code_is_left_without_what_loads_it():
    code, kernels = without_compiler(HEAD + TAIL)
    assert kernels == {"kernel_0": (("float*",), "void kernel(float* x) {}")}
    assert code == "import torch\nimport torch as extern_kernels\n\ndef call(args):\n    x, = args\n    kernel_0(x)\n    return (x,)"


@pytest.mark.parametrize(
    "more",
    [
        "from torch._inductor.runtime import triton_heuristics",
        "y = maybe_profile(0)",
        "triton_0 = async_compile.triton('t', '''x''')",
        "from torch._inductor.select_algorithm import extern_kernels",
        "z = torch._inductor.x",
    ],
)
def test_code_that_needs_more_of_the_compiler_is_not_taken(more):
    assert without_compiler(f"{HEAD}{more}{TAIL}") is None


def test_the_folder_is_that_of_inductor(monkeypatch):
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    for folder in (None, "somewhere"):
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
        if folder:
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
        ours = compiler_folder()
        monkeypatch.setattr(os, "makedirs", lambda *args, **how: None)
        assert ours == Path(cache_dir()).absolute()


class NoBody:
    name, key = "forward_0", "k"


def test_a_library_that_is_not_as_it_was_built_is_not_loaded(tmp_path):
    library, store, drawn = tmp_path / "k.so", Store(tmp_path / "bodies"), random.Random(0)
    library.write_bytes(bytes(range(256)))
    store.note(library)
    ready = Ready(store, "ours", UNTOUCHED)
    entry = {"code": "call = None", "kernels": {}, "libraries": [str(library)]}
    store.put(ready.key(NoBody, UNTOUCHED), json.dumps(entry).encode())
    for number in range(60):
        content = bytearray(range(256))
        at = drawn.randrange(256)
        content = content[:at] if number % 2 else content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        library.write_bytes(bytes(content))
        with pytest.warns(UserWarning, match="damaged"):
            assert ready.load(NoBody) is None
        library.write_bytes(bytes(range(256)))
        store.note(library)


@pytest.mark.parametrize("changed", ["ours", "options", "threads", "deterministic", "precision", "body"])
def test_what_a_body_is_known_by(tmp_path, monkeypatch, changed):
    ready = Ready(Store(tmp_path), "ours", UNTOUCHED)
    before, body, command = ready.key(NoBody, UNTOUCHED), NoBody, UNTOUCHED
    if changed == "ours":
        ready.ours = "others"
    elif changed == "options":
        command = "{'freezing': True}"
    elif changed == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    elif changed == "deterministic":
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    elif changed == "precision":
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    else:
        body = type("Other", (), {"key": "other"})
    assert ready.key(body, command) != before


SLOW = ("scipy", "plotly", "pandas", "transformers", "matplotlib", "torch._inductor.graph")
RUN = f"""
import sys
from compiler_trainer.cli.command import main
sys.argv[1:] = ["train.steps=1", "model.n_layers=1", "model.dim=32", "model.ffn_dim=32", "model.n_heads=2",
    "model.n_kv_heads=2", "train.seq_len=32", "data=synthetic", "eval.interval=null", "checkpoint.interval=null", *sys.argv[1:]]
main()
print("slow:", [name for name in {SLOW!r} if name in sys.modules])
"""


@pytest.mark.full
@pytest.mark.parametrize("attention", ["causal", "documents"])
def test_a_restart_captures_and_imports_neither_the_compiler_nor_what_it_does_not_use(tmp_path, attention):
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    outputs = []
    for number in range(2):
        command = [sys.executable, "-c", RUN, f"run.dir={tmp_path / str(number)}", f"model.attention={attention}"]
        outputs.append(subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout)
    assert "started in" in outputs[0] and "restarted in" not in outputs[0]
    assert "restarted in" in outputs[1]
    assert "slow: []" in outputs[1]
    losses = [json.loads((tmp_path / str(n) / "metrics.jsonl").read_text())["loss"] for n in range(2)]
    assert losses[0] == losses[1]
