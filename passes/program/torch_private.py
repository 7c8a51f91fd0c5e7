"""Every use of PyTorch's private API, all of it checked on torch 2.13.0, 2.14.1 and 2.15.0.

Only `checkpoints_inside` differs between them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._decomp import core_aten_decompositions
from torch._functorch._activation_offloading import offload_ops  # noqa: F401, registers ao::offload and its kin
from torch._guards import TracingContext, tracing
from torch._logging import trace_structured
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule  # generates code when first called
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import decompose
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "GuardOnDataDependentSymNode",
    "LazyGraphModule",
    "OpOverload",
    "ao",
    "c10d",
    "checkpoints_inside",
    "compile_inner",
    "decomposition",
    "flex_with_gradients",
    "inductor_decompositions",
    "keep_after",
    "lazy_graph_modules",
    "register_axis_group",
    "resolve_axis_group",
    "trace_artifact",
]

ao = torch.ops.ao
c10d = torch.ops._c10d_functional


@functools.cache
def _core_decompositions() -> dict:
    return core_aten_decompositions()  # built anew on every call, in a second


def decomposition(op: Any) -> Callable | None:
    """One level of an operator's definition in terms of others, or None."""
    if not isinstance(op, torch._ops.OpOverload):
        return None
    table = _core_decompositions()
    if op in table:
        return functools.partial(_decomposed, op, table[op])
    if op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return functools.partial(_decomposed, op, op.decompose)
    return None


def _decomposed(op: OpOverload, definition: Callable, *args: Any, **kwargs: Any) -> Any:
    """A call of the operator that is traced as its definition; a composite one called by itself is traced whole."""
    with decompose({op: definition}):
        return op(*args, **kwargs)


@contextmanager
def checkpoints_inside(region: Callable[[], AbstractContextManager]) -> Iterator[None]:
    """While on, `torch.utils.checkpoint` calls its function once, inside `region()`, and as if it were not there."""

    def reentrant(function: Callable, preserve_rng_state: bool, *args: Any) -> Any:
        with region():
            return function(*args)

    def around(*args: Any, **kwargs: Any) -> Iterator[None]:
        with region():
            yield

    from torch.utils import checkpoint

    generator = "_checkpoint_without_reentrant_generator"  # of 2.13; from 2.14 on it is for callers outside of PyTorch
    generator = generator + "_impl" if hasattr(checkpoint, generator + "_impl") else generator
    with patch.object(checkpoint.CheckpointFunction, "apply", reentrant), patch.object(checkpoint, generator, around):
        yield


def lazy_graph_modules() -> AbstractContextManager:
    """While on, what is traced becomes a graph module whose code is generated when it is first called, if ever."""
    return _use_lazy_graph_module(True)


def inductor_decompositions() -> dict:
    """The decompositions that Inductor expects to have been applied."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def keep_after(graph: fx.Graph, earlier: Mapping[fx.Node, fx.Node]) -> None:
    """Let Inductor place nodes after others that they do not read."""
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    from torch.utils._ordered_set import OrderedSet

    preserve_node_ordering(graph, {node: OrderedSet([before]) for node, before in earlier.items()})


def compile_inner(module: fx.GraphModule, values: Sequence[Tensor], mode: FakeTensorMode) -> Callable:
    """Inductor's compilation of a flat functional graph; the callable takes a list of tensors."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    options = {
        "reorder_for_peak_memory": False,  # the order is the graph's
        "unsafe_marked_cacheable_functions": {"torch.ops.higher_order.control_deps": "1"},  # `keep_after`
    }
    with tracing(TracingContext(mode)), V.set_fake_mode(mode), config.patch(options):
        return compile_fx_inner(module, list(values))


def cache_hits() -> int:
    """How many Inductor compilations this process took from the cache."""
    from torch._dynamo.utils import counters

    return counters["inductor"]["fxgraph_cache_hit"]


def register_axis_group(axis: str, group: Any) -> None:
    """Let functional collectives find a process group under the name of its mesh axis, and none before it."""
    torch._C._distributed_c10d._unregister_process_group(axis)
    torch._C._distributed_c10d._register_process_group(axis, group)


def resolve_axis_group(axis: str) -> Any:
    """The process group registered under the name of a mesh axis."""
    return torch._C._distributed_c10d._resolve_process_group(axis)


@contextmanager
def flex_with_gradients() -> Iterator[None]:
    """Let FlexAttention be captured on devices where PyTorch's kernel has no backward: that kernel will not be run."""
    with patch("torch.nn.attention.flex_attention._validate_device", lambda *_: None):
        yield


def trace_artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    """Add a file to the TORCH_TRACE log, where `tlparse` shows it; `encoding` is "string" or "json"."""
    trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=payload, expect_trace_id=False
    )
