"""Merge small collectives: fewer, larger messages for the same bytes.

    a = all_gather(wq, 0, "dp_shard", 2, 8)         flat = cat([reshape(wq), reshape(wk)])
    ...                                             rows = view(all_gather(flat, 0, "dp_shard", 2, 96), [2, 48])
    b = all_gather(wk, 0, "dp_shard", 2, 4)         a, b = the columns of each, reshaped
                                                    ...

- Gathers and maxima of parameters (scales of float8) merge within a layer and phase, at the first of them: no weight is
  gathered before its layer begins. Outside of layers they merge if no layer lies between them.
- Reduce-scatters and sums of gradients merge within a layer, after the last of their operands.

So all layers have the same collectives, and one compiled region serves all of them.

A bucket holds up to `bucket_mib` of full (not sharded) values; a larger value travels alone. Only collectives before
the first write into an input are merged, so that nothing moves across a write. The pass works on reshard operators: it
refuses a program whose collectives are written out already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from passes.communication.bucketed import gather_together, max_together, scatter_together, sum_together
from passes.ir import ir
from passes.ir.layer import Layer
from passes.ir.operators import bind, is_mutable
from passes.ir.slices import weight_nodes
from passes.ir.stages import Stage
from passes.ops import reshard
from passes.trace.editor import Editor, move_after, move_before

TOGETHER: dict[Any, Callable[..., list[Tensor]]] = {
    reshard.all_gather: gather_together,
    reshard.reduce_scatter: scatter_together,
    reshard.psum: sum_together,
    reshard.pmax: max_together,
}
REDUCTIONS = frozenset(op for op in TOGETHER if reshard.RESHARD_OPS[op].reduces == "sum")
OF_WEIGHTS = frozenset(TOGETHER) - REDUCTIONS
PER_TENSOR = ("dim", "size")  # arguments that may differ between tensors of a bucket
MIB = 2**20


# ---- collectives that may merge --------------------------------------------------------------------


def mergeable(program: ir.Program) -> list[fx.Node]:
    """Return gathers and maxima of parameters and reductions of gradients before the first write into an input."""
    weights, leaving = set(weight_nodes(program)), gradient_nodes(program)
    nodes = []
    for node in program.calls():
        if writes_input(node):
            break
        if node.target in OF_WEIGHTS and node in weights or node.target in REDUCTIONS and node in leaving:
            nodes.append(node)
    return nodes


def writes_input(node: fx.Node) -> bool:
    """Return True if the operator may change an input of the program in place."""
    return is_mutable(node) and any(n.op == "placeholder" for n in node.all_input_nodes)


def gradient_nodes(program: ir.Program) -> set[fx.Node]:
    """Return nodes that only carry one value to the optimizer or out of the program."""
    nodes: set[fx.Node] = set()
    for node in reversed(list(program.calls())):
        alone = sum(n.op != "placeholder" for n in node.all_input_nodes) <= 1
        leaves = all(u.op == "output" or ir.phase(u) == "optimizer" or u in nodes for u in node.users)
        if ir.phase(node) == "optimizer" or ir.phase(node) == "backward" and alone and leaves:
            nodes.add(node)
    return nodes


def places(program: ir.Program) -> dict[fx.Node, tuple[str, Layer | None]]:
    """Return the layer that each node is in; outside of layers, the layer after which it comes."""
    layers, last = dict[fx.Node, tuple[str, Layer | None]](), None
    for node in program.calls():
        layer = ir.layer(node)
        last = last if ir.phase(node) == "optimizer" else layer or last
        layers[node] = ("in", layer) if layer else ("after", last)
    return layers


def shared_options(node: fx.Node) -> dict[str, Any]:
    """Return the options that all tensors in a bucket must share.

    A gather's `reduce_dtype` is not among them, because only its gradient had it.
    """
    unshared = ("x", *PER_TENSOR, *(() if node.target in REDUCTIONS else ("reduce_dtype",)))
    return {name: value for name, value in bind(node).items() if name not in unshared}


def depths(program: ir.Program, members: set[fx.Node]) -> dict[fx.Node, int]:
    """Return the number of members on the longest path to each node: members of one depth do not feed each other."""
    depth: dict[fx.Node, int] = {}
    for node in program.graph.nodes:
        depth[node] = max((depth[n] + (n in members) for n in node.all_input_nodes), default=0)
    return depth


def groups(program: ir.Program) -> dict[tuple, list[fx.Node]]:
    """Return the collectives that may be merged, by the properties that they must share."""
    members, place = mergeable(program), places(program)
    by_key: dict[tuple, list[fx.Node]] = {}
    for kinds in (*({op} for op in TOGETHER if op in OF_WEIGHTS), REDUCTIONS):
        candidates = [node for node in members if node.target in kinds]
        depth = depths(program, set(candidates))
        for node in sorted(candidates, key=depth.__getitem__):
            arrives = None if node.target is reshard.all_gather else ir.example(node.args[0]).dtype  # type: ignore
            key = (node.target, depth[node], ir.phase(node), place[node], arrives, *shared_options(node).values())
            by_key.setdefault(key, []).append(node)
    return by_key


# ---- buckets ---------------------------------------------------------------------------------------


def full_bytes(node: fx.Node) -> int:
    """Return the bytes of the full value: a gather's result, or a reduction's operand."""
    full: Tensor = ir.example(node if node.target is reshard.all_gather else node.args[0])  # type: ignore[arg-type]
    return full.numel() * full.element_size()


def split_by_bytes(nodes: Sequence[fx.Node], limit_bytes: float) -> Iterator[list[fx.Node]]:
    """Yield the nodes in order, in runs of at most `limit_bytes` (or of one node)."""
    bucket: list[fx.Node] = []
    for node in nodes:
        if bucket and sum(map(full_bytes, bucket)) + full_bytes(node) > limit_bytes:
            yield bucket
            bucket = []
        bucket.append(node)
    yield bucket


def merge(bucket: list[fx.Node], edit: Editor) -> None:
    """Replace collectives by one; its operands come before it and its users after."""
    operands: list[Any] = [node.args[0] for node in bucket]
    if bucket[0].target in OF_WEIGHTS:
        before = min(bucket)
        for operand in operands:
            move_before(operand, before)
    else:
        before = max(operands).next
        while before.op == "placeholder":
            before = before.next
    per_tensor = {
        f"{name}s": tuple(bind(node)[name] for node in bucket) for name in PER_TENSOR if name in bind(bucket[0])
    }
    options, merged_collective = per_tensor | shared_options(bucket[0]), TOGETHER[bucket[0].target]
    edit, key = edit.moved_to(before, bucket[0]), (merged_collective, *options.items())
    results = edit.trace(lambda *xs: merged_collective(xs, **options), *operands, key=key)
    for node, result in zip(bucket, results, strict=True):
        ir.set_spec(result, ir.spec(node))
        node.replace_all_uses_with(result)
        node.graph.erase_node(node)
        for user in list(result.users):
            move_after(user, result)


# ---- the pass --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bucket(ir.Pass):
    """Merge collectives into buckets of at most `bucket_mib` MiB; 0 merges none."""

    bucket_mib: float = 25.0
    name = "bucket"
    takes = (Stage.JOINT, Stage.STEP)
    gives = Stage.BUCKETED
    keeps = True

    def rewrite(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        if self.bucket_mib < 0:
            raise ir.CompileError("bucket", None, f"passes.communication.bucket_mib is {self.bucket_mib}; must be >= 0")
        before, could_merge = count_collectives(program), False
        notes: list[str] = []
        if before.total():
            program = program.copy()
            edit = Editor(ctx, program.graph)
            by_key = groups(program).values()
            could_merge = any(len(group) > 1 for group in by_key)
            notes = [note for group in by_key for note in self.merge_group(group, edit)]
            program.module.recompile()
        after = count_collectives(program)
        counts = {
            f"{kind}_{when}": counter[kind]
            for kind in map(name_of, TOGETHER)
            for when, counter in (("before", before), ("after", after))
        }
        return program, ir.Report(counts, tuple(notes), effects=tuple(self.effects(before, after, could_merge)))

    def effects(self, before: Counter[str], after: Counter[str], could_merge: bool) -> Iterator[ir.Effect]:
        """Yield the effect if there are collectives; `could_merge` tells if some of them fit in no bucket together."""
        unmet = "no two collectives fit in a bucket of this size; raise it, or set it to 0"
        merged = before.total() - after.total(), "collectives fewer by merging", before.total()
        if before.total():
            is_asked = could_merge and self.bucket_mib > 0
            yield ir.Effect("passes.communication.bucket_mib", *merged, unmet=unmet if is_asked else "")

    def merge_group(self, group: list[fx.Node], edit: Editor) -> Iterator[str]:
        """Merge the group's buckets and yield a note for each."""
        if group[0].target in REDUCTIONS:
            group = sorted(group, key=lambda node: node.args[0])  # type: ignore[arg-type,return-value]
        for bucket in split_by_bytes(group, self.bucket_mib * MIB):
            if len(bucket) > 1:
                first, size_bytes = bucket[0], sum(map(full_bytes, bucket))
                place = ir.source(first) or ir.phase(first)
                yield f"%{first.name} ({place}): {len(bucket)} {name_of(first.target)} as one, {size_bytes} bytes"
                merge(bucket, edit)


def count_collectives(program: ir.Program) -> Counter[str]:
    """Return the number of collectives of each kind in all layers of the program."""
    counts: Counter[str] = Counter()
    for node in program.calls():
        if node.target in TOGETHER:
            counts[name_of(node.target)] += program.times(node)
    return counts


def name_of(op: Any) -> str:
    """Return the name of a collective in reports."""
    return reshard.RESHARD_OPS[op].name
