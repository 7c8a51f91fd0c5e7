"""Capture a plain model and its loss as one global, single-device graph."""

from __future__ import annotations

import copy
import hashlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram, export
from torch.export.graph_signature import InputKind, OutputKind

from compiler_trainer.capture.assigned import as_writes, refuse_replaced
from compiler_trainer.capture.averages import cumulative_averages
from compiler_trainer.capture.flex import write_out
from compiler_trainer.capture.fold import StateTensor, fold_stacks
from compiler_trainer.capture.functions import functions_as_operators
from compiler_trainer.capture.grad_modes import write_gradients
from compiler_trainer.capture.grouped import any_dtype, replace_grouped_mm
from compiler_trainer.capture.hidden import hidden_as_operators, line
from compiler_trainer.capture.hints import checkpoints_as_marks
from compiler_trainer.capture.layers import mark_layers
from compiler_trainer.capture.records import read_marks, read_trace, write_marks
from compiler_trainer.capture.registered import as_functions
from compiler_trainer.capture.returned import parted
from compiler_trainer.config.errors import UserError, first_line
from compiler_trainer.indexers import indexers_of_fixed_shapes
from compiler_trainer.recurrences import recurrences_as_operators
from compiler_trainer.request import LossFn, Metrics
from compiler_trainer.widths import dtypes_in
from passes.ir import ir
from passes.ir.folds import Fold, Folding
from passes.ir.layer import Layer, layer_names, layer_of
from passes.ir.spec import Spec
from passes.rules import tensor_operands
from passes.sharding.normalize import copied
from passes.torch_private import (
    FakeTensor,
    FakeTensorMode,
    composites_of,
    data_dependent,
    flex_with_gradients,
    lazy_graph_modules,
    quiet_failures,
    regions_in_line,
)
from passes.trace.editor import inline

aten = torch.ops.aten
MATMULS = {aten.linear.default, aten.mm.default, aten.bmm.default, aten.matmul.default, aten.addmm.default}


