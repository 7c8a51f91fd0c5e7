"""All uses of PyTorch's private API, checked on torch 2.11.0, 2.12.1, 2.13.0, 2.14.1 and 2.15.0.

Code that differs between them checks `VERSION`.
"""

from __future__ import annotations

import copy
import functools
import getpass
import importlib.util
import logging
import operator
import os
import pickle
import re
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._decomp import core_aten_decompositions, decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext, tracing
from torch._logging import trace_structured
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule  # generates code when first called
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    disable_proxy_modes_tracing,
    make_fx,
    snapshot_fake,
)
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map_only

from passes.signals import undisturbed

# exported again
__all__ = ["BatchNorm", "LazyGraphModule", "OpOverloadPacket", "TorchDispatchMode", "tree_iter", "tree_map_only"]

c10d = torch.ops._c10d_functional
Ask = Callable[[list[str], str], Callable[[], Any]]  # (argument types of a C++ kernel, its source) -> its loader
SET_GRAD_ENABLED = torch._C._set_grad_enabled  # a node's target in a graph with inline regions
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))


@functools.cache
def _core_decompositions() -> dict:
    return core_aten_decompositions()  # takes a second on every call


def decomposition(op: Any) -> Callable | None:
    """Return one level of an operator's definition in terms of others, or None."""
    if not isinstance(op, torch._ops.OpOverload):
        return None
    table = _core_decompositions()
    if op in table:
        return table[op]
    if is_composite(op):
        return op.decompose
    return None


class _Composite(ProxyTorchDispatchMode):
    """A mode that sees composite operators undecomposed, which PyTorch allows only its own kinds of modes."""

    def __init__(self, called: Callable[[OpOverload, tuple, dict], Any]):
        super().__init__(None, "real", pre_dispatch=True)  # type: ignore[arg-type]
        self.called = called

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[override]
        with torch._C._DisablePythonDispatcher():  # the dispatcher is slow, and no longer needed here
            return self.called(func, args, kwargs or {})


@contextmanager
def composite_operators(called: Callable[[OpOverload, tuple, dict], Any]) -> Iterator[None]:
    """While active, call `called` for the results of operators, composite ones included."""
    with enable_python_dispatcher(), _Composite(called):
        yield


@contextmanager
def composites_of(module: fx.GraphModule) -> Iterator[None]:
    """While active, let functionalization of an exported program keep the composite operators that it calls.

    By default PyTorch prepares to keep all existing ones, a thousand, which takes longer than a small model.
    """
    from torch._export.utils import _is_preservable_cia_op

    graphs = (part.graph for part in module.modules() if isinstance(part, fx.GraphModule))
    called = {node.target for graph in graphs for node in graph.nodes if isinstance(node.target, OpOverload)}
    preserved = {op for op in called if _is_preservable_cia_op(op)}
    with patch("torch.export.exported_program._collect_all_valid_cia_ops", lambda: preserved):
        yield


def is_composite(op: OpOverload) -> bool:
    """Return True if an operator is defined in terms of others, so that it may return an operand itself."""
    return op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


@contextmanager
def regions_in_line() -> Iterator[None]:
    """While active, export leaves regions of `no_grad` and `autocast` inline, between nodes that begin and end them.

    By default it makes each an operator with a graph of its own, which none of our passes would look into.
    """
    passes = "torch._export.passes"
    with ExitStack() as stack:
        for name in ("replace_set_grad_with_hop_pass", "replace_autocast_with_hop_pass"):
            stack.enter_context(patch(f"{passes}.{name}.{name}", lambda module, signature: (module, signature)))
        yield


def has_autograd_kernel(op: OpOverload) -> bool:
    """Return True if an operator has a gradient of its own, or refuses to have one."""
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key) for key in ("Autograd", "AutogradCPU"))


def number_in(value: Tensor) -> bool | int | float | complex:
    """Return the entry of a real tensor that has one, under any fake mode."""
    with unset_fake_temporarily():
        return value.detach().item()


def is_real(x: Tensor) -> bool:
    """Return True if a tensor holds its entries itself: it is neither fake nor a wrapper of `vmap`."""
    return not (isinstance(x, FakeTensor) or torch._C._functorch.is_functorch_wrapped_tensor(x))


def without_modes() -> AbstractContextManager[Any]:
    """Run operators on real tensors for real, inside a capture: neither fake nor recorded."""
    return _disable_current_modes()


