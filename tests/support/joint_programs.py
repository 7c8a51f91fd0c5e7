"""Small joint programs and their lockstep outputs, for tests of passes that run after `joint`."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from compiler_trainer.capture.capture import capture
from passes.autograd.joint import Joint
from passes.check.simulate import Lockstep
from passes.ir import ir
from passes.ir.layer import layer_of, prefixes
from passes.ir.mesh import Mesh
from passes.ir.printer import op_name, print_program
from passes.ir.record import Origin
from passes.ir.spec import Spec, shard
from passes.ir.stages import Stage
from passes.sharding.collectives import Collectives
from passes.sharding.normalize import Normalize
from passes.sharding.place import Place
from passes.sharding.shard import Shard
from passes.torch_private import FakeTensorMode

TP_PLAN = {"blocks.*.up.weight": {"tp": 0}, "blocks.*.down.weight": {"tp": 1}}


class Block(nn.Module):
    """Attention of one head and a feed-forward of uneven width, each with its norm."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.norm, self.qkv = nn.RMSNorm(dim, eps=1e-5), nn.Linear(dim, 3 * dim, bias=False)
        self.up, self.down = nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unsqueeze(1).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """Token embedding, blocks and a head; no dim divides by 2 or 3."""

    def __init__(self, n_blocks: int = 2, dim: int = 5, hidden: int = 7, vocab: int = 11):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(n_blocks))
        self.norm, self.head = nn.RMSNorm(dim, eps=1e-5), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def example(model_class=Model, **sizes) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a model and a batch of 6 sequences, the same at each call."""
    torch.manual_seed(0)
    model = model_class(**sizes)
    return model, {"tokens": torch.randint(0, 11, (6, 4)), "labels": torch.randint(0, 11, (6, 4))}


@functools.cache
def joint(mesh: tuple[tuple[str, int], ...] = (), n_blocks: int = 2) -> tuple[ir.Program, ir.Context]:
    """Return the joint program of `example` on a mesh; tests share it, so passes must leave it alone."""
    model, batch = example(n_blocks=n_blocks)
    program, ctx = capture(model, loss_fn, batch, torch.device("cpu"))
    program = replace(program, mesh=Mesh.of(dict(mesh)))
    for rewrite in (Normalize(), Place(TP_PLAN if "tp" in dict(mesh) else {}), Shard(), Joint()):
        program, _ = rewrite(program, ctx)
    return program, ctx


def run(program: ir.Program, ctx: ir.Context, **sizes) -> list[tuple[Tensor, ...]]:
    """Return every rank's outputs on the values of `example`, and the contents of its inputs afterwards."""
    model, batch = example(**sizes)
    values = {**dict(model.named_parameters()), **dict(model.named_buffers()), **batch}
    return run_on(program, ctx, values)


@functools.cache
def plain(mesh: tuple[tuple[str, int], ...] = ()) -> list[tuple[Tensor, ...]]:
    """Return the outputs of the joint program before any further pass."""
    return run(*joint(mesh))


def run_on(program: ir.Program, ctx: ir.Context, values: dict[str, Tensor]) -> list[tuple[Tensor, ...]]:
    """Return every rank's outputs on full values by input name (others are 0.5), and its inputs afterwards."""
    program, _ = Collectives()(program, ctx)
    nodes = program.placeholders()

    def local(node: fx.Node, given: ir.Input, place: dict[str, int]) -> Tensor:
        if given.kind == "coordinate":
            return torch.tensor(place[given.name])
        if given.kind in ("parameter", "buffer", "batch"):
            return shard(values[given.name].detach(), given.spec, program.mesh, place)
        return torch.full(tuple(ir.example(node).shape), 0.5, dtype=ir.example(node).dtype)

    given = [[local(node, i, place) for node, i in zip(nodes, program.inputs, strict=True)] for place in program.mesh]
    outputs = Lockstep(program).run(given)
    return [(*returned, *inputs) for returned, inputs in zip(outputs, given, strict=True)]


class Tiny:
    """Writes a program node by node."""

    def __init__(self, device: str = "cpu", **mesh: int):
        self.device = device
        self.mesh, self.ctx, self.graph = Mesh.of(mesh), ir.Context(FakeTensorMode()), fx.Graph()
        self.inputs: list[ir.Input] = []

    def input(self, name: str, spec: Spec, kind: ir.InputKind = "parameter") -> fx.Node:
        """Add a placeholder of fp32."""
        node = self.graph.placeholder(name)
        with self.ctx.fake_mode:
            ir.set_value(node, torch.empty(spec.local_shape(self.mesh), device=self.device))
        self.inputs.append(ir.Input(name, kind, spec))
        return node

    def call(self, target: Any, *args: Any, phase: str = "forward", module: str = "", **kwargs: Any) -> fx.Node:
        """Add an operator of a phase and a module, whose outermost number is that of its layer."""
        node = self.graph.create_node("call_function", target, args, kwargs, op_name(target).split(".")[0])
        values, named = fx.map_arg((args, kwargs), ir.value)
        with self.ctx.fake_mode:
            ir.set_value(node, target(*values, **named))
        ir.update(node, phase=phase, layer=layer_of(module, {path for path in prefixes(module) if path[-1:].isdigit()}))
        ir.update(node, origin=Origin(modules=(module,) if module else ()))
        return node

    def program(self, *results: fx.Node) -> ir.Program:
        """Return the program that returns the results as gradients."""
        self.graph.output(tuple(results))
        outputs = tuple(ir.Output(n.name, "gradient", Spec.whole(tuple(ir.example(n).shape))) for n in results)
        module = fx.GraphModule(nn.Module(), self.graph)
        return ir.Program(module, tuple(self.inputs), outputs, self.mesh, Stage.JOINT)


def count(program: ir.Program, op, phase: str) -> int:
    """Return the number of nodes of a phase that call an operator."""
    return sum(node.target is op and ir.phase(node) == phase for node in program.calls())


def equal(a: list[tuple[Tensor, ...]], b: list[tuple[Tensor, ...]]) -> bool:
    """Return True if all ranks' outputs agree bit for bit."""
    return all(torch.equal(x, y) for xs, ys in zip(a, b, strict=True) for x, y in zip(xs, ys, strict=True))


def alike(a: list[tuple[Tensor, ...]], b: list[tuple[Tensor, ...]], tolerance: float = 1e-5) -> bool:
    """Return True if all ranks' outputs agree up to rounding."""
    pairs = [pair for xs, ys in zip(a, b, strict=True) for pair in zip(xs, ys, strict=True)]
    return all(torch.allclose(x, y, atol=tolerance, rtol=tolerance) for x, y in pairs)


def body(program: ir.Program) -> str:
    """Return the program's operators, a line each, without values and origins."""
    lines = print_program(program).partition("# nodes:")[2].splitlines()[1:]
    return "\n".join(line.split(" :")[0] for line in lines)
