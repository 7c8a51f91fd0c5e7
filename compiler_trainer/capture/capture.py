"""Capture a plain model and its loss as one global, single-device graph."""

from __future__ import annotations

import copy
import hashlib
import inspect
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram, export
from torch.export.graph_signature import InputKind, OutputKind

from compiler_trainer.capture.averages import cumulative_averages
from compiler_trainer.capture.flex import write_out
from compiler_trainer.capture.functions import functions_as_operators
from compiler_trainer.capture.grouped import any_dtype
from compiler_trainer.capture.hints import checkpoints_as_marks, read_marks
from compiler_trainer.capture.roll import Held, roll_up
from compiler_trainer.config.errors import UserError
from passes.program import ir
from passes.program.frames import roomy
from passes.program.rolls import Roll, Rolling
from passes.program.spec import Spec
from passes.program.torch_private import (
    FakeTensorMode,
    GuardOnDataDependentSymNode,
    composites_of,
    flex_with_gradients,
    lazy_graph_modules,
    quiet_failures,
)

LossFn = Callable[[nn.Module, dict[str, Tensor]], Tensor]


class _WithLoss(nn.Module):
    """The model and its loss as one module of positional tensors, named `keys` in the batch."""

    def __init__(self, model: nn.Module, loss_fn: LossFn, keys: tuple[str, ...]):
        super().__init__()
        self.model, self.loss_fn, self.keys = model, loss_fn, keys

    def forward(self, *values: Tensor) -> Tensor:
        return self.loss_fn(self.model, dict(zip(self.keys, values)))


def fake_copy(model: nn.Module, mode: FakeTensorMode, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    """The model with fake parameters (of `dtype` if floating) and buffers on `device`; no real ones are copied.

    Raises UserError naming a tensor without a value that is neither.
    """
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                what = "is on the meta device and neither parameter nor buffer, so that it has no value"
                raise UserError(".".join(filter(None, (path, name))), f"{what}; register it as a buffer")
    memo: dict[int, object] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        is_parameter = isinstance(tensor, nn.Parameter)
        cast = dtype if dtype is not None and is_parameter and tensor.is_floating_point() else tensor.dtype
        with mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=cast, device=device)
        memo[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
    return copy.deepcopy(model, memo)


@roomy
def capture(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Mapping[str, Tensor],
    device: torch.device,
    dtype: torch.dtype | None = None,
    rolling: Rolling | None = None,
) -> tuple[ir.Program, ir.Context]:
    """The forward and loss of a batch of the given global shapes as a functional ATen graph.

    Inputs are parameters (that require gradients), buffers (all others that the model has), constants and the batch;
    outputs the loss and the new values of buffers the forward changes. `dtype` is that in which parameters
    are used (None: their own). With `rolling`, of many layers alike some are left out. Raises UserError naming the
    batch entry, or what `torch.export` could not follow.
    """
    for key, value in batch.items():
        if not isinstance(value, Tensor):
            raise UserError(f"batch[{key!r}]", f"is a {type(value).__name__}; every entry must be a tensor")
    mode = FakeTensorMode()
    keys = tuple(batch)
    module = _WithLoss(fake_copy(model, mode, device, dtype), loss_fn, keys)
    with mode:
        values = tuple(torch.empty(v.shape, dtype=v.dtype, device=device) for v in batch.values())
    with (
        functions_as_operators(),
        checkpoints_as_marks(),
        flex_with_gradients(),
        any_dtype(),
        cumulative_averages(),
        lazy_graph_modules(),
        _quiet(),
    ):
        exported = _export(module, values)
        detach_regions(exported.graph_module)
        share_constants(exported)
        roll = roll_up(exported.graph_module, state_of(exported, model), rolling) if rolling else None
        exported = _functional(exported)
        write_out(exported.graph_module)
    program = _to_program(exported, keys, model, roll)
    loss = program.results()[[o.kind for o in program.outputs].index("loss")]
    if ir.example(loss).dim() or not ir.example(loss).is_floating_point():
        raise UserError(
            "loss_fn", f"returns {tuple(ir.example(loss).shape)} {ir.example(loss).dtype}; must be a scalar"
        )
    return program, ir.Context(ir.example(loss).fake_mode)  # type: ignore[attr-defined]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings of torch's own doing: of version 2.13, and of what its recurrent networks keep."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*_flat_weights", category=UserWarning)
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        yield


def _export(module: _WithLoss, values: tuple[Tensor, ...]) -> ExportedProgram:
    """Follow the module on fake values; raises UserError naming the line of the model that cannot be followed."""
    try:
        with quiet_failures(), patch.object(Tensor, "register_hook", _no_hook):
            exported = export(module, values, strict=False)
    except UserError:
        raise
    except GuardOnDataDependentSymNode as error:
        raise UserError(
            "model", f"{_line(error)}branches on a value; one graph must hold for all data: use torch.where"
        ) from error
    except Exception as error:
        raise UserError("model", f"{_line(error)}{type(error).__name__}: {_said(error)}") from error
    for spec in exported.graph_signature.input_specs:
        if spec.kind in (InputKind.CUSTOM_OBJ, InputKind.TOKEN):
            what = "is neither a tensor nor a number, which is all that a graph can be given"
            raise UserError("model", f"{spec.target or spec.arg.name} {what}; use it before the model, on the data")
    for node in exported.graph.nodes:
        _name_loss_line(node, module.loss_fn)
        if isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool):
            raise UserError(
                "model", f"{ir.source(node)} reads a value into Python (item); one graph must hold for all data"
            )
        if any(isinstance(d, torch.SymInt) for d in getattr(node.meta.get("val"), "shape", ())):
            raise UserError(
                "model", f"{ir.source(node)} gives a shape that depends on data; use a mask of fixed shape instead"
            )
    return exported


