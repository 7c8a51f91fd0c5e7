"""CUDA without a GPU: every body is written as Triton for an H100 by Inductor, and every kernel compiles to a cubin."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

FAKE_CUDA = Path(__file__).parents[2] / "support" / "fake_cuda.py"
JOBS = {
    "default": {"mesh": {"dp_shard": 1}},
    "dp_shard 2, tp 2, cp 2": {"mesh": {"dp_shard": 2, "tp": 2, "cp": 2}},
    "float8": {"mesh": {"dp_shard": 1}, "passes": {"cast": {"param_dtype": "bfloat16", "float8": "tensorwise"}}},
}
CALLED = {"default": "", "dp_shard 2, tp 2, cp 2": "", "float8": "_scaled_mm"}  # a kernel that CUDA has for it


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """What PyTorch's CPU build needs to trace for CUDA, built."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed: pip install -c constraints.txt triton")
    if torch.version.cuda is not None:
        pytest.skip("a CUDA build of PyTorch asks for a real GPU; use the CPU build and Triton")
    path = tmp_path_factory.mktemp("fake_cuda") / "fake_cuda.so"
    found = [f"-I{folder}" for folder in cpp_extension.include_paths()]
    found += [flag for folder in cpp_extension.library_paths() for flag in (f"-L{folder}", f"-Wl,-rpath,{folder}")]
    command = ["c++", "-std=c++20", "-shared", "-fPIC", str(FAKE_CUDA.with_suffix(".cpp"))]
    subprocess.run([*command, *found, "-ltorch_cpu", "-lc10", "-o", str(path)], check=True)
    return path


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", JOBS)
def test_every_body_becomes_cubins(name, library, record_property):
    command = [sys.executable, str(FAKE_CUDA), str(library), json.dumps(JOBS[name])]
    paths = os.pathsep.join(filter(None, (str(FAKE_CUDA.parents[2]), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["kernels"] >= found["bodies"] > 5
    assert len(found["cubins"]) >= found["kernels"] and min(found["cubins"]) > 0
    assert found["targets"] == [".target sm_90a"]
    assert not found["breaks"]  # a CUDA graph can record it
    assert any(CALLED[name] in operator for operator in found["extern"]) or not CALLED[name]
    extern = ", ".join(f"{count} {operator}" for operator, count in sorted(found["extern"].items())) or "none"
    counted = f"{found['bodies']} bodies, {found['kernels']} Triton kernels, {len(found['cubins'])} cubins"
    record_property("counted", f"Triton for an H100, {name}: {counted}; attention and float8 products called: {extern}")
