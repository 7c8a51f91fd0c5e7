"""Faults of `passes/sharding`."""

from __future__ import annotations

from tools.faults.fault import Fault

FAULTS = (
    # propagate.py
    Fault(
        "carried_beside_shards",
        "passes/sharding/propagate.py",
        "return used_once and sums and choice[axis] is None and frozenset",
        "return used_once and sums and frozenset",
        "A partial sum is carried into an operator that shards another operand on the axis.",
    ),
    Fault(
        "copies_not_replicate",
        "passes/sharding/propagate.py",
        "elif choice[axis] is not None or self.mixed(states[axis]):",
        "elif choice[axis] is not None:",
        "An invariant copy that meets a replicate one stays invariant.",
    ),
    Fault(
        "results_not_replicate",
        "passes/sharding/propagate.py",
        "            elif self.mixed(states[axis]):\n",
        "            elif self.mixed(states[axis]) and len(states[axis]) > 1:\n",
        "A function of a replicate copy is taken for invariant.",
    ),
    Fault(
        "reduced_by_atom",
        "passes/sharding/propagate.py",
        "how = atoms.rule.reduced.get(atoms.origin(atom))",
        "how = atoms.rule.reduced.get(atom)",
        "A part of a summed factor is not known to be summed.",
    ),
    Fault(
        "weights_move_on_tp",
        "passes/sharding/propagate.py",
        "stays = any(is_weight[i] == (axis in WEIGHT_AXES) for i in found[atom])",
        "stays = any(is_weight[i] != (axis in WEIGHT_AXES) for i in found[atom])",
        "Weights move where activations should, and the other way round.",
    ),
    Fault(
        "sequence_of_any_axis",
        "passes/sharding/propagate.py",
        "if choice[axis] is None and axis in WEIGHT_AXES and self.sequence_parallel:",
        "if choice[axis] is None and self.sequence_parallel:",
        "Sums over data ranks are reduced into shards of the sequence too.",
    ),
    Fault(
        "any_factor_over_experts",
        "passes/sharding/propagate.py",
        "if axis in self.over(factor.axes) and atoms.rule.may_shard(atoms.origin(name), axis):",
        "if axis in self.over(factor.axes) and atoms.origin(name) not in atoms.rule.whole "
        "and (axis in self.mesh.experts or atoms.rule.may_shard(atoms.origin(name), axis)):",
        "Attention runs on shards of the sequence over tp, where experts are spread over it.",
    ),
    # dispatch.py
    Fault(
        "capacity_of_all_owners",
        "passes/sharding/dispatch.py",
        "own * way.share / way.owners)),",
        "own * way.share)),",
        "A bounded buffer has room for all owners' rows.",
    ),
    Fault(
        "dropped_by_one_source",
        "passes/sharding/dispatch.py",
        "edit.call(aten.lt.Scalar, (ids, way.groups))",
        "edit.call(aten.lt.Scalar, (ids, way.groups - 1))",
        "Rows for the last expert are not counted among those that find no room.",
    ),
    # experts.py
    Fault(
        "rows_may_mind",
        "passes/sharding/experts.py",
        "row[0] in rule.whole or row[0] in rule.reduced",
        "row[0] in rule.reduced",
        "What reads other rows is taken for what treats each by itself.",
    ),
    Fault(
        "bins_from_anywhere",
        "passes/sharding/experts.py",
        'return low == 0 and high == argument(node, "bins", 100) - 1',
        "return True",
        "Any histogram is taken for a count of each expert.",
    ),
    # partition.py
    Fault(
        "rearranged_terms_complete",
        "passes/sharding/partition.py",
        "below = Spec(dims, (), wanted.replicate)",
        "below = replace(self.plan.current(operand), dims=dims, replicate=wanted.replicate)",
        "A weight that is a sum is rearranged as its terms and called complete.",
    ),
    Fault(
        "mask_by_logical_size",
        "passes/program/builder.py",
        "inner *= factor.local(self.mesh)",
        "inner *= factor.size",
        "Masks of a dim of several factors are laid out by logical sizes.",
    ),
    Fault(
        "unsafe_padding",
        "passes/sharding/partition.py",
        "return self.builder.fill_padding(x, spec, rule.pad_safe[i])",
        "return x",
        "Padding is not made safe before an operator that it could make infinite.",
    ),
    Fault(
        "folded_padding_unmasked",
        "passes/sharding/partition.py",
        "return self.builder.fill_padding(x, spec, rule.pad_in, folded)",
        "return x",
        "Padding is summed.",
    ),
    Fault(
        "fold_gradient_unmasked",
        "passes/sharding/partition.py",
        "(spec.fill != rule.pad_in or stops_gradient) and",
        "spec.fill != rule.pad_in and",
        "The gradient of a sum reaches padding.",
    ),
    Fault(
        "reduce_dtype_forgotten",
        "passes/sharding/partition.py",
        "dtype = self.reduce_dtype if node in self.plan.weights else None",
        "dtype = None",
        "Gradients of gathered weights are added in the compute dtype.",
    ),
    # convert.py
    Fault(
        "replicate_forgotten",
        "passes/sharding/convert.py",
        "self.call(reshard.invariant_to_replicate, axis, axis, self.reduce_dtype)",
        "pass",
        "An invariant copy becomes replicate without the operator that sums its gradient.",
    ),
    Fault(
        "take_as_slice",
        "passes/sharding/convert.py",
        'op = reshard.replicate_to_shard if differs else reshard.invariant_to_shard',
        "op = reshard.invariant_to_shard",
        "A share of a replicate copy is taken as if the copy were invariant.",
    ),
    Fault(
        "gather_always_same",
        "passes/sharding/convert.py",
        'self.gather_last(k, same=target["replicate"].isdisjoint(self.mesh.over(axis)))',
        "self.gather_last(k, same=True)",
        "What is gathered for uses that differ by rank is taken for the same everywhere.",
    ),
    Fault(
        "gather_logical_size",
        "passes/sharding/convert.py",
        "        size = replace(factor, axes=factor.axes[:-1]).local(self.mesh)\n"
        "        axis_size = self.mesh[axis]",
        "        size = factor.size\n"
        "        axis_size = self.mesh[axis]",
        "A gather over the inner of two axes gives the whole dim.",
    ),
    Fault(
        "cut_forgets_other_padding",
        "passes/sharding/convert.py",
        "self.fill = None if any(f.padded(self.mesh) for j, f in enumerate(self.flat) if j != k) else fill",
        "self.fill = fill",
        "Padding of all dims is taken for zero once one dim is cut.",
    ),
    Fault(
        "terms_on_every_rank",
        "passes/sharding/convert.py",
        "self.call(reshard.invariant_to_partial, axis, self.builder.coordinates[axis], axis)",
        "pass",
        "A copy goes into a sum once a rank.",
    ),
    Fault(
        "unreplicate_forgotten",
        "passes/sharding/convert.py",
        "self.call(reshard.replicate_to_invariant, axis, self.builder.coordinates[axis], axis)",
        "pass",
        "A replicate copy is taken for invariant, its gradient counted on every rank.",
    ),
    Fault(
        "move_the_other_way",
        "passes/sharding/convert.py",
        "self.call(reshard.all_to_all, axis, j, k, held, axis, self.mesh[axis])",
        "self.call(reshard.all_to_all, axis, k, j, held, axis, self.mesh[axis])",
        "An exchange splits the dim that it should join.",
    ),
    Fault(
        "tables_mixed_up",
        "passes/sharding/convert.py",
        "self.builder.one_table = True",
        "self.builder.one_table = False",
        "Ranks add up gradients of rows whose blocks they hold in different orders.",
    ),
    # normalize.py
    Fault(
        "mean_over_everything",
        "passes/sharding/normalize.py",
        "/ math.prod(x.shape[d] for d in dims)",
        "/ x.numel()",
        "A mean of some dims is divided by the size of all.",
    ),
    Fault(
        "ignored_labels_counted",
        "passes/sharding/normalize.py",
        "total = torch.where(keep, lse - target, 0.0).sum()",
        "total = (lse - target).sum()",
        "Ignored labels add to the loss.",
    ),
    Fault(
        "mean_over_ignored",
        "passes/sharding/normalize.py",
        "return total if reduction == SUM else total / keep.sum()",
        "return total if reduction == SUM else total / keep.numel()",
        "The loss is divided by all labels, ignored ones too.",
    ),
    Fault(
        "summed_mean_over_ignored",
        "passes/sharding/normalize.py",
        "total / (y != ignore_index).sum()",
        "total / y.numel()",
        "The loss of an unsharded vocabulary is divided by all labels.",
    ),
    Fault(
        "smoothing_not_divided",
        "passes/sharding/normalize.py",
        "each = each + label_smoothing / classes * weighted.sum(dim)",
        "each = each + label_smoothing * weighted.sum(dim)",
        "Label smoothing gives each class the share of all.",
    ),
    Fault(
        "one_site",
        "passes/sharding/normalize.py",
        "*node.args[:2], seed, site)",
        "*node.args[:2], seed, 0)",
        "All dropouts draw the same numbers.",
    ),
    # norms.py
    Fault(
        "layer_norm_uncentred",
        "passes/sharding/norms.py",
        "rms_norm(x - x.mean(dims, keepdim=True), shape",
        "rms_norm(x, shape",
        "A layer norm without eps does not subtract the mean.",
    ),
    Fault(
        "variance_of_the_batch",
        "passes/sharding/norms.py",
        "count / max(count - 1, 1)",
        "count / max(count, 1)",
        "The running variance of a batch norm is that of the batch, not of what it is drawn from.",
    ),
    # random.py
    Fault(
        "index_by_local_stride",
        "passes/sharding/random.py",
        "factor.size for factor in factors[k + 1 :]",
        "factor.local(mesh) for factor in factors[k + 1 :]",
        "Random numbers are keyed by an index that depends on the mesh.",
    ),
    Fault(
        "dropout_scaled_by_p",
        "passes/sharding/random.py",
        "x / (1 - p), 0.0)",
        "x / p, 0.0)",
        "What dropout keeps is scaled by the wrong odds.",
    ),
    Fault(
        "high_word_of_seed_lost",
        "passes/sharding/random.py",
        "mix((seed >> 32) ^ torch",
        "mix((seed >> 63) ^ torch",
        "Runs of different seeds draw the same numbers.",
    ),
    Fault(
        "first_site_is_no_key",
        "passes/sharding/random.py",
        "(site + 1) * SALT",
        "site * SALT",
        "The first random number of a run with seed 0 is always zero.",
    ),
    # custom.py
    Fault(
        "function_operands_not_mixed",
        "passes/sharding/custom.py",
        'if spec.state(a) == "invariant" and a in mixed | asked]',
        'if spec.state(a) == "invariant" and a in asked]',
        "A copy that a custom function lets meet replicate values stays the same.",
    ),
    Fault(
        "function_results_not_dual",
        "passes/sharding/custom.py",
        "gradients = [gradient_of(spec) for spec in placed.results[: function.results]]",
        "gradients = list(placed.results[: function.results])",
        "A custom backward gets gradients placed as the results were.",
    ),
    Fault(
        "function_gradients_not_dual",
        "passes/sharding/custom.py",
        "tuple(gradient_of(operands[i]) for i in kept))",
        "tuple(operands[i] for i in kept))",
        "A custom backward leaves gradients placed as the operands were.",
    ),
    Fault(
        "function_gradients_unmasked",
        "passes/sharding/partition.py",
        "return gradient if held and held.fill == 0.0 else self.builder.fill_padding(gradient, spec, 0.0)",
        "return gradient",
        "What a custom backward makes of padding's gradient stays there.",
    ),
    # place.py
    Fault(
        "blocks_inside_out",
        "passes/sharding/place.py",
        "((blocks.outer, ()), (blocks.size, (axis,)), (blocks.inner, ()))",
        "((blocks.inner, ()), (blocks.size, (axis,)), (blocks.outer, ()))",
        "Weights are cut across heads.",
    ),
    Fault(
        "plan_dim_absolute",
        "passes/sharding/place.py",
        "d = dim % len(spec.shape)",
        "d = abs(dim) % len(spec.shape)",
        "A dim counted from the end of a plan is counted from the front.",
    ),
    # collectives.py
    Fault(
        "expansion_strided",
        "passes/sharding/collectives.py",
        "return lambda *args: body(*args).contiguous()",
        "return body",
        "An expanded operator leaves another memory layout than it promised.",
    ),
    # draws.py
    Fault(
        "radius_is_turn",
        "passes/sharding/draws.py",
        "drawn(x, seed, -2 - site)",
        "drawn(x, seed, site)",
        "Both numbers that make a normal one are the same.",
    ),
    # infer.py
    Fault(
        "blocks_that_do_not_fit",
        "passes/sharding/infer.py",
        "if top <= high and not inner % low and not high % top:",
        "if top <= high and inner >= low:",
        "Groups of a convolution are taken for blocks that they cut through.",
    ),
)