def _no_hook(tensor: Tensor, hook: Callable) -> None:
    """Instead of `Tensor.register_hook`: a graph has no gradients that a hook could be called with."""
    what = "hooks a gradient (register_hook), which no step would call"
    raise UserError("model", f"{_line()}{what}; put what it does into the backward of a torch.autograd.Function")


def _functional(exported: ExportedProgram) -> ExportedProgram:
    """Without writes in place; raises UserError where the model writes into what it may not."""
    try:
        with composites_of(exported.graph_module):
            return exported.run_decompositions({})
    except RuntimeError as error:
        raise UserError("model", _said(error)) from error


def _said(error: BaseException) -> str:
    """The first line of an error."""
    return (str(error).strip() or "no message").splitlines()[0]


def _line(error: BaseException | None = None) -> str:
    """`file.py:line ` of the model's or the loss's own code, where an error was raised or (None) where we are."""
    stack = traceback.extract_tb(error.__traceback__) if error else traceback.extract_stack()
    frames = [f for f in stack if not ir.is_library(f.filename)]
    return f"{frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno} " if frames else ""


def _name_loss_line(node: torch.fx.Node, loss_fn: LossFn) -> None:
    """Let a node that no module made say where the loss is defined: export keeps frames of `forward` only."""
    code = getattr(inspect.unwrap(getattr(loss_fn, "func", loss_fn)), "__code__", None)
    trace = node.meta.get("stack_trace")
    if trace and code and Path(__file__).name == ir.source(node).split(":")[0]:
        node.meta["stack_trace"] = f'File "{code.co_filename}", line {code.co_firstlineno}, in {code.co_name}'


def detach_regions(module: torch.fx.GraphModule) -> None:
    """Detach what leaves a `no_grad` region: making the graph functional puts the region in line and forgets it."""
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.wrap_with_set_grad_enabled):
        if node.args[0]:
            continue
        for part in list(node.users):
            with module.graph.inserting_after(part):
                detached = module.graph.call_function(torch.ops.aten.detach.default, (part,))
            detached.meta = dict(part.meta)
            part.replace_all_uses_with(detached, delete_user_cb=lambda user, own=detached: user is not own)
    module.recompile()


def share_constants(exported: ExportedProgram) -> None:
    """Let equal constants be one: layers that make the same one are then alike."""
    first: dict[str, torch.fx.Node] = {}
    for node, value in constants_of(exported).items():
        same = first.setdefault(constant_name(value), node)
        if same is not node:
            node.replace_all_uses_with(same)


