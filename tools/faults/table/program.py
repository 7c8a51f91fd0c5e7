"""Faults of `passes/program`."""

from __future__ import annotations

from tools.faults.fault import Fault

FAULTS = (
    # reshard.py
    Fault(
        "all_gather_keeps_padding",
        "passes/program/reshard.py",
        "return received(full, dtype).narrow(0, 0, size).movedim(0, dim)",
        "return received(full, dtype).movedim(0, dim)",
        "A gather returns also the padding of the last shard.",
    ),
    Fault(
        "psum_gradient_summed",
        "passes/program/reshard.py",
        "gradient=lambda g, x, a: g.to(x.dtype),",
        "gradient=lambda g, x, a: psum(g, a.axis, x.dtype, a.reduce_dtype).to(x.dtype),",
        "The gradient of a sum is summed once more.",
    ),
    Fault(
        "replicate_gradient_kept",
        "passes/program/reshard.py",
        "gradient=lambda g, x, a: psum(g, a.axis, x.dtype, a.reduce_dtype),",
        "gradient=lambda g, x, a: g,",
        "The gradient of a replicate copy lacks the other ranks' terms.",
    ),
    Fault(
        "replicate_to_invariant_gradient_everywhere",
        "passes/program/reshard.py",
        "gradient=lambda g, x, a: invariant_to_partial(g, a.axis_index, a.axis),",
        "gradient=lambda g, x, a: g.clone(),",
        "Every rank has the gradient that only the first should count.",
    ),
    Fault(
        "invariant_to_partial_gradient_masked",
        "passes/program/reshard.py",
        "gradient=lambda g, x, a: g,",
        "gradient=lambda g, x, a: invariant_to_partial(g, a.place, a.axis),",
        "The gradient of a term of a sum is zero on all ranks but the first.",
    ),
    Fault(
        "shard_to_partial_reversed",
        "passes/program/reshard.py",
        "mine = torch.arange(axis_size, device=x.device) == axis_index",
        "mine = torch.arange(axis_size, device=x.device).flip(0) == axis_index",
        "A shard is put where the rank at the other end of the axis has its own.",
    ),
    Fault(
        "invariant_to_shard_strided",
        "passes/program/reshard.py",
        "unflatten(dim, (axis_size, -1)).index_select(dim, axis_index.reshape(1)).squeeze(dim)",
        "unflatten(dim, (-1, axis_size)).index_select(dim + 1, axis_index.reshape(1)).squeeze(dim + 1)",
        "A rank takes every n-th entry instead of a run.",
    ),
    Fault(
        "all_to_all_interleaved",
        "passes/program/reshard.py",
        ".view(pieces.shape).movedim(0, concat_dim).flatten(concat_dim, concat_dim + 1)",
        ".view(pieces.shape).movedim(0, concat_dim + 1).flatten(concat_dim, concat_dim + 1)",
        "What comes from the ranks is interleaved, not laid end to end.",
    ),
    Fault(
        "all_to_all_gradient_same_way",
        "passes/program/reshard.py",
        "all_to_all(g, a.concat_dim, a.split_dim, x.shape[a.split_dim],",
        "all_to_all(g, a.split_dim, a.concat_dim, x.shape[a.concat_dim],",
        "The gradient of an exchange goes the same way as its value.",
    ),
    Fault(
        "pmax_sums",
        "passes/program/reshard.py",
        'c10d.all_reduce(x.contiguous(), "max", axis)',
        'c10d.all_reduce(x.contiguous(), "sum", axis)',
        "A maximum over ranks is a sum.",
    ),
    Fault(
        "reduce_scatter_ignores_dtype",
        "passes/program/reshard.py",
        "full = pad(_terms(x, reduce_dtype), dim, axis_size)",
        "full = pad(_terms(x, None), dim, axis_size)",
        "Gradients are added in their own dtype, not in the one asked for.",
    ),
    # layout.py
    Fault(
        "entries_tail_off_by_one",
        "passes/program/layout.py",
        "            chunk = torch.where(tail, 2 * mesh[axis] - 1 - axis_index, axis_index)\n"
        "            index = chunk * half + index",
        "            chunk = torch.where(tail, 2 * mesh[axis] - 2 - axis_index, axis_index)\n"
        "            index = chunk * half + index",
        "The tail of a zigzag is taken for the chunk before it.",
    ),
    Fault(
        "entries_end_is_valid",
        "passes/program/layout.py",
        "valid = valid & (index < size)",
        "valid = valid & (index <= size)",
        "The first entry of padding counts as valid.",
    ),
    Fault(
        "locate_no_lower_bound",
        "passes/program/layout.py",
        "mine = mine & (index >= 0) & (index < held)",
        "mine = mine & (index < held)",
        "Indices of ranks before this one count as its own.",
    ),
    Fault(
        "rank_order_tails_forward",
        "passes/program/layout.py",
        "return torch.stack([heads, tails.flip(dim)], dim + 1).flatten(dim, dim + 2)",
        "return torch.stack([heads, tails], dim + 1).flatten(dim, dim + 2)",
        "Ranks of a zigzag get their tails in rising order.",
    ),
    Fault(
        "natural_order_tails_forward",
        "passes/program/layout.py",
        "return torch.stack([heads, tails.flip(dim)], dim).flatten(dim, dim + 2).narrow(dim, 0, size)",
        "return torch.stack([heads, tails], dim).flatten(dim, dim + 2).narrow(dim, 0, size)",
        "Tails gathered of a zigzag stay in the ranks' order.",
    ),
    Fault(
        "entries_of_the_first_rank",
        "passes/program/layout.py",
        "return coordinates[BLOCKS].index_select(0, coordinates[axis].view(1)).view(-1)",
        "return coordinates[BLOCKS].index_select(0, coordinates[axis].view(1) * 0).view(-1)",
        "Each rank takes its blocks to be those of the first.",
    ),
    Fault(
        "blocks_put_back_as_they_were_taken",
        "passes/program/layout.py",
        "order = table.flatten().argsort()",
        "order = table.flatten()",
        "Blocks are gathered into the order that the table has, not into the inverse.",
    ),
    # order.py
    Fault(
        "table_of_the_rank_before",
        "passes/program/order.py",
        "return self.table[axis_index]",
        "return self.table[axis_index - 1]",
        "Ranks are fed the blocks of another than the program takes them to have.",
    ),
    # shift.py
    Fault(
        "hop_too_many",
        "passes/program/shift.py",
        "return by % axis_size if home or step + by < axis_size else 0",
        "return (by + 1) % axis_size if home or step + by < axis_size else 0",
        "Keys and gradients travel a rank further than the next step that is needed.",
    ),
    Fault(
        "shift_backwards",
        "passes/program/shift.py",
        "there, back = (rank + by) % axis_size, (rank - by) % axis_size",
        "there, back = (rank - by) % axis_size, (rank + by) % axis_size",
        "Between processes keys travel the other way round the ring.",
    ),
    Fault(
        "arrive_does_not_wait",
        "passes/program/shift.py",
        "            work.wait()",
        "            work.is_completed()",
        "What is on its way is read before it is there.",
    ),
    # spec.py
    Fault(
        "share_rounds_down",
        "passes/program/spec.py",
        "return -(-size // self.pieces(axis, mesh)) * self.order_over(axis).chunks",
        "return size // self.pieces(axis, mesh) * self.order_over(axis).chunks",
        "Shards of an uneven dim lack its last entries.",
    ),
    Fault(
        "padded_ignores_folds",
        "passes/program/spec.py",
        "return any(size % self.pieces(axis, mesh) for axis, size in self.shards(mesh))",
        "return any(size % mesh[axis] for axis, size in self.shards(mesh))",
        "A dim that divides by the ranks but not by their chunks seems to have no padding.",
    ),
    Fault(
        "gradient_placed_like_value",
        "passes/program/spec.py",
        'return replace(self, partial=tuple((axis, "sum") for axis in self.replicate), replicate=self.partial_axes)',
        "return self",
        "The gradient of a replicate copy is not known to be a sum.",
    ),
    Fault(
        "unshard_adds_maxima",
        "passes/program/spec.py",
        'elif dict(spec.partial).get(spec.partial_axes[0]) == "max":',
        'elif dict(spec.partial).get(spec.partial_axes[0]) == "sum":',
        "Terms of sums and of maxima are confused where a whole value is put together.",
    ),
    # routed.py
    Fault(
        "padding_is_counted",
        "passes/program/routed.py",
        "return (ids[:, :, None] <= torch",
        "return (ids[:, :, None] % groups <= torch",
        "Rows of padding count as the first expert's.",
    ),
    Fault(
        "part_counts_from_the_first",
        "passes/program/routed.py",
        "ends = (ends.clamp(max=how.capacity) - how.part + how.parts - 1) // how.parts",
        "ends = (ends.clamp(max=how.capacity) + how.parts - 1) // how.parts",
        "A chunk of rows counts a place too many of an expert where they do not divide.",
    ),
    # ir.py
    Fault(
        "complex_is_constant",
        "passes/program/ir.py",
        "return example(node).is_floating_point() or example(node).is_complex()",
        "return example(node).is_floating_point()",
        "A complex weight is a full copy whose gradient nobody adds up.",
    ),
)
