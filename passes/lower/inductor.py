"""Compile bodies with Inductor, each once: a body that this machine compiled before is loaded from the store.

The store is in Inductor's own cache folder. The key of an entry covers the body's text and everything else that its
kernels depend on: PyTorch, its options, the machine, the number of threads, and our own lowering.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from passes.communication.layer_starts import matmuls_of
from passes.communication.node_order import last_matmuls
from passes.context import operators
from passes.ir import ir
from passes.ir.bodies import Body, key_of
from passes.ir.record import read_values
from passes.lower.calls import Kernels
from passes.lower.cpu_start.door import checked_files, fast_cpu_start, prepare
from passes.lower.cpu_start.ready import Ready, options_untouched, settings_now
from passes.lower.miscompilations import workaround_options
from passes.lower.store import Store, body_store, bound
from passes.ops.host import STARTS
from passes.ops.shift import SHIFTS
from passes.signals import undisturbed
from passes.torch_private import (
    FakeTensorMode,
    compile_inner,
    compiler_folder,
    compiler_state,
    inductor_decompositions,
    is_code_alone,
    keep_after,
    kernels_of,
    kernels_together,
    lazy_graph_modules,
    line_mode,
    load_compiled,
    save_compiled,
    start_workers,
    step_by_step,
    without_lowering,
)
from passes.trace.abstract_eval import Layout


@dataclass(frozen=True)
class Workers:
    """The processes that compile together and share a store: this one is `number` of `count`; `meet` waits for all.

    With `fast`, C++ kernels are built several at a time (`cpu_start/`).
    """

    number: int
    count: int
    meet: Callable[[], None]
    fast: bool = True


Tell = Callable[[str], None]


def silent(message: str) -> None:
    """Ignore a message."""


FULL = os.strerror(errno.ENOSPC)
ALONE = Workers(0, 1, lambda: None)
MOST_BYTES = 20 << 30  # limit of the cache folder; the least recently used files are deleted first
failed: list[Exception] = []  # errors for which this process compiles for the CPU without the fast start
counts = Counter[str]()  # bodies that this process `compiled`, and that it `loaded` from the store


def compile_bodies(
    bodies: Sequence[Body], ctx: ir.Context, workers: Workers = ALONE, tell: Tell = silent
) -> Mapping[Body, Kernels]:
    """Return a callable for every body; raise Refused if the disk of the cache is full."""
    try:
        kernels = build_all(bodies, ctx, workers, tell)
    except Exception as error:
        if FULL not in str(error):  # compilers and linkers print the same text
            raise
        fix = "free some space, or set TORCHINDUCTOR_CACHE_DIR in the environment to another folder"
        raise ir.Refused("lower", None, f"the disk of {compiler_folder()} is full; {fix}") from error
    if message := bound(compiler_folder(), MOST_BYTES) if counts["compiled"] else "":
        warnings.warn(message, stacklevel=2)
    return kernels


@undisturbed
def compile_share(bodies: Sequence[Body], ctx: ir.Context, workers: Workers, tell: Tell = silent) -> None:
    """Compile this worker's share of bodies; when it returns, all are stored."""
    ready = Ready(body_store(), our_sources())
    share = [body for body in bodies[workers.number :: workers.count] if ready.load(body) is None]
    load_or_compile(share, ctx, ready, workers.fast, tell)
    tell("bodies of other ranks")
    workers.meet()


@undisturbed
def build_all(
    bodies: Sequence[Body], ctx: ir.Context, workers: Workers = ALONE, tell: Tell = silent
) -> Mapping[Body, Kernels]:
    """Return a callable for every body; bodies that are not stored are compiled, each by one of the workers.

    `tell` is called with the name of each piece of work when it begins.
    """
    ready = Ready(body_store(), our_sources())
    kernels = {body: run for body in bodies if (run := ready.load(body)) is not None}
    counts.update("loaded" for _ in kernels)
    share = [body for body in bodies[workers.number :: workers.count] if body not in kernels]
    kernels |= load_or_compile(share, ctx, ready, workers.fast, tell)
    if workers.count > 1:
        tell("bodies of other ranks")
        workers.meet()
    return kernels | load_or_compile([body for body in bodies if body not in kernels], ctx, ready, workers.fast, tell)


def load_or_compile(
    bodies: Sequence[Body], ctx: ir.Context, ready: Ready, fast: bool, tell: Tell
) -> dict[Body, Kernels]:
    """Return the kernels of bodies that Inductor loads or compiles, for each device in its way."""
    on_cpu = [body for body in bodies if is_on_cpu(body)]
    on_gpu = [body for body in bodies if not is_on_cpu(body)]
    kernels = compiled_for_cpu(on_cpu, ctx, ready, fast and not failed, tell) if on_cpu else {}
    return kernels | (one_by_one(on_gpu, ctx, ready.store, fast, tell) if on_gpu else {})


def compiled_for_cpu(
    bodies: Sequence[Body], ctx: ir.Context, ready: Ready, fast: bool, tell: Tell
) -> dict[Body, Kernels]:
    """Return the kernels of bodies on the CPU; if the `fast` way fails, compile them as Inductor does by itself."""
    if not fast:
        return one_by_one(bodies, ctx, ready.store, False, tell)
    try:
        return build_together(bodies, ctx, ready, tell)
    except Exception as error:
        if FULL in str(error):
            raise
        failed.append(error)
        try:
            kernels = one_by_one(bodies, ctx, ready.store, False, tell)
        except Exception as again:
            raise error from again
        warnings.warn(
            f"kernels are built one by one, more slowly, because building several at a time failed ({error}); "
            "lower.fast_start=false does so from the start",
            stacklevel=2,
        )
        return kernels