def constants_of(exported: ExportedProgram) -> dict[torch.fx.Node, Tensor]:
    """The tensors that the model holds as neither parameter nor buffer, or makes of Python's numbers."""
    placeholders = (n for n in exported.graph.nodes if n.op == "placeholder")
    given = zip(placeholders, exported.graph_signature.input_specs, strict=True)
    return {n: exported.constants[spec.target] for n, spec in given if spec.kind is InputKind.CONSTANT_TENSOR}


def constant_name(value: Tensor) -> str:
    """A name that only equal tensors have."""
    entries = value.detach().cpu().reshape(-1).view(torch.uint8).numpy()
    what = f"{value.dtype} {tuple(value.shape)} ".encode() + entries.tobytes()
    return f"constant_{hashlib.sha256(what).hexdigest()[:12]}"


def state_of(exported: ExportedProgram, model: nn.Module) -> dict[torch.fx.Node, Held]:
    """The parameters and buffers that placeholders stand for."""
    names, found = first_names(model), {}
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    placeholders = (n for n in exported.graph.nodes if n.op == "placeholder")
    for node, spec in zip(placeholders, exported.graph_signature.input_specs, strict=True):
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and spec.target is not None:
            target = spec.target.removeprefix("model.")
            name = names.get(target, target)
            found[node] = Held(name, name in held and held[name].requires_grad)
    return found


def _to_program(exported, keys: tuple[str, ...], model: nn.Module, roll: Roll | None) -> ir.Program:
    batch, names = iter(keys), first_names(model)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    inputs: list[ir.Input] = []
    nodes: dict[str, torch.fx.Node] = {}
    constants = constants_of(exported)
    placeholders = [n for n in exported.graph.nodes if n.op == "placeholder"]
    for node, spec in zip(placeholders, exported.graph_signature.input_specs, strict=True):
        placement = Spec.whole(tuple(node.meta["val"].shape))
        if spec.kind is InputKind.USER_INPUT:
            inputs.append(ir.Input(next(batch), "batch", placement))
            continue
        target = spec.target.removeprefix("model.")
        name = constant_name(constants[node]) if node in constants else names.get(target, target)
        if roll is not None and roll.holds(name):
            exported.graph.erase_node(node)
            continue
        if name in nodes:
            node.replace_all_uses_with(nodes[name])
            exported.graph.erase_node(node)
            continue
        nodes[name] = node
        kind: ir.InputKind = "constant" if node in constants else "parameter" if name in trainable else "buffer"
        inputs.append(ir.Input(name, kind, placement, constants.get(node)))
    outputs = []
    results = exported.graph.output_node().args[0]
    for node, spec in zip(results, exported.graph_signature.output_specs, strict=True):
        placement = Spec.whole(tuple(node.meta["val"].shape))
        is_loss = spec.kind is OutputKind.USER_OUTPUT
        outputs.append(
            ir.Output(
                "loss" if is_loss else spec.target.removeprefix("model."), "loss" if is_loss else "buffer", placement
            )
        )
    for node in list(exported.graph.nodes):
        _trim_module_stack(node)
        read_marks(node)
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            exported.graph.erase_node(node)  # a check that shapes and dtypes are those of the capture: they are
        if getattr(node.target, "overloadpacket", None) is torch.ops.aten._assert_async:
            warnings.warn(f"{ir.source(node)} asserts something of values, which no step will check", stacklevel=2)
            exported.graph.erase_node(node)
    module = torch.fx.GraphModule(torch.nn.Module(), exported.graph)
    return ir.Program(module, tuple(inputs), tuple(outputs), facts=frozenset({"captured"}), roll=roll)


def first_names(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer -> the first of its names: tied weights are one tensor."""
    first: dict[int, str] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def _trim_module_stack(node: torch.fx.Node) -> None:
    """Module paths as the model knows them, without the wrapper."""
    stack = node.meta.get("nn_module_stack")
    if stack:
        node.meta["nn_module_stack"] = {
            k: (path.removeprefix("model").removeprefix("."), kind) for k, (path, kind) in stack.items() if path
        }
