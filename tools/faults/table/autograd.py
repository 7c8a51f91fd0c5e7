"""Faults of `passes/autograd`."""

from __future__ import annotations

from tools.faults.fault import Fault

FAULTS = (
    # joint.py
    Fault(
        "gradient_output_as_value",
        "passes/autograd/joint.py",
        'ir.Output(name, "gradient", parameters[name].spec.gradient())',
        'ir.Output(name, "gradient", parameters[name].spec)',
        "Gradients are recorded as complete where they are still to be summed.",
    ),
    Fault(
        "spec_of_other_operator",
        "passes/autograd/joint.py",
        'if self.phase == "forward" and ir.is_tensor(node) and node.target == self.origin.target:',
        'if self.phase == "forward" and ir.is_tensor(node):',
        "Operators within a definition get the placement of its result.",
    ),
    Fault(
        "updates_seen_early",
        "passes/autograd/joint.py",
        "for user in [user for user in old.users if order[user] > order[node]]:",
        "for user in [user for user in old.users if order[user] != order[node]]:",
        "Users before an update in place read what comes after it.",
    ),
    # simplify.py
    Fault(
        "scale_joined_upwards",
        "passes/autograd/simplify.py",
        "one.update_arg(1, one.args[1] / other.args[1])",
        "one.update_arg(1, one.args[1] * other.args[1])",
        "A factor taken from one operand of a product divides the other.",
    ),
    Fault(
        "scale_lost",
        "passes/autograd/simplify.py",
        "one.update_arg(1, one.args[1] / other.args[1])\n",
        "pass\n",
        "A factor taken from one operand of a product is not given to the other.",
    ),
    Fault(
        "any_scale_joined",
        "passes/autograd/simplify.py",
        "is_alone(other, aten.mul.Scalar) and is_power_of_two(other.args[1])",
        "is_alone(other, aten.mul.Scalar)",
        "A factor is taken from one operand to the other though that rounds.",
    ),
    Fault(
        "undone_on_other_dims",
        "passes/autograd/simplify.py",
        "return x.args[0] if dims[0] == dims[1] else None",
        "return x.args[0]",
        "Two transposes of different dims are taken for none.",
    ),
    Fault(
        "another_layout_dropped",
        "passes/autograd/simplify.py",
        "return (x.shape, x.dtype, x.stride(), x.device) == (y.shape, y.dtype, y.stride(), y.device)",
        "return x.shape == y.shape",
        "A cast is dropped because its shape stays.",
    ),
)