def build_together(bodies: Sequence[Body], ctx: ir.Context, ready: Ready, tell: Tell) -> dict[Body, Kernels]:
    """Return bodies whose C++ kernels are built several at a time, and store them for starts without Inductor."""
    with fast_cpu_start(ready.store, surroundings) as libraries:
        results = stored_or_compiled(bodies, ctx, ready.store, True, tell)
        tell("kernels")
    for body, compiled in results.items():
        if is_code_alone(compiled):
            ready.keep(body, without_lowering(compiled.source_code), libraries.place_of)
    return {body: kernels_of(compiled) for body, compiled in results.items()}


def one_by_one(bodies: Sequence[Body], ctx: ir.Context, store: Store, fast: bool, tell: Tell) -> dict[Body, Kernels]:
    """Return bodies of one kind of device, whose kernels Inductor builds in its own way."""
    with checked_files if is_on_cpu(bodies[0]) else in_triton():
        results = stored_or_compiled(bodies, ctx, store, fast, tell)
        tell("kernels")
    return {body: kernels_of(compiled) for body, compiled in results.items()}


def stored_or_compiled(
    bodies: Sequence[Body], ctx: ir.Context, store: Store, fast: bool, tell: Tell
) -> dict[Body, Any]:
    """Return Inductor's result for each body, from the store or compiled and stored."""
    results = {}
    for i, body in enumerate(bodies):
        tell(f"{body.name}, {i + 1} of {len(bodies)} bodies")
        results[body] = load(body, store, fast) or compile_body(body, ctx, store, fast)
    return results


def get_ready(device: torch.device) -> None:
    """Prepare the compilers during capture if nothing is stored yet; stored bodies are loaded without Inductor."""
    options_untouched()
    if body_store().folder.is_dir():
        return
    if device.type == "cuda":
        start_workers()
    else:
        prepare(surroundings)


@contextmanager
def in_triton() -> Iterator[None]:
    """Compile Triton kernels of several bodies at once, into one cache for all ranks of a machine.

    By default Inductor has one cache for each GPU.
    """
    os.environ.setdefault("TRITON_CACHE_DIR", str(compiler_folder() / "triton"))
    with kernels_together():
        yield


def is_on_cpu(body: Body) -> bool:
    """Return True if a body has no tensor on a GPU."""
    return all(ir.example(node).device.type == "cpu" for node in body.graph.nodes if ir.is_tensor(node))


def device_of(body: Body) -> torch.device:
    """Return the device of a body's first tensor."""
    return next(ir.example(node).device for node in body.graph.nodes if ir.is_tensor(node))


def load(body: Body, store: Store, fast: bool) -> Any:
    """Return the compiled body from the store; None if it is not there."""
    packed = store.get(stored_key(body, fast))
    if packed is None:
        return None
    counts["loaded"] += 1
    return load_compiled(packed)


def compile_body(body: Body, ctx: ir.Context, store: Store, fast: bool) -> Any:
    """Compile a body, store the result and return it."""
    module, mode = decompose(body, ctx)
    read_values(module.graph)
    # fusion moves a wait to the first operator of the kernel that needs it: keep it behind matmuls that hide it
    keep_after(module.graph, last_matmuls(module.graph, matmuls_of(module.graph)))
    values = [ir.value(node) for node in module.graph.nodes if node.op == "placeholder"]
    compiled = compile_inner(module, values, mode, workaround_options(), STARTS | SHIFTS)
    source = without_lowering(compiled.source_code) if fast else compiled.source_code
    store.put(stored_key(body, fast), save_compiled(compiled, source))
    counts["compiled"] += 1
    return compiled


def decompose(body: Body, ctx: ir.Context) -> tuple[fx.GraphModule, Any]:
    """Return the body in Inductor's operators, over new values, and their fake mode."""
    examples = [ir.example(node) for node in body.graph.nodes if node.op == "placeholder"]
    ctx = ctx if ctx.fake_mode else ir.Context(FakeTensorMode())  # a program that was loaded from a file has none
    interpreter = fx.Interpreter(fx.GraphModule(torch.nn.Module(), body.graph))
    if body.flat:
        mode, length = line_mode()
        ctx = ir.Context(mode)
        with mode:
            values = [torch.empty(length if v.dim() else (), dtype=v.dtype, device=v.device) for v in examples]
    else:
        with ctx.fake_mode:
            values = [Layout.of(value).empty() for value in examples]

    def run(*values: Tensor) -> tuple[Tensor, ...]:
        return tuple(interpreter.run(*values, enable_io_processing=False))

    table = inductor_decompositions() | operators.compiled_for(device_of(body).type)
    with torch.no_grad(), ctx.fake_mode, lazy_graph_modules(), step_by_step():
        return make_fx(run, table)(*values), ctx.fake_mode


def stored_key(body: Body, fast: bool = True) -> str:
    """Return the key of a body's kernels on this machine; without `fast` Inductor may choose other instructions."""
    device = device_of(body)
    sources = operators.sources_for(device.type)  # records may come from external code
    return key_of(f"{body.key} {device.index or 0} {surroundings()} {sources} {fast}")


def surroundings() -> str:
    """Return a digest of everything that kernels depend on except their body: the compiler's state, and our passes."""
    return key_of(f"{compiler_state()} {settings_now()} {our_sources()}")


@cache
def our_sources() -> str:
    """Return the sources of all our passes."""
    return sources_of(Path(__file__).parents[1])


def sources_of(folder: Path) -> str:
    """Return the names and texts of all Python files in a folder."""
    return "".join(f"{path.relative_to(folder)}\n{path.read_text()}" for path in sorted(folder.rglob("*.py")))
