"""Faults of `passes/update`."""

from __future__ import annotations

from tools.faults.fault import Fault

FAULTS = (
    # optimize.py
    Fault(
        "first_axis_reduced",
        "passes/update/optimize.py",
        "program.mesh.flatten(spec.partial_axes)",
        "program.mesh.flatten(spec.partial_axes)[:1]",
        "Gradients are summed over the first of their axes only.",
    ),
    Fault(
        "gradients_summed_twice",
        "passes/update/optimize.py",
        "    for axis in axes:\n        gradient",
        "    for axis in (*axes, *axes):\n        gradient",
        "Gradients are summed over their axes once more.",
    ),
    Fault(
        "norm_lacks_an_axis",
        "passes/update/optimize.py",
        "        for axis in axes:",
        "        for axis in axes[:1]:",
        "The clip norm is that of the shards of one axis.",
    ),
    Fault(
        "norm_of_sum_of_microbatches",
        "passes/update/optimize.py",
        "lambda s: s.sqrt() * self.scale, square",
        "lambda s: s.sqrt(), square",
        "The clip norm is that of the sum over microbatches, not of their mean.",
    ),
    Fault(
        "clip_grows",
        "passes/update/optimize.py",
        "(self.max_norm / (n + 1e-6)).clamp(max=1.0)",
        "(self.max_norm / (n + 1e-6))",
        "Small gradients are scaled up to the clip norm.",
    ),
    Fault(
        "clip_eps_lost",
        "passes/update/optimize.py",
        "(self.max_norm / (n + 1e-6)).clamp(max=1.0)",
        "(self.max_norm / n).clamp(max=1.0)",
        "Clipping divides by the norm itself, not by a little more.",
    ),
    Fault(
        "accumulators_not_cleared",
        "passes/update/optimize.py",
        'append.write(total, append.trace(torch.zeros_like, total, key="clear"))',
        "pass",
        "Gradients of all steps add up.",
    ),
    Fault(
        "step_counted_late",
        "passes/update/optimize.py",
        'append.trace(lambda s: s + 1, step, key="count")',
        'append.trace(lambda s: s + 0, step, key="count")',
        "The bias of the first step is that of no step.",
    ),
    Fault(
        "buffers_not_stored",
        "passes/update/optimize.py",
        "append.keep(given[output.name], node)",
        "pass",
        "New values of buffers are thrown away.",
    ),
    Fault(
        "rate_of_all",
        "passes/update/optimize.py",
        "cast(lr, dtype) * group.lr if group.lr != 1",
        "cast(lr, dtype) if group.lr != 1",
        "All groups learn at one rate.",
    ),
    # update.py
    Fault(
        "rounded_down",
        "passes/update/update.py",
        "(uniform_at(index, step.to(torch.int64), site) * 2**16)",
        "(uniform_at(index, step.to(torch.int64), site) * 2**15)",
        "Random rounding goes down more often than up.",
    ),
    # accumulate.py
    Fault(
        "last_microbatch_only",
        "passes/update/accumulate.py",
        'append.trace(torch.add, total, node, key="add")',
        'append.trace(lambda total, new: new.clone(), total, node, key="add")',
        "An accumulator holds the last microbatch's gradient.",
    ),
    Fault(
        "buffers_not_accumulated",
        "passes/update/accumulate.py",
        "append.keep(buffers[output.name], node)",
        "pass",
        "New values of buffers are thrown away where there are microbatches.",
    ),
    # defer.py
    Fault(
        "one_axis_completed",
        "passes/update/defer.py",
        "for axis in mesh.flatten(left):",
        "for axis in mesh.flatten(left)[1:]:",
        "One of the sums that were left to the update is never taken.",
    ),
    Fault(
        "terms_in_their_own_dtype",
        "passes/update/defer.py",
        "if ir.example(term).dtype == dtype:",
        "if True:",
        "Terms of a gradient are added up in the dtype in which they were computed.",
    ),
    # appender.py
    Fault(
        "guard_is_turned",
        "passes/update/appender.py",
        "return torch.where(guard, new, old)",
        "return torch.where(guard, old, new)",
        "Updates are left out in the steps that have a finite gradient.",
    ),
    Fault(
        "guard_not_asked",
        "passes/update/appender.py",
        "if self.guard is not None:",
        "if False:",
        "An update is never left out.",
    ),
    # moments.py
    Fault(
        "scale_of_signed",
        "passes/update/moments.py",
        "largest = blocks.abs().amax(-1).clamp(min=TINY)",
        "largest = blocks.amax(-1).clamp(min=TINY)",
        "The scale of a block of moments is its largest, not its largest magnitude.",
    ),
    Fault(
        "blocks_of_other_rows",
        "passes/update/moments.py",
        "if factor.size % block == 0 and factor.local(mesh) % block == 0:",
        "if factor.size % block == 0:",
        "Blocks of moments go across the rows of two ranks.",
    ),
    # optimizers.py
    Fault(
        "second_moment_unbiased_once",
        "passes/update/optimizers.py",
        "lr / (1 - beta1**step), 1 - beta2**step",
        "lr / (1 - beta1**step), 1 - beta2",
        "The bias of the second moment is always that of the first step.",
    ),
    Fault(
        "eps_under_the_root",
        "passes/update/optimizers.py",
        "((v / correction).sqrt() + self.eps)",
        "(v / correction + self.eps).sqrt()",
        "Eps is added to the second moment, not to its root.",
    ),
    Fault(
        "decay_without_lr",
        "passes/update/optimizers.py",
        "return 1 - lr * self.weight_decay, lr",
        "return 1 - self.weight_decay, lr",
        "Weight decay does not go with the learning rate.",
    ),
    Fault(
        "momentum_damped",
        "passes/update/optimizers.py",
        "self.momentum * moment + gradient for",
        "self.momentum * moment + (1 - self.momentum) * gradient for",
        "Momentum is an average, not a sum.",
    ),
    Fault(
        "real_part_alone",
        "passes/update/optimizers.py",
        "torch.view_as_real(x.resolve_conj()) if x.is_complex()",
        "torch.stack([x.real, 0 * x.real], -1) if x.is_complex()",
        "Of complex weights the real part alone is trained.",
    ),
    # muon.py
    Fault(
        "shards_made_orthogonal",
        "passes/update/muon.py",
        "x = convert(append, mesh, x, held, mine, coordinates)",
        "pass",
        "Every rank makes its shard of a weight orthogonal, not the whole.",
    ),
    Fault(
        "momentum_behind",
        "passes/update/muon.py",
        "return gradient + self.momentum * (moment - gradient), (moment,)",
        "return moment, (moment,)",
        "Muon goes along its momentum, not a step ahead.",
    ),
    Fault(
        "size_of_the_shorter_side",
        "passes/update/muon.py",
        "math.sqrt(max(rows, columns))",
        "math.sqrt(min(rows, columns))",
        "An orthogonal update is as large as the shorter side says.",
    ),
    # groups.py
    Fault(
        "last_group_counts",
        "passes/update/groups.py",
        "next((group for group in groups if group.holds(given))",
        "next((group for group in reversed(groups) if group.holds(given))",
        "Of the groups that hold a parameter the last counts.",
    ),
)