def snapshot(value: Any) -> Any:
    """Return a tensor as it is now, in the same storage and without history; other values unchanged."""
    return snapshot_fake(value) if isinstance(value, Tensor) else value


@contextmanager
def checkpoints_inside(region: Callable[[], AbstractContextManager]) -> Iterator[None]:
    """While active, `torch.utils.checkpoint` calls its function once, inside `region()`, without checkpointing."""

    def reentrant(function: Callable, preserve_rng_state: bool, *args: Any) -> Any:
        with region():
            return function(*args)

    def around(*args: Any, **kwargs: Any) -> Iterator[None]:
        with region():
            yield

    from torch.utils import checkpoint

    generator = "_checkpoint_without_reentrant_generator"  # since 2.14 only for callers outside of PyTorch
    generator = generator + "_impl" if VERSION >= (2, 14) else generator
    with patch.object(checkpoint.CheckpointFunction, "apply", reentrant), patch.object(checkpoint, generator, around):
        yield


def data_dependent() -> type[Exception]:
    """Return the exception raised if Python code needs a number that is known only at run time."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # imports sympy

    return GuardOnDataDependentSymNode


class Described(Tensor):
    """The layout of a tensor without data: creating a fake mode takes seconds of imports."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        raise TypeError(f"{func} was called on a mere description of a tensor")


def describe_layout(
    shape: Sequence[int],
    stride: Sequence[int],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
    storage_bytes: int,
) -> Tensor:
    """Return an object with only shape, strides, offset, dtype, device and storage size of a tensor."""
    return Tensor._make_wrapper_subclass(
        Described,
        shape,
        strides=stride,
        storage_offset=offset,
        dtype=dtype,
        device=device,
        storage_size=storage_bytes,
    )


def is_profiling() -> bool:
    """Return True if a profiler of PyTorch records this thread; a second one inside it would crash."""
    return torch.autograd._profiler_enabled()


def lazy_graph_modules() -> AbstractContextManager:
    """While active, traced graph modules generate their code when they are first called, if ever."""
    return _use_lazy_graph_module(True)


def inductor_decompositions() -> dict:
    """Return the decompositions that Inductor expects to have been applied."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def keep_after(graph: fx.Graph, earlier: Mapping[fx.Node, fx.Node]) -> None:
    """Make Inductor place nodes after others that they do not read."""
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    from torch.utils._ordered_set import OrderedSet

    _let_order_be_run()
    preserve_node_ordering(graph, {node: OrderedSet([before]) for node, before in earlier.items()})


@functools.cache
def _let_order_be_run() -> None:
    """Give the operator of `keep_after` the kernels that it lacks in 2.11."""
    from torch._inductor.fx_passes.control_dependencies import control_deps

    for key in (torch._C.DispatchKey.CompositeExplicitAutograd, torch._C.DispatchKey.Autograd):
        if key not in control_deps.py_kernels:
            control_deps.py_impl(key)(lambda earlier, graph, *args, **kwargs: graph(*args, **kwargs))


def compile_inner(
    module: fx.GraphModule,
    values: Sequence[Tensor],
    mode: FakeTensorMode,
    options: Mapping[str, Any],
    starts: Collection[OpOverload] = (),
) -> Any:
    """Return Inductor's compilation of a flat graph, by its `options`; results keep their strides.

    It is called with a list, which it empties. No kernel overwrites the operands of the operators in `starts`, which
    start transfers, or of collectives whose wait is elsewhere.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    output = module.graph.output_node()
    to_torch(output, user_visible_output_idxs=list(range(len(output.args[0]))))  # otherwise Inductor picks strides
    settings = {
        **options,
        "reorder_for_peak_memory": False,  # the order is the graph's
        "fx_graph_cache": False,  # we have a cache of our own
    }
    with ExitStack() as stack:
        for context in (tracing(TracingContext(mode)), V.set_fake_mode(mode), config.patch(settings)):
            stack.enter_context(context)
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # a float32 job logs this itself
        stack.enter_context(_flex_as_laid_out())
        stack.enter_context(_never_reused(starts))
        return compile_fx_inner(module, list(values))


