"""Programs of this folder that compile for an absent GPU: the library that they need, and the way to run them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from passes.lower import trace_cuda

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def library() -> Path:
    """Return the library with which PyTorch's CPU build traces for CUDA."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed: pip install -c constraints.txt triton")
    if torch.version.cuda is not None:
        pytest.skip("a CUDA build of PyTorch asks for a real GPU; use the CPU build and Triton")
    return trace_cuda.library()


def run(program: Path, library: Path, argument: Any, **environment: str) -> Any:
    """Return the JSON in the last line that a program prints; it needs the library before PyTorch."""
    command = [sys.executable, str(program), str(library), json.dumps(argument)]
    paths = os.pathsep.join(filter(None, (str(HERE.parents[1]), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": paths} | environment
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
