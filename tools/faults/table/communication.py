"""Faults of `passes/communication`."""

from __future__ import annotations

from tools.faults.fault import Fault

FAULTS = (
    # async_tp.py, ring_products.py
    Fault(
        "async_tp_other_matrices",
        "passes/communication/async_tp.py",
        "beside, axis_index], [*products, *more], ctx)",
        "beside, axis_index], [*products[::-1], *more], ctx)",
        "Of products that share a gathered value each has the result of another.",
    ),
    Fault(
        "async_tp_of_a_term",
        "passes/communication/async_tp.py",
        "return [term for operand in node.all_input_nodes for term in terms_of(operand)]",
        "return terms_of(node.all_input_nodes[0])",
        "Of products that are added before they are reduced one is left out.",
    ),
    Fault(
        "ring_shards_in_another_order",
        "passes/communication/ring_products.py",
        "steps = torch.remainder(axis_index - self.places(axis_index), self.axis_size)",
        "steps = torch.remainder(self.places(axis_index) - axis_index, self.axis_size)",
        "Rows of what was gathered lie in the order of the ring the other way around.",
    ),
    Fault(
        "ring_terms_to_another_rank",
        "passes/communication/ring_products.py",
        "ranks = torch.remainder(axis_index + 1 + self.places(axis_index), self.axis_size)",
        "ranks = torch.remainder(axis_index + self.places(axis_index), self.axis_size)",
        "Terms of a sum are sent to the rank after the one whose they are.",
    ),
    Fault(
        "ring_reads_what_travels",
        "passes/communication/ring_products.py",
        "x = x if coming is None else arrive(coming, x)",
        "x = x if coming is None else coming",
        "A shard is multiplied before it has arrived.",
    ),
    # batch_overlap.py, take_turns.py
    Fault(
        "microbatches_read_old_buffers",
        "passes/communication/batch_overlap.py",
        "            elif node not in self.changed:",
        "            else:",
        "A microbatch reads a buffer as it was before the one before it.",
    ),
    Fault(
        "microbatches_draw_alike",
        "passes/communication/batch_overlap.py",
        'return given.kind == "batch" or given.kind == "scalar" and entry_of(given) == SEED',
        'return given.kind == "batch"',
        "Microbatches of one program have the same random numbers.",
    ),
    Fault(
        "microbatches_share_functions",
        "passes/communication/batch_overlap.py",
        "if function_of(node) or not self.own.isdisjoint(node.all_input_nodes):",
        "if not self.own.isdisjoint(node.all_input_nodes):",
        "A custom function of weights goes back once from the sum of the microbatches' gradients.",
    ),
    Fault(
        "microbatches_lose_averaged",
        "passes/communication/batch_overlap.py",
        '"loss": total,',
        '"loss": mean,',
        "The loss of a program of several microbatches, and each gradient, is one of them, not of their sum.",
    ),
    Fault(
        "turns_across_writes",
        "passes/communication/take_turns.py",
        "                needs[read[base][0]] = None",
        "                pass",
        "What is read after a write in place may come before it.",
    ),
    # cse.py
    Fault(
        "cse_across_writes",
        "passes/communication/cse.py",
        "for node in takewhile(lambda node: not writes_input(node), list(program.calls())):",
        "for node in list(program.calls()):",
        "What is read after a write in place is taken for what was read before.",
    ),
    Fault(
        "cse_ignores_arguments",
        "passes/communication/cse.py",
        "signature(node.args), signature(node.kwargs)",
        "tuple(node.all_input_nodes), tuple(ir.example(node).shape) if ir.is_tensor(node) else node",
        "Operators on the same operands that differ in another argument are taken for the same.",
    ),
    Fault(
        "cse_ignores_keywords",
        "passes/communication/cse.py",
        "signature(node.args), signature(node.kwargs)",
        "signature(node.args)",
        "Operators that differ in a keyword are taken for the same.",
    ),
    Fault(
        "cse_ignores_types",
        "passes/communication/cse.py",
        "(type(tree), tree)",
        "(tree,)",
        "1, 1.0 and True are taken for the same argument.",
    ),
    Fault(
        "cse_draws_once",
        "passes/communication/cse.py",
        "return not is_mutable(node) and not is_random(node)",
        "return not is_mutable(node)",
        "Random operators on the same operands draw once.",
    ),
    Fault(
        "cse_across_phases",
        "passes/communication/cse.py",
        "ir.layer(node), ir.phase(node), signature",
        "ir.layer(node), signature",
        "The backward uses what the forward computed, which then is kept.",
    ),
    # reassociate.py
    Fault(
        "reassociate_over_any_axis",
        "passes/communication/reassociate.py",
        "a.args[1:] == b.args[1:]",
        "a.args[:0] == b.args[:0]",
        "Sums over different axes are added before they are reduced.",
    ),
    Fault(
        "reassociate_ignores_alpha",
        "passes/communication/reassociate.py",
        "aten.add.Tensor or node.kwargs or len",
        "aten.add.Tensor or len",
        "A scaled addition loses its scale.",
    ),
    # bucket.py
    Fault(
        "bucket_across_writes",
        "passes/communication/bucket.py",
        "        if writes_input(node):\n"
        "            break",
        "        if writes_input(node):\n"
        "            continue",
        "Collectives are merged across writes into inputs.",
    ),
    Fault(
        "bucket_ignores_depth",
        "passes/communication/bucket.py",
        "key = (node.target, depth[node], ir.phase(node), place",
        "key = (node.target, ir.phase(node), place",
        "A collective is merged with one that feeds it.",
    ),
    Fault(
        "bucket_after_first_operand",
        "passes/communication/bucket.py",
        "before = max(operands).next",
        "before = min(operands).next",
        "Merged sums start before all that they add is there.",
    ),
    # bucketed.py
    Fault(
        "bucket_interleaved",
        "passes/communication/bucketed.py",
        "axis_size * flat.numel(), dtype, None).view(axis_size, -1)",
        "axis_size * flat.numel(), dtype, None).view(-1, axis_size).t()",
        "Shards gathered together are cut apart by columns for rows.",
    ),
    Fault(
        "bucket_end_to_end",
        "passes/communication/bucketed.py",
        "flat = torch.cat([x.reshape(axis_size, -1) for x in full], 1).view(-1)",
        "flat = torch.cat([x.reshape(-1) for x in full])",
        "Ranks get whole gradients instead of their share of each.",
    ),
    Fault(
        "bucket_cut_early",
        "passes/communication/bucketed.py",
        "pieces = local.split([x.numel() // axis_size for x in full])",
        "pieces = local.roll(1).split([x.numel() // axis_size for x in full])",
        "What gradients summed together become is cut apart an entry too early.",
    ),
    # overlap.py
    Fault(
        "early_across_writes",
        "passes/communication/overlap.py",
        "unwritten = takewhile(lambda node: not writes_input(node), order.calls())",
        "unwritten = order.calls()",
        "Gathers of what a step has written start before the write.",
    ),
    Fault(
        "late_across_writes",
        "passes/communication/overlap.py",
        "            written[node.args[0]] = node  # type: ignore[index]\n",
        "            pass\n",
        "What a collective reads is overwritten before it is waited for.",
    ),
    Fault(
        "waits_for_last_user",
        "passes/communication/overlap.py",
        "order.put_before(node, order.first(end, latest.get(node, end), *barriers, *node.users))",
        "order.put_before(node, max(latest.get(node, node), *barriers, *node.users, key=order.place.__getitem__))",
        "A result is used before it is waited for.",
    ),
    Fault(
        "moved_gradients_are_waited_for",
        "passes/communication/overlap.py",
        "return leaves(product, self.tails) and not any(node.target in WAITS for node in following)",
        "return leaves(product, self.tails)",
        "A gradient that is computed later is waited for where it is sent.",
    ),
    Fault(
        "sunk_past_writes",
        "passes/communication/overlap.py",
        "            if is_mutable(node) and base_of(node.args[0]) in read:",
        "            if False:",
        "What is on its way, or read beside it, is overwritten.",
    ),
    Fault(
        "earlier_across_writes",
        "passes/communication/overlap.py",
        "if is_mutable(node) and base_of(node.args[0]) in map(base_of, needed):",
        "if False:",
        "What a collective sends is read before it is written.",
    ),
)