class _WithLoss(nn.Module):
    """The model and its loss as one module of positional tensors, which have the names `keys` in the batch.

    It returns the loss followed by the metrics, calls `note` with the metrics by name, and `replaced` with the names of
    tensors other than buffers that the model replaces.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        keys: tuple[str, ...],
        note: Callable[[Metrics], None],
        replaced: Callable[[set[str]], None],
    ):
        super().__init__()
        self.model, self.loss_fn, self.keys, self.note, self.replaced = model, loss_fn, keys, note, replaced

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        replaced = set[str]()
        with as_writes(self.model, replaced):
            loss, metrics = parted(self.loss_fn(self.model, dict(zip(self.keys, values))), len(values[0]))
        self.note(metrics)
        self.replaced(replaced)
        return loss, *metrics.values()


def fake_copy(model: nn.Module, mode: FakeTensorMode, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    """Return the model on `device` with fake parameters (as in a model of `dtype`) and buffers; copy no real ones.

    Raises UserError naming a meta tensor that is neither parameter nor buffer.
    """
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                problem = "is on the meta device and neither parameter nor buffer, so that it has no value"
                raise UserError(".".join(filter(None, (path, name))), f"{problem}; register it as a buffer")
    memo: dict[int, object] = {}
    dtype_of = dtypes_in(model, dtype)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        is_parameter = isinstance(tensor, nn.Parameter)
        cast = dtype_of(name, tensor) if is_parameter else tensor.dtype
        with mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=cast, device=device)
        memo[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
    return copy.deepcopy(model, memo)


def capture(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Mapping[str, Tensor],
    device: torch.device,
    dtype: torch.dtype | None = None,
    folding: Folding | None = None,
) -> tuple[ir.Program, ir.Context]:
    """Return the forward and loss for a batch of the given global shapes, as a functional ATen graph.

    Inputs are parameters (that require gradients), buffers (all other state of the model), constants and the batch.
    Outputs are the loss, its metrics and the new values of buffers that the forward changes. Parameters are used as in
    a model of `dtype` (None: their own). With `folding`, some of many equal layers are left out. Raises UserError
    naming the batch entry, or the code that `torch.export` could not follow.
    """
    for key, value in batch.items():
        if not isinstance(value, Tensor):
            raise UserError(f"batch[{key!r}]", f"is a {type(value).__name__}; every entry must be a tensor")
    mode = FakeTensorMode()
    keys = tuple(batch)
    metrics, replaced = dict[str, Tensor](), set[str]()  # not attributes of the module, because export restores those
    module = _WithLoss(fake_copy(model, mode, device, dtype), loss_fn, keys, metrics.update, replaced.update)
    with mode:
        values = tuple(torch.empty(v.shape, dtype=v.dtype, device=device) for v in batch.values())
    with (
        functions_as_operators(),
        checkpoints_as_marks(),
        flex_with_gradients(),
        any_dtype(),
        cumulative_averages(),
        recurrences_as_operators(),
        indexers_of_fixed_shapes(),
        lazy_graph_modules(),
        _quiet(),
    ):
        exported = _export(module, values)
        refuse_replaced(exported, replaced)
        state = state_of(exported, model)
        write_gradients(exported.graph, {node for node, state_tensor in state.items() if state_tensor.is_trained})
        replace_grouped_mm(exported.graph)
        share_constants(exported)
        mark_layers(exported.graph, batch_of(exported))
        folds = fold_stacks(exported.graph_module, state, folding) if folding else ()
        exported = _functional(exported)
        write_out(exported.graph_module)
    program = _to_program(exported, keys, tuple(metrics), model, folds)
    check_matmuls(program)
    as_functions(program)
    loss = program.results()[[o.kind for o in program.outputs].index("loss")]
    ctx = ir.Context(ir.example(loss).fake_mode)  # type: ignore[attr-defined]
    for node in program.graph.find_nodes(op="call_function", target=aten.copy.default):
        inline(node, copied, ctx)
    return program, ctx


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings caused by torch itself: of version 2.13, and of its recurrent networks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*_flat_weights", category=UserWarning)
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        yield


def _export(module: _WithLoss, values: tuple[Tensor, ...]) -> ExportedProgram:
    """Trace the module on fake values; raise UserError naming the model's line that cannot be traced."""
    try:
        with torch.enable_grad(), quiet_failures(), regions_in_line(), hidden_as_operators():
            exported = export(module, values, strict=False)
    except UserError:
        raise
    except data_dependent() as error:
        raise UserError(
            "model",
            f"{line(error)}branches on a value; one graph must hold for all data: use torch.where, or leave out a "
            "branch that only saves work",
        ) from error
    except Exception as error:
        raise UserError("model", f"{line(error)}{type(error).__name__}: {first_line(error)}") from error
    for spec in exported.graph_signature.input_specs:
        if spec.kind in (InputKind.CUSTOM_OBJ, InputKind.TOKEN):
            problem = "is neither a tensor nor a number, the only inputs that a graph can have"
            raise UserError("model", f"{spec.target or spec.arg.name} {problem}; use it before the model, on the data")
    loss_code = getattr(inspect.unwrap(getattr(module.loss_fn, "func", module.loss_fn)), "__code__", None)
    read_trace(exported.graph_module, __file__, loss_code)
    for node in exported.graph.nodes:
        if isinstance(ir.value(node), torch.SymInt | torch.SymFloat | torch.SymBool):
            raise UserError(
                "model", f"{ir.source(node)} reads a value into Python (item); one graph must hold for all data"
            )
        if any(isinstance(d, torch.SymInt) for d in getattr(ir.value(node), "shape", ())):
            raise UserError(
                "model", f"{ir.source(node)} has a shape that depends on data; use a mask of fixed shape instead"
            )
    return exported


