"""The key of stored programs: the exported graphs as text, the options of passes and optimizer, and versions.

Passes are functions of these alone, so two jobs with the same key have the same programs. User code that runs in passes
(a pass, an optimizer, a rule, an operator's kernel) has no such text: programs of such jobs have no key and are not
stored.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from os.path import commonprefix
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from compiler_trainer.config.device import resolve_cluster
from compiler_trainer.request import CompileRequest
from compiler_trainer.step.captured import Captured
from compiler_trainer.step.exported import Exported
from passes.ir import ir, saved
from passes.ir.saved import Unwritable
from passes.rules import ADDED
from passes.sharding.custom import body_graph
from passes.torch_private import OpOverload
from passes.trace.abstract_eval import LASTING
from passes.trace.functions import Function, function_of

OURS = ("passes", "compiler_trainer")
HOME = Path(__file__).parents[2]  # the folder of our packages
OF_TORCH = LASTING - {"ct"} | {"prim", "quantized", "inductor", "higher_order", "rngprims"}
SHOWN = 30  # characters shown before and after the first difference of two texts


class Unkeyed(Exception):
    """A job whose programs depend on code that the key cannot describe."""


@dataclass(frozen=True)
class ProgramKey:
    """The texts that decide a job's programs, by topic."""

    parts: Mapping[str, str]

    @property
    def digest(self) -> str:
        """The SHA-256 of all parts, under which the programs are stored."""
        return hashlib.sha256(json.dumps(self.parts, sort_keys=True).encode()).hexdigest()


def key_of(request: CompileRequest, exported: Exported) -> ProgramKey:
    """Return the key of a request's programs; raise Unkeyed naming the code that has none."""
    passes, optim = request.passes, dataclasses.asdict(request.optim)
    if passes.extra:
        raise Unkeyed("passes.extra names user code")
    if request.optim._target_:
        raise Unkeyed("optim._target_ names user code")
    del optim["lr"]  # an input of the programs
    schedule, parameters = request.schedule(), request.model.named_parameters()
    parts = {
        "passes": dataclasses.asdict(passes),
        "optim": optim,
        "rules": added_rules(),
        "mesh": str(request.mesh),
        "batch": {name: f"{value.dtype} {tuple(value.shape)}" for name, value in request.batch.items()},
        "steps": (request.microbatches, request.skip_nonfinite, request.train, request.evaluate),
        "schedule": (schedule.rank_of, schedule.is_split) if schedule else None,
        "device": request.device_name or name_of_device(request.device),
        "cluster": resolve_cluster(request.cluster) if passes.communication.async_tp == "auto" else None,
        "balance": request.balance,
        "parameters": [(name, p.dtype, tuple(p.shape), p.requires_grad) for name, p in parameters],
        "model": graph_text(exported.training),
        "model in eval mode": graph_text(exported.evaluation) if exported.evaluation else None,
        "versions": versions(),
    }
    return ProgramKey({name: part if isinstance(part, str) else repr(part) for name, part in parts.items()})


def added_rules() -> dict[str, str]:
    """Return the rules that packages other than ours have added; raise Unkeyed if one is a function."""
    rules = {name: rule for name, rule in ADDED.items() if not getattr(rule, "__module__", "").startswith(OURS)}
    for name, rule in rules.items():
        if not isinstance(rule, str):
            raise Unkeyed(f"the rule of {name} is a function")
    return {name: str(rules[name]) for name in sorted(rules)}


def differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> Iterator[str]:
    """Yield each part in which two keys differ, with the first difference."""
    for name in sorted({*theirs, *ours}):
        a, b = theirs.get(name, ""), ours.get(name, "")
        if a != b:
            at = len(commonprefix([a, b]))
            yield f"{name} is {excerpt(a, at)} there, {excerpt(b, at)} here"


def excerpt(text: str, at: int) -> str:
    """Return a text's characters around a position."""
    return f"{'...' * (at > SHOWN)}{text[max(0, at - SHOWN) : at + SHOWN]}{'...' * (len(text) > at + SHOWN)}"


# ---- graphs -------------------------------------------------------------------------------------------


def graph_text(captured: Captured) -> str:
    """Return a captured program as text that decides what passes make of it; raise Unkeyed if it has none."""
    try:
        writer = GraphText(captured.ctx)
        program = writer.program(captured.program)
    except Unwritable as error:
        raise Unkeyed(str(error)) from error
    return json.dumps({"program": program, "tables": writer.tables()})


class GraphText(saved.Writer):
    """A writer of captured programs as text, with folded ones and custom functions; there is no reader."""

    def __init__(self, ctx: ir.Context):
        super().__init__()
        self.ctx = ctx

    def target(self, node: fx.Node) -> Any:
        """Return a node's target as text, or the graphs of a custom function; raise Unwritable if it has neither."""
        if function := function_of(node):
            operands = [ir.example(operand) for operand in node.args if isinstance(operand, fx.Node)]
            return self.function(function, operands)
        if isinstance(node.target, OpOverload):
            if node.target.namespace not in OF_TORCH | {"ct"}:
                raise Unwritable(f"the kernel of {node.target} is user code")
            return str(node.target)
        return super().target(node)

    def function(self, function: Function, operands: list[Tensor]) -> Any:
        """Return the graphs of a custom function's forward and backward, for operands with the call's shapes."""
        try:
            forward = body_graph(function.name, function.forward, operands, self.ctx, own=False)
            results = [ir.example(node) for node in forward.output_node().args[0]]  # type: ignore[union-attr, arg-type]
            tensors = [*operands, *results, *results[: function.results]]
            present: list[int] = []

            def gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
                gradients = function.backward(*tensors)
                present[:] = [i for i, gradient in enumerate(gradients) if gradient is not None]
                return tuple(gradients[i] for i in present)  # type: ignore[misc]

            backward = body_graph(function.name, gradients, tensors, self.ctx, own=True)
        except ir.CompileError as error:
            raise Unwritable(str(error)) from error
        return [function.name, function.results, self.graph(forward), self.graph(backward), present]


# ---- versions -----------------------------------------------------------------------------------------


def versions() -> str:
    """Return the versions of Python, PyTorch and our code, and the PyTorch switches that passes depend on."""
    switches = {
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "attention": [torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()],
        "mkldnn": torch.backends.mkldnn.enabled,
    }
    release = torch.__version__.partition("+")[0]  # without the build (CPU or CUDA), which follows from the device
    return f"{sys.version.split()[0]} {release} {torch.version.git_version} {switches} {digest_of_ours()}"


@cache
def digest_of_ours() -> str:
    """Return the digest of the names and contents of all our Python files."""
    digest = hashlib.sha256()
    for package in OURS:
        for path in sorted((HOME / package).rglob("*.py")):
            digest.update(f"{path.relative_to(HOME)}\n".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def name_of_device(device: torch.device) -> str:
    """Return the name of a device's model, which decides the code that is generated for it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} {platform.machine()}"
