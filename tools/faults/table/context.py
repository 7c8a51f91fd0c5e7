"""Faults of `passes/context`."""

from __future__ import annotations

from tools.faults.fault import Fault

FAULTS = (
    # ring.py
    Fault(
        "merge_by_maximum",
        "passes/context/kernels.py",
        "lse = torch.logaddexp(a[1], b[1])",
        "lse = torch.maximum(a[1], b[1])",
        "Results of two sets of keys are weighted as if the larger stood for both.",
    ),
    Fault(
        "merge_of_nothing",
        "passes/context/kernels.py",
        "base = torch.where(lse > -math.inf, lse, 0.0)",
        "base = lse",
        "A row that has seen nothing yet becomes NaN.",
    ),
    Fault(
        "ring_lower_forward",
        "passes/context/ring.py",
        "            lower = axis_index >= step\n"
        "            (k0, k1)",
        "            lower = axis_index > step\n"
        "            (k0, k1)",
        "At a step round the ring the rank that comes next is taken for a higher one.",
    ),
    Fault(
        "ring_tail_twice",
        "passes/context/ring.py",
        "along_q[0] = along_q[0] + torch.where(lower, either, 0.0)",
        "along_q[0] = along_q[0] + either",
        "Queries at the head get also gradients of the tail.",
    ),
    Fault(
        "ring_mask_of_next",
        "passes/context/ring.py",
        "source = torch.remainder(axis_index - step, self.axis_size).reshape(1)",
        "source = torch.remainder(axis_index + step, self.axis_size).reshape(1)",
        "A mask is that of the ranks after, not before.",
    ),
    Fault(
        "ring_padding_seen",
        "passes/context/ring.py",
        "full, last = F.pad(mask, [0, padding], value=-math.inf), 3",
        "full, last = F.pad(mask, [0, padding], value=0.0), 3",
        "Keys that are padding are seen.",
    ),
    Fault(
        "home_by_one",
        "passes/context/ring.py",
        "self.coming = self.ring.send(flat, step, self.hops, home=True)",
        "self.coming = shift(flat, self.ring.axis, 1)",
        "Gradients go home one rank a step also where steps are left out.",
    ),
    Fault(
        "halves_both",
        "passes/context/ring.py",
        "torch.cat([head + torch.where(lower, either, 0.0), torch.where(lower, 0.0, either)], 2)",
        "torch.cat([head + torch.where(lower, either, 0.0), either], 2)",
        "Keys at the tail get also gradients of the head.",
    ),
    Fault(
        "ring_last_step_only",
        "passes/context/ring.py",
        "Block(False, self.scale, at(step)))\n            along_q = along_q + found[0]",
        "Block(False, self.scale, at(step)))\n            along_q = found[0]",
        "Gradients of queries are those of the last step.",
    ),
    Fault(
        "interval_runs_in_place",
        "passes/context/ring.py",
        "starts.index_select(0, torch.remainder(axis_index - step, self.axis_size).view(1))",
        "starts.index_select(0, torch.remainder(axis_index, self.axis_size).view(1))",
        "Keys that came from another rank are taken to lie where the rank's own do.",
    ),
    Fault(
        "interval_tails_forward",
        "passes/program/layout.py",
        "torch.stack([axis_index, 2 * parts - 1 - axis_index] if zigzag else [axis_index], 1) * chunk",
        "torch.stack([axis_index, parts + axis_index] if zigzag else [axis_index], 1) * chunk",
        "Tails of a zigzag are taken to lie in rising order.",
    ),
    Fault(
        "interval_ends_early",
        "passes/context/interval_cpu.py",
        "yield Tile(rows, slice(first, last - 1))",
        "yield Tile(rows, slice(first, last - 2))",
        "Queries of a chunk miss the last key before their own.",
    ),
    Fault(
        "mask_window_one_more",
        "passes/context/masks.py",
        "{operator.ge: 0, operator.gt: 1, operator.le: 1, operator.lt: 0}[compare]",
        "{operator.ge: 0, operator.gt: 0, operator.le: 1, operator.lt: 0}[compare]",
        "A bound that leaves out its number lets it in.",
    ),
    Fault(
        "mask_any_ids_stand_together",
        "passes/context/masks.py",
        "elif not counts_up(node):",
        "elif False:",
        "Ids whose equal entries need not stand together are taken for documents.",
    ),
    Fault(
        "ring_scale_lost",
        "passes/context/ring.py",
        "kernels.backward(gradient, q, key, value, out, lse, Block(False, self.scale, at(step)))",
        "kernels.backward(gradient, q, key, value, out, lse, Block(False, None, at(step)))",
        "The backward of a masked ring forgets a scale of its own.",
    ),
    # kernels.py
    Fault(
        "blind_rows_weighted",
        "passes/context/kernels.py",
        "lse = torch.where(sees, lse, -math.inf)",
        "lse = torch.where(sees, lse, 0.0)",
        "A row that sees none of a block's keys counts as if it saw one.",
    ),
    # balance.py
    Fault(
        "block_lost",
        "passes/context/balance.py",
        "table[busy, i], table[idle, j] = int(table[idle, j]), int(table[busy, i])",
        "table[busy, i], mine = int(table[idle, j]), work[table]",
        "Of two blocks that ranks exchange one is then on both, the other on none.",
    ),
    Fault(
        "needed_the_other_way",
        "passes/context/balance.py",
        "needed = sorted({0, *((i // inner - j // inner) % places for i, j in meet.nonzero().tolist())})",
        "needed = sorted({0, *((j // inner - i // inner) % places for i, j in meet.nonzero().tolist())})",
        "A ring skips steps that it would not need the other way round.",
    ),
    # sdpa.py, call.py
    Fault(
        "gathered_mask_strict",
        "passes/context/sdpa.py",
        "return index[:, None] >= torch.arange(factor.size, device=device)",
        "return index[:, None] > torch.arange(factor.size, device=device)",
        "Under gathered attention no query sees its own key.",
    ),
    Fault(
        "steps_the_other_way",
        "passes/context/call.py",
        "(i // inner - j // inner) % parts for i, j in self.pairs",
        "(j // inner - i // inner) % parts for i, j in self.pairs",
        "The steps left out of a ring are those of the other way round.",
    ),
    Fault(
        "steps_of_first_pair",
        "passes/context/call.py",
        "return tuple(sorted({0, *apart}))",
        "return (0, *sorted(apart)[:1])",
        "A ring stops after the first step at which anything is seen.",
    ),
    # rules: sdpa.py, attention.py, interval.py
    Fault(
        "heads_minor_first",
        "passes/context/sdpa.py",
        'heads: Names = ("g", "r") if rank',
        'heads: Names = ("r", "g") if rank',
        "Query heads are taken to repeat in turn, not in groups.",
    ),
    Fault(
        "interval_heads_minor_first",
        "passes/context/attention.py",
        'heads: Names = ("g", "r") if h',
        'heads: Names = ("r", "g") if h',
        "Query heads of attention by interval are taken to repeat in turn, not in groups.",
    ),
    Fault(
        "interval_padding_sees",
        "passes/context/interval.py",
        ", pad_safe={3: 0.0, 4: 0.0})",
        ")",
        "Queries that are padding see keys, as their bounds are of any content.",
    ),
    Fault(
        "heads_repeated_in_turn",
        "passes/context/attention.py",
        "return x.unsqueeze(-3).expand(*lead, heads, groups, rows, width)",
        "return x.unsqueeze(-4).expand(*lead, groups, heads, rows, width)",
        "Key heads are repeated in turn, not in groups.",
    ),
    Fault(
        "blind_rows_see_all",
        "passes/context/sdpa.py",
        "return drop(torch.where(mask, weights, 0.0), dropout_p) @ v",
        "return drop(weights, dropout_p) @ v",
        "A row that may see nothing sees all keys alike where attention drops out.",
    ),
)