def _functional(exported: ExportedProgram) -> ExportedProgram:
    """Return the graph without in-place writes; raise UserError if a write is not allowed."""
    write_marks(exported.graph_module)
    try:
        with composites_of(exported.graph_module):
            exported = exported.run_decompositions({})
    except RuntimeError as error:
        raise UserError("model", first_line(error)) from error
    read_marks(exported.graph_module)
    return exported


def batch_of(exported: ExportedProgram) -> list[torch.fx.Node]:
    """Return the placeholders of the batch."""
    placeholders = (n for n in exported.graph.nodes if n.op == "placeholder")
    pairs = zip(placeholders, exported.graph_signature.input_specs, strict=True)
    return [node for node, spec in pairs if spec.kind is InputKind.USER_INPUT]


def share_constants(exported: ExportedProgram) -> None:
    """Merge equal constants, so that layers which create the same constant are equal."""
    first: dict[str, torch.fx.Node] = {}
    for node, value in constants_of(exported).items():
        first_node = first.setdefault(constant_name(value), node)
        if first_node is not node:
            node.replace_all_uses_with(first_node)


def constants_of(exported: ExportedProgram) -> dict[torch.fx.Node, Tensor]:
    """Return the tensors of the model that are neither parameter nor buffer, or come from Python numbers."""
    placeholders = (n for n in exported.graph.nodes if n.op == "placeholder")
    pairs = zip(placeholders, exported.graph_signature.input_specs, strict=True)
    constants = {n: exported.constants[spec.target] for n, spec in pairs if spec.kind is InputKind.CONSTANT_TENSOR}
    for node, value in constants.items():
        if isinstance(value, FakeTensor):
            place = next((f"{ir.source(user)} " for user in node.users), "")
            problem = "reads a tensor that no captured operator creates, such as a result of torch.autograd.grad"
            fix = "use torch.func.grad; or, for a parameter in a list or of another module, register it where it is"
            raise UserError("model", f"{place}{problem}; {fix}")
    return constants


def constant_name(value: Tensor) -> str:
    """Return a name that is the same for equal tensors only."""
    entries = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    content = f"{value.dtype} {tuple(value.shape)} ".encode() + entries.tobytes()
    return f"constant_{hashlib.sha256(content).hexdigest()[:12]}"


def state_of(exported: ExportedProgram, model: nn.Module) -> dict[torch.fx.Node, StateTensor]:
    """Return the parameter or buffer of each placeholder."""
    names, state = first_names(model), {}
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    placeholders = (n for n in exported.graph.nodes if n.op == "placeholder")
    for node, spec in zip(placeholders, exported.graph_signature.input_specs, strict=True):
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and spec.target is not None:
            target = spec.target.removeprefix("model.")
            name = names.get(target, target)
            state[node] = StateTensor(name, name in tensors and tensors[name].requires_grad)
    return state


