"""Faults of `passes/memory`."""

from __future__ import annotations

from tools.faults.fault import Fault

FAULTS = (
    # recompute.py
    Fault(
        "clones_of_kept",
        "passes/memory/recompute.py",
        "new = node.graph.node_copy(node, lambda n: clones.get(n, n))",
        "new = node.graph.node_copy(node, lambda n: n)",
        "What is computed again is computed from values that should not be kept.",
    ),
    Fault(
        "clones_of_operands",
        "passes/memory/recompute.py",
        "            clones[node] = clone(node, user, clones)\n",
        "            clones[node] = clone(node, user, clones)\n"
        "            first = clones[node].all_input_nodes[:1]\n"
        "            if first and repr(ir.value(first[0])) == repr(ir.value(node)):\n"
        "                clones[node] = first[0]\n",
        "In place of what is computed again stands its operand, where both are of one shape.",
    ),
    Fault(
        "random_twice",
        "passes/memory/recompute.py",
        'return "random" if is_random(node) else ""',
        'return ""',
        "Random operators are computed again and draw anew.",
    ),
    Fault(
        "writes_forgotten",
        "passes/memory/recompute.py",
        "return holders | {user for node in holders for user in node.users}",
        "return holders",
        "What reads memory that is written in place is computed again.",
    ),
    Fault(
        "sums_twice",
        "passes/memory/recompute.py",
        "if kind_of(node) or communicates(node) or",
        'if kind_of(node) not in (None, "all_reduce") or communicates(node) or',
        "Sums over ranks travel again in the backward.",
    ),
    # remat.py
    Fault(
        "layers_run_together",
        "passes/memory/remat.py",
        'once or ("leaves its region" if leaves(node, region) else "") or reason',
        "once or reason",
        "What enters a layer is not kept either.",
    ),
    # chunk_loss.py
    Fault(
        "loss_without_its_bias",
        "passes/memory/chunk_loss.py",
        "    found.bias = bias\n    return True",
        "    return True",
        "A head whose loss is in chunks loses its bias.",
    ),
    Fault(
        "mean_over_all_labels",
        "passes/memory/chunk_loss.py",
        "return total / (ids != ignored).sum() if reduction == MEAN else total",
        "return total / len(ids) if reduction == MEAN else total",
        "A loss in chunks is averaged over ignored labels, too.",
    ),
    Fault(
        "slices_of_tokens_forgotten",
        "passes/memory/chunk_loss.py",
        "        found.taken.append(node)",
        "        pass",
        "A loss in chunks takes tokens that the model leaves out.",
    ),
    # chunked.py
    Fault(
        "soft_cap_straight",
        "passes/memory/chunked.py",
        "return y, lambda gradient: gradient * (1 - y * y)",
        "return y, lambda gradient: gradient",
        "The gradient of a soft-cap on logits is that of the logits.",
    ),
    Fault(
        "classes_of_padding",
        "passes/memory/chunked.py",
        "value = torch.where(ids >= 0, value, -math.inf)",
        "value = torch.where(ids >= 0, value, 0.0)",
        "Padding of the vocabulary counts as classes.",
    ),
    Fault(
        "lse_of_own_classes",
        "passes/memory/chunked.py",
        "lse = self.over_all(value.logsumexp(1))",
        "lse = value.logsumexp(1)",
        "Ranks that share the vocabulary take the softmax over their own classes each.",
    ),
    Fault(
        "lse_from_each_rank",
        "passes/memory/chunked.py",
        "torch.where(counts, lse, 0.0).sum() / self.shares",
        "torch.where(counts, lse, 0.0).sum()",
        "Ranks that share the vocabulary count the log-sum-exp once each.",
    ),
    Fault(
        "ignored_labels_learn",
        "passes/memory/chunked.py",
        "slope = torch.where(counts.unsqueeze(1), (value - lse.unsqueeze(1)).exp(), 0.0)",
        "slope = (value - lse.unsqueeze(1)).exp()",
        "In a loss in chunks ignored labels have a gradient.",
    ),
    Fault(
        "labels_of_padding",
        "passes/memory/chunked.py",
        "labels = builder.fill_padding(labels, specs[2], float(ignored))",
        "labels = builder.fill_padding(labels, specs[2], 0.0)",
        "In a loss in chunks tokens that are padding count.",
    ),
    Fault(
        "last_chunk_only",
        "passes/memory/chunked.py",
        "(before + term for before, term in zip(sums, (loss, *terms), strict=True))",
        "(term for before, term in zip(sums, (loss, *terms), strict=True))",
        "Loss and gradient of the weight are those of the last chunk.",
    ),
    # chunked_tokens.py
    Fault(
        "tokens_count_alike",
        "passes/memory/chunked_tokens.py",
        "slope = self.slope(value, lse, *self.labelled(y, ids)) * slopes.unsqueeze(1)",
        "slope = self.slope(value, lse, *self.labelled(y, ids))",
        "In losses by token in chunks each token's gradient counts once, whatever becomes of its loss.",
    ),
    Fault(
        "lse_of_a_token_from_each_rank",
        "passes/memory/chunked_tokens.py",
        "torch.where(counts, lse, 0.0) / self.shares",
        "torch.where(counts, lse, 0.0)",
        "In losses by token ranks that share the vocabulary count the log-sum-exp once each.",
    ),
    Fault(
        "last_chunk_of_tokens_only",
        "passes/memory/chunked_tokens.py",
        "(before + term for before, term in zip(sums, terms, strict=True))",
        "(term for before, term in zip(sums, terms, strict=True))",
        "The gradient of the weight is that of the last chunk of tokens.",
    ),
)