@contextmanager
def _never_reused(operators: Collection[OpOverload]) -> Iterator[None]:
    """Keep Inductor from reusing the memory of values in flight after an operator, or after a body.

    It may pass an operand as a copy, in other strides, and take the operator for the copy's last reader.
    """
    from torch._inductor.ir import FallbackKernel
    from torch._inductor.virtualized import V

    def __init__(kernel: Any, layout: Any, called: Any, *args: Any, **kwargs: Any) -> None:
        _init(kernel, layout, called, *args, **kwargs)
        if called in operators or _is_waited_for_elsewhere(V.graph.current_node):
            V.graph.never_reuse_buffers.update(operand.get_name() for operand in kernel.inputs)

    _init = FallbackKernel.__init__
    with patch.object(FallbackKernel, "__init__", __init__):
        yield


def _is_waited_for_elsewhere(node: fx.Node) -> bool:
    """Return True if a node starts a collective that no node of its graph waits for."""
    if getattr(node.target, "namespace", "") != "_c10d_functional" or node.target is _WAIT:
        return False
    results = [user for user in node.users if user.target is operator.getitem]
    return not any(user.target is _WAIT for result in (node, *results) for user in result.users)


_WAIT = torch.ops._c10d_functional.wait_tensor.default


@contextmanager
def kernels_together(ask: Ask | None = None, build: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Let Inductor lower one graph after another while workers compile their kernels; load all on exit.

    By default it waits for the kernels of each graph before it lowers the next. Graphs with a kernel in common share
    it: a kernel that a worker returns can be taken once. With `ask`, C++ kernels come from there; `build` starts
    building the last of them.
    """
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import CodeCacheFuture, LambdaFuture

    waiting: list[tuple[AsyncCompile, dict[str, Any]]] = []
    wait = AsyncCompile.wait

    def defer(self: AsyncCompile, scope: dict[str, Any]) -> None:
        waiting.append((self, scope))

    def cpp_pybinding(self: AsyncCompile, argtypes: list[str], source: str) -> Any:
        return LambdaFuture(ask(argtypes, source))  # type: ignore[misc]

    with patch.object(AsyncCompile, "wait", defer), ExitStack() as stack:
        if ask is not None:
            stack.enter_context(patch.object(AsyncCompile, "cpp_pybinding", cpp_pybinding))
        yield
    build()
    compiled: dict[CodeCacheFuture, Any] = {}
    for compiler, scope in waiting:
        kernels = {name: value for name, value in scope.items() if isinstance(value, CodeCacheFuture)}
        scope.update({name: compiled[kernel] for name, kernel in kernels.items() if kernel in compiled})
        wait(compiler, scope)
        compiled |= {kernel: scope[name] for name, kernel in kernels.items()}


def start_workers() -> None:
    """Start the processes that compile Triton kernels, which takes seconds; Inductor uses them once they are ready."""
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile.use_process_pool()


def see_one_gpu(number: int) -> int:
    """Let CUDA see only the GPU `number` of those that this process sees; return the number it has from then on.

    That is 0: the code that Inductor writes for one rank's GPU then works for all ranks of a machine. NCCL reaches GPUs
    that a process does not see. If CUDA has started already, all GPUs stay visible and keep their numbers.
    """
    name = "CUDA_VISIBLE_DEVICES"
    earlier, count = os.environ.get(name), 0 if torch.version.cuda is None else torch.cuda.device_count()
    if count < 2 or torch.cuda.is_initialized():
        return number if count > 1 else 0
    os.environ[name] = earlier.split(",")[number].strip() if earlier else str(number)
    if torch._C._cuda_getDeviceCount() == 1:
        return 0
    os.environ.pop(name) if earlier is None else os.environ.update({name: earlier})  # CUDA read it before
    return number


def save_compiled(compiled: Any, source: str) -> bytes:
    """Serialize the result of `compile_inner`, with this source, for other processes of this machine."""
    from torch._inductor.codecache import PyCodeCache

    saved = copy.copy(compiled)
    saved.prepare_for_serialization()
    saved.source_code = source
    saved.cache_key, _ = PyCodeCache.write(saved.source_code)
    return pickle.dumps(saved)


def load_compiled(saved: bytes) -> Any:
    """Return the result of `compile_inner` that `save_compiled` serialized."""
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.output_code import CompiledFxGraphConstants

    compiled, constants = pickle.loads(saved), CompiledFxGraphConstants()
    compiled.cache_key, _ = PyCodeCache.write(compiled.source_code)  # no-op if it is unchanged
    compiled.after_deserialization(constants)
    compiled.post_compile((), constants, compiled.fx_kwargs)
    return compiled


def kernels_of(compiled: Any) -> Callable:
    """Return the code of a compiled graph: calling the graph itself adds an unnamed mark for profilers."""
    return compiled.current_callable


def is_code_alone(compiled: Any) -> bool:
    """Return True if a compiled graph is only code, on the CPU: no constants, and no input checks."""
    return set(compiled.device_types) <= {"cpu"} and not compiled.constants and not compiled.inputs_to_check


def line_mode() -> tuple[FakeTensorMode, Any]:
    """Return a fake mode for 1-D tensors of any length, and that length."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    shapes, source, hint = ShapeEnv(), ConstantSource("length"), 2**20
    symbol = shapes.create_symbol(hint, source, DimDynamic.DYNAMIC)
    return FakeTensorMode(shape_env=shapes), shapes.create_symintnode(symbol, hint=hint, source=source)


def compiler_folder() -> Path:
    """Return Inductor's cache folder, by its rules but without importing it."""
    if folder := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return Path(os.path.abspath(folder))
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}"
    return Path(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


def inductor_options() -> str:
    """Return Inductor's current options."""
    from torch._inductor import config

    return repr(config.save_config_portable())


def compiler_state() -> str:
    """Return the state that Inductor's results depend on besides the graph: its source, its options, the machine."""
    from torch._inductor import config
    from torch._inductor.codecache import CacheBase, torch_key

    return f"{torch_key()!r} {CacheBase.get_system()} {config.save_config_portable()!r}"


# ---- C++ kernels ------------------------------------------------------------------------------------------


def import_cpp_compiler() -> None:
    """Import the loader of C++ kernels: parts of Inductor import each other, which fails in two threads at once."""
    import torch._dynamo
    import torch._inductor.async_compile
    import torch._inductor.output_code
    import torch.utils.cpp_extension  # noqa: F401  # needed for building, and for choosing AVX-512


@contextmanager
def execute_only(
    is_whole: Callable[[Path], bool], note: Callable[[Path], None], put: Callable[[Path, bytes], None]
) -> Iterator[None]:
    """Let Inductor use a file of its cache only if it has the content that was written or built.

    By default Inductor trusts the name. A source with other content is `put` again; a library or precompiled header is
    built again unless it `is_whole`, and `note`d.
    """
    from torch._inductor import codecache
    from torch.utils._filelock import FileLock

    def write(content: str | bytes, *args: Any, **kwargs: Any) -> tuple[str, str]:
        key, path = _write(content, *args, **kwargs)
        expected = content.encode() if isinstance(content, str) else content
        if Path(path).read_bytes() != expected:
            put(Path(path), expected)
        return key, path

    def build(lock_path: str, cpp_builders: Sequence[Any]) -> None:
        with FileLock(lock_path, timeout=codecache.LOCK_TIMEOUT):
            for builder in cpp_builders:
                path = Path(builder.get_target_file_path())
                if not is_whole(path):
                    path.unlink(missing_ok=True)
                    builder.build()
                    note(path)

    _write = codecache.write
    # `_worker_compile_cpp` is called by name before each load, and for the precompiled header
    with patch.object(codecache, "write", write), patch.object(codecache, "_worker_compile_cpp", build):
        yield


@contextmanager
def instructions_untested() -> Iterator[None]:
    """Make Inductor take the processor's best instruction set without tests, and forget it on exit.

    By default it builds a library of PyTorch's vectors for every set, seconds each, and loads it in another process. An
    earlier choice stays.
    """
    from torch._inductor import config, cpu_vec_isa

    choose = cpu_vec_isa.valid_vec_isa_list
    if choose.cache_info().currsize or config.cpp.vec_isa_ok is not None:
        yield
        return
    try:
        with config.patch({"cpp.vec_isa_ok": True}):  # only in this thread, but the choice is cached for all
            choose()
        yield
    finally:
        choose.cache_clear()
        for kind in cpu_vec_isa.supported_vec_isa_list:
            getattr(type(kind).__bool__, "cache_clear", lambda: None)()


def instruction_set() -> str:
    """Return the name of the instruction set that C++ kernels are built for; empty if it has no vectors."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    return str(chosen) if (chosen := pick_vec_isa()) else ""


def build_library(source: str) -> Callable[[], Any]:
    """Start building C++ of a Python module `kernels`, unless it is built; return its loader, which waits."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    class Library(CppPythonBindingsCodeCache):
        entry_function = "kernels"

    # A thread builds it, because the header may still be in progress; the thread that waits loads it.
    # The flags are those for vectors even if the library has none: the header is precompiled with them.
    pool = AsyncCompile.pool()

    def submit(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return pool.submit(undisturbed(work), *args, **kwargs)

    vectors = {"needs_vec_isa": True} if VERSION >= (2, 13) else {}  # the default before 2.13
    library = submit(Library.load_async, source, submit_fn=submit, **vectors)
    return lambda: library.result()()


def binding_of(name: str, argtypes: Sequence[str]) -> str:
    """Return C++ that lets Python call a function `kernel`, which a macro renames to `name`; it includes headers."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Bindings

    types = (argtype.replace("const ", "") for argtype in argtypes)
    arguments = ", ".join(f"parse_arg<{argtype}>(args, {n})" for n, argtype in enumerate(types))
    call = Bindings.call_entry_function.format(arguments)
    return Bindings.suffix_template.format(
        arg_len=len(argtypes), call_entry_func=call, entry_func=name, extra_parse_arg=Bindings.extra_parse_arg
    )


def load_library(path: str) -> ModuleType:
    """Load a library `kernels` that `build_library` built, without Inductor."""
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(
        torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
    )
    spec = importlib.util.spec_from_file_location(f"{Path(path).stem}.kernels", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LOWERING = "from torch._inductor.select_algorithm import extern_kernels"


def without_lowering(source: str) -> str:
    """Replace Inductor's `extern_kernels` by `torch` in a body's code, if the functions are the same.

    Importing Inductor's namespace of them imports all of its lowering, which takes a second.
    """
    if LOWERING not in source:
        return source
    from torch._inductor.select_algorithm import extern_kernels

    called = set(re.findall(r"\bextern_kernels\.(\w+)", source))
    if any(getattr(torch, name, None) is not getattr(extern_kernels, name) for name in called):
        return source
    return source.replace(LOWERING, "import torch as extern_kernels")


# ---- process groups ---------------------------------------------------------------------------------------


def register_axis_group(axis: str, group: Any) -> None:
    """Register a process group under the name of its mesh axis, in place of any earlier one."""
    torch._C._distributed_c10d._unregister_process_group(axis)
    torch._C._distributed_c10d._register_process_group(axis, group)


def gloo_of_one_thread(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a gloo backend whose collectives run one after another.

    With its default two threads, two simultaneous collectives of a group corrupt the heap: glibc's malloc aborts in
    `gloo::transport::tcp::UnboundBuffer`, in torch 2.13.0 once in about 400 small steps with an evaluation or a save.
    """
    kind = torch.distributed.ProcessGroupGloo
    options = kind._Options()  # type: ignore[attr-defined]
    options._devices, options._threads, options._timeout = [kind.create_default_device()], 1, timeout
    return kind(store, rank, size, options)


def default_store() -> torch.distributed.Store:
    """Return the store of the default process group."""
    return torch.distributed.distributed_c10d._get_default_store()


def abort_groups() -> None:
    """Leave all process groups although ranks of them are gone: collectives in flight are aborted.

    NCCL's communicators are aborted at the same time, because the abort of one waits for the kernels of all.
    """
    if torch.distributed.get_backend() == "nccl":
        groups = list(torch.distributed.distributed_c10d._world.pg_names)
        with ThreadPoolExecutor(len(groups)) as pool:
            list(pool.map(torch.distributed.ProcessGroup.abort, groups))
        torch.distributed.distributed_c10d._abort_process_group()
    else:
        torch.distributed.destroy_process_group()


def resolve_axis_group(axis: str) -> Any:
    """Return the process group registered under the name of a mesh axis."""
    return torch._C._distributed_c10d._resolve_process_group(axis)


@contextmanager
def step_by_step() -> Iterator[None]:
    """Let recurrent networks be unrolled over time: the fake kernel of the CPU's fused one gives other shapes."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def _with_states_alike(layer: Callable[..., tuple[Tensor, tuple]]) -> Callable[..., tuple[Tensor, tuple]]:
    """Wrap an LSTM layer so that its last state has the shape of its first."""

    def called(x: Tensor, state: Sequence[Tensor], *args: Any, **kwargs: Any) -> tuple[Tensor, tuple]:
        out, last = layer(x, state, *args, **kwargs)
        return out, tuple(new.reshape(old.shape) for new, old in zip(last, state))

    return called


if VERSION < (2, 13):  # one_layer_lstm squeezes the wrong dim, so its states have an extra one
    decompositions.one_layer_lstm = _with_states_alike(decompositions.one_layer_lstm)


@contextmanager
def gradients_inside() -> Iterator[None]:
    """Record gradients in an operator's own kernel, which runs below autograd."""
    keys = torch._C.DispatchKey
    below = (keys.AutogradCPU, keys.AutogradCUDA, keys.AutogradFunctionality)
    with ExitStack() as stack:
        for key in below:
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        stack.enter_context(torch.enable_grad())
        yield


@contextmanager
def inference_as_no_grad() -> Iterator[None]:
    """While active, `torch.inference_mode` disables gradients, as recorded nodes; inside it so does `enable_grad`."""

    def begin(region: Any) -> None:
        region.earlier = torch.is_grad_enabled(), torch._C._set_grad_enabled
        SET_GRAD_ENABLED(not region.mode)
        torch._C._set_grad_enabled = (lambda enabled: SET_GRAD_ENABLED(False)) if region.mode else SET_GRAD_ENABLED

    def end(region: Any, *error: Any) -> None:
        enabled, torch._C._set_grad_enabled = region.earlier
        SET_GRAD_ENABLED(enabled)

    with patch.object(torch.inference_mode, "__enter__", begin), patch.object(torch.inference_mode, "__exit__", end):
        yield


def conversions_as(instead: Callable[..., Any]) -> AbstractContextManager:
    """While active, `module.to(...)` and similar methods call `instead(module, convert, recurse)`."""
    return patch.object(torch.nn.Module, "_apply", instead)


def tensor_checks_as(instead: Callable[..., Any]) -> AbstractContextManager:
    """Call `instead` in place of the check that a condition holds for all entries of a tensor."""
    return patch.object(torch, "_check_tensor_all", instead)


def unvalidated_distributions() -> AbstractContextManager:
    """While active, distributions do not validate their arguments unless asked to."""
    return patch.object(torch.distributions.Distribution, "_validate_args", False)


class _HoldsDerivative(Exception):
    """A torch.func transform contains a derivative, so that it has to be traced together with it."""


@contextmanager
def derivatives_as_operators(vjp: Callable[..., Any]) -> Iterator[None]:
    """While active, exported code may call `torch.func.grad`, also inside `vmap` and `jvp`; `vjp` replaces PyTorch's.

    Export does not follow a derivative: the outermost transform is traced separately, and its operators are called
    instead.
    """
    from torch._functorch import apis, eager_transforms

    depth, tracing_apart = 0, False

    def traced(transform: Callable, *args: Any, **kwargs: Any) -> Any:
        nonlocal tracing_apart
        tracing_apart = True
        try:
            with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
                body = make_fx(lambda: transform(*args, **kwargs), _core_decompositions())()
        finally:
            tracing_apart = False
        return body()  # the body holds the tensors that it reads

    def wrap_derivative(transform: Callable) -> Callable:
        def called(*args: Any, **kwargs: Any) -> Any:
            if depth and not tracing_apart:
                raise _HoldsDerivative
            return transform(*args, **kwargs) if tracing_apart else traced(transform, *args, **kwargs)

        return called

    def wrap_outer(transform: Callable) -> Callable:
        def called(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                return transform(*args, **kwargs)
            except _HoldsDerivative:
                if depth > 1:
                    raise
            finally:
                depth -= 1
            return traced(transform, *args, **kwargs)

        return called

    patches = {
        "grad_and_value_impl": wrap_derivative,
        "_jvp_with_argnums": wrap_outer,
        "_vjp_with_argnums": lambda _: vjp,
    }
    with ExitStack() as stack:
        for name, make in patches.items():
            stack.enter_context(patch.object(eager_transforms, name, make(getattr(eager_transforms, name))))
        stack.enter_context(patch.object(apis, "vmap_impl", wrap_outer(apis.vmap_impl)))
        yield


@contextmanager
def quiet_failures() -> Iterator[None]:
    """Silence the output of a failing export: the graph so far, advice for its own users."""
    loggers = map(logging.getLogger, ("torch.export._trace", "torch.fx.experimental.symbolic_shapes"))
    with ExitStack() as stack:
        stack.enter_context(patch("torch.export._trace.print", lambda *_, **__: None, create=True))
        for logger in loggers:
            stack.enter_context(patch.object(logger, "disabled", True))
        yield


@contextmanager
def functions_as(instead: Callable[[type, tuple], tuple[Any, list[Tensor]]]) -> Iterator[None]:
    """While active, calling a custom `autograd.Function` runs `instead(cls, args)` as its forward, and saves nothing.

    `instead` returns the results and the operands that it changed.

    `Function.apply` may have been stored under another name long before, and is C from 2.14 on. But it always looks up
    `_backward_cls`, then `forward`, then `setup_context` if the function has its own: these are replaced.
    """
    kind, base = type(torch.autograd.Function), torch.autograd.Function.setup_context
    begun_cls: type | None = None
    ended_cls: type | None = None
    changed: list[Tensor] = []

    def look_up(cls: type, name: str) -> Any:
        nonlocal begun_cls, ended_cls
        attribute = type.__getattribute__(cls, name)
        if name == "_backward_cls" and not cls.__module__.startswith("torch."):
            begun_cls = cls
        elif name == "forward" and begun_cls is cls:
            begun_cls = None
            return partial(forward, cls, type.__getattribute__(cls, "setup_context") is base)
        elif name == "setup_context" and ended_cls is cls:
            ended_cls = None
            return lambda ctx, *args: ctx.mark_dirty(*changed)
        return attribute

    def forward(cls: type, has_context: bool, *args: Any) -> Any:
        nonlocal ended_cls, changed
        result, changed = instead(cls, args[has_context:])
        if has_context:
            args[0].mark_dirty(*changed)
        ended_cls = None if has_context else cls
        return result

    kind.__getattribute__ = look_up  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del kind.__getattribute__


@contextmanager
def flex_with_gradients() -> Iterator[None]:
    """Allow capture of FlexAttention on devices where PyTorch's kernel has no backward: it will not run.

    `torch.tensor(1)` in a mask or score function becomes an operator: a constant of such a function cannot be traced
    again.
    """
    module = importlib.import_module("torch._higher_order_ops.flex_attention")
    trace = module.reenter_make_fx

    def trace_without_constants(function: Callable) -> Callable:
        def run(*args: Any) -> fx.GraphModule:
            graph_module = trace(function)(*args)
            _write_constants(graph_module)
            return graph_module

        return run

    with (
        patch("torch.nn.attention.flex_attention._validate_device", lambda *_: None),
        patch.object(module, "reenter_make_fx", trace_without_constants),
    ):
        yield


def _write_constants(module: fx.GraphModule) -> None:
    """Replace constants of a traced function, each a number, by `full`; raise ValueError for larger ones."""
    nodes = [(node, getattr(module, node.target)) for node in module.graph.find_nodes(op="get_attr")]
    constants = [(node, value) for node, value in nodes if isinstance(value, Tensor)]
    for node, constant in constants:
        users = list(node.users)
        if constant.dim() or any(user.target is not torch.ops.aten.lift_fresh_copy.default for user in users):
            raise ValueError(
                "torch.tensor(...) in a mask or score function of flex_attention makes more than one number; call it "
                "outside of the function"
            )
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            value = constant.item()
        for lifted in users:
            with module.graph.inserting_before(lifted):
                options = {"dtype": constant.dtype, "device": constant.device, "pin_memory": False}
                full = module.graph.call_function(torch.ops.aten.full.default, ([], value), options)
            full.meta = dict(lifted.meta)
            for detached in [user for user in lifted.users if user.target is torch.ops.aten.detach_.default]:
                detached.replace_all_uses_with(lifted)
                module.graph.erase_node(detached)
            lifted.replace_all_uses_with(full)
            module.graph.erase_node(lifted)
        module.graph.erase_node(node)
    for name in {node.target for node, _ in constants}:
        delattr(module, name)
    module.recompile()


_FLEX = {  # options that the public function sets itself
    "BACKEND": "TRITON",  # neither the kernel for few queries nor one installed separately
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,  # a query may see nothing
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
}


def flex_attention(
    q: Tensor, k: Tensor, v: Tensor, change: Callable, mask: Any, scale: float, read: tuple, bounds: tuple
) -> tuple[Tensor, Tensor]:
    """Call FlexAttention's operator: (out, lse in base 2) for a `BlockMask` whose function also takes `bounds`.

    `change(score, b, h, i, j, *read)` computes the scores.
    """
    operator = torch.ops.higher_order.flex_attention
    out, lse, _ = operator(q, k, v, change, mask.as_tuple(), scale, _FLEX, read, bounds)
    return out, lse


def flex_attention_backward(
    tensors: Sequence[Tensor], change: Callable, joint: Callable, mask: Any, scale: float, read: tuple, bounds: tuple
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v from `tensors`: q, k, v, out, its lse in base 2 and its gradient.

    `joint(score, b, h, i, j, gradient, *read)` returns a gradient or None for each argument but the sixth.
    """
    operator = torch.ops.higher_order.flex_attention_backward
    return operator(*tensors, None, change, joint, mask.as_tuple(), scale, _FLEX, read, bounds)[:3]


def graph_of(fn: Callable, *args: Tensor) -> fx.GraphModule:
    """Return the operators that a function calls; a graph that is being traced does not record them."""
    with disable_proxy_modes_tracing():
        return make_fx(fn)(*args)


@contextmanager
def _flex_as_laid_out() -> Iterator[None]:
    """Make Inductor pass FlexAttention's kernels contiguous lists of blocks and log-sum-exps, as they require.

    By default it may pad the rows of values computed in the same graph. The inputs of score and mask functions are
    computed beforehand: in the kernel, they would be computed for each pair, if that can be written at all.
    """
    from torch._inductor.ir import ExternKernel, TensorBox
    from torch._inductor.lowering import lowerings

    def lowered(lower: Callable, positions: tuple[int, ...]) -> Callable:
        def run(*args: Any) -> Any:
            exact = {i: tree_map_only(TensorBox, ExternKernel.require_contiguous, args[i]) for i in positions}
            return lower(*(exact.get(i, arg) for i, arg in enumerate(args)))

        return run

    operators = torch.ops.higher_order.flex_attention, torch.ops.higher_order.flex_attention_backward
    positions = (4, 7, 8), (4, 9, 12, 13)  # blocks and inputs of functions; log-sum-exps before them
    with patch.dict(lowerings, {op: lowered(lowerings[op], indices) for op, indices in zip(operators, positions)}):
        yield


@contextmanager
def grouped_products_as(instead: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> Iterator[None]:
    """Replace F.grouped_mm's own function by `instead` of it."""
    with patch("torch._grouped_mm", instead(torch._grouped_mm)):
        yield


def context_parallel_internals() -> Any:
    """Return PyTorch's own context parallelism, for comparison: its rings, and its table of kernels."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    return _attention


def trace_artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    """Add a file to the TORCH_TRACE log, where `tlparse` shows it; `encoding` is "string" or "json"."""
    trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=payload, expect_trace_id=False
    )


def collectives_recorded() -> bytes:
    """Return NCCL's flight record of this process, pickled for `torchfrtrace`; empty without NCCL."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    return dump() if dump else b""


def record_allocations() -> None:
    """Start recording who allocates and frees memory in CUDA's allocator."""
    torch.cuda.memory._record_memory_history()


def dump_allocations(path: Path) -> None:
    """Write the recorded allocations, for pytorch.org/memory_viz, and stop recording."""
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)


# ---- keys of node.meta that PyTorch reads and writes ------------------------------------------------------


class Traced(NamedTuple):
    """The keys that PyTorch's tracers write: value, frames as text, paths of modules, marks of `annotate`."""

    value: Any
    stack_trace: str
    modules: tuple[str, ...]
    marks: dict[str, Any]


def from_torch(node: fx.Node) -> Traced:
    """Read the keys that a tracer of PyTorch (`torch.export`, `make_fx`) wrote on a node."""
    meta = node.meta
    modules = tuple(path for path, _ in (meta.get("nn_module_stack") or {}).values())
    return Traced(meta.get("val"), meta.get("stack_trace") or "", modules, meta.get("custom") or {})


def to_torch(node: fx.Node, **keys: Any) -> None:
    """Write keys that PyTorch reads: `val` and `custom` before a graph is traced again, others before Inductor."""
    node.meta.update(keys)