def _to_program(
    exported, keys: tuple[str, ...], metrics: tuple[str, ...], model: nn.Module, folds: tuple[Fold, ...]
) -> ir.Program:
    batch, names, returned = iter(keys), first_names(model), iter(("loss", *metrics))
    signature = exported.graph_signature
    written = {names.get(t := (spec.target or "").removeprefix("model."), t) for spec in signature.output_specs}
    kinds: dict[str, ir.InputKind] = {
        name: "parameter" if p.requires_grad else "buffer" if name in written else "frozen"
        for name, p in model.named_parameters()
    }
    inputs: list[ir.Input] = []
    nodes: dict[str, torch.fx.Node] = {}
    constants = constants_of(exported)
    placeholders = [n for n in exported.graph.nodes if n.op == "placeholder"]
    for node, spec in zip(placeholders, signature.input_specs, strict=True):
        placement = Spec.whole(tuple(ir.example(node).shape))
        if spec.kind is InputKind.USER_INPUT:
            inputs.append(ir.Input(next(batch), "batch", placement))
            continue
        target = spec.target.removeprefix("model.")
        name = constant_name(constants[node]) if node in constants else names.get(target, target)
        if any(fold.holds(name) for fold in folds):
            exported.graph.erase_node(node)
            continue
        if name in nodes:
            node.replace_all_uses_with(nodes[name])
            exported.graph.erase_node(node)
            continue
        nodes[name] = node
        kind: ir.InputKind = "constant" if node in constants else kinds.get(name, "buffer")
        inputs.append(ir.Input(name, kind, placement, constants.get(node)))
    outputs, kept_results = [], []
    results = exported.graph.output_node().args[0]
    for node, spec in zip(results, signature.output_specs, strict=True):
        if kinds.get(target_name := (spec.target or "").removeprefix("model.")) == "parameter":
            problem = f"writes into the parameter {target_name!r}, which only the optimizer may change"
            place = "" if (source := ir.source(node)).startswith("<") else f"{source} "  # unknown inside `no_grad`
            raise UserError("model", f"{place}{problem}; use the new value directly instead of writing it")
        placement = Spec.whole(tuple(ir.example(node).shape))
        if spec.kind is OutputKind.USER_INPUT_MUTATION:
            continue  # each step has a batch of its own
        kept_results.append(node)
        if spec.kind is OutputKind.USER_OUTPUT:
            name = next(returned)
            output_kind: ir.OutputKind = "loss" if name == "loss" else "rows" if placement.shape else "metric"
            outputs.append(ir.Output(name, output_kind, placement))
        else:
            outputs.append(ir.Output(spec.target.removeprefix("model."), "buffer", placement))
    exported.graph.output_node().args = (tuple(kept_results),)
    for node in list(exported.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            exported.graph.erase_node(node)  # checks shapes and dtypes, which a program fixes
        if getattr(node.target, "overloadpacket", None) is torch.ops.aten._assert_async:
            warnings.warn(f"{ir.source(node)} asserts a condition on values, which no step will check", stacklevel=2)
            exported.graph.erase_node(node)
    module = torch.fx.GraphModule(torch.nn.Module(), exported.graph)
    return ir.Program(module, tuple(add_layers(inputs, nodes)), tuple(outputs), folds=folds)


def add_layers(inputs: list[ir.Input], nodes: Mapping[str, torch.fx.Node]) -> Iterator[ir.Input]:
    """Yield the inputs, with the layer of each parameter and buffer; `nodes` are their placeholders by name."""
    state = {entry.name for entry in inputs if entry.kind in ir.MODEL_STATE}
    names = layer_names(state)
    for entry in inputs:
        is_state = entry.name in state
        yield (replace(entry, layer=layer_of_state(nodes[entry.name], entry.name, names)) if is_state else entry)


def layer_of_state(node: torch.fx.Node, name: str, names: set[str]) -> Layer | None:
    """Return the only layer that reads a parameter or buffer; if none reads it, the layer in its name."""
    readers = {ir.layer(user) for user in node.users} or {layer_of(name, names)}
    return readers.pop() if len(readers) == 1 else None


def check_matmuls(program: ir.Program) -> None:
    """Raise UserError naming a matmul of two dtypes, which kernels would refuse after everything is compiled."""
    for node in program.calls():
        dtypes = [ir.example(n).dtype for n in tensor_operands(node)] if node.target in MATMULS else []
        if len(set(dtypes)) > 1:
            dtype_text = " by ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            fix = "cast one, for example x.to(weight.dtype): passes.cast.param_dtype casts parameters, but not buffers"
            raise UserError("model", f"{ir.source(node)} multiplies {dtype_text}; {fix}")


def first_names(model: nn.Module) -> dict[str, str]:
    """Return each name of a parameter or buffer with the first name of its tensor; tied weights share it."""
    first: dict[int, str] = {}
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors}
