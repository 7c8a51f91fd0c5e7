"""PyTorch's own sample inputs for every operator with a rule: each input dim sharded in turn, by value and gradient.

A case is (operator, sample, sharding). Cases that do not run fall into named categories, which the summary lists.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from rule_harness import NotPlain, capture, check, sharded
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from passes.ir import ir
from passes.ir.mesh import Mesh
from passes.rules import RULES

SAMPLES, LARGEST = 6, 4096  # samples per operator, entries per input
# operators whose result is not a function of their inputs, or not a tensor
UNCOMPARABLE = {"empty": "uninitialised memory", "empty_like": "uninitialised memory", "new_empty": "uninitialised memory",
                "nn.functional.dropout": "random", "bernoulli": "random", "rand_like": "random"}
# the part of the sweep in every run: these operators, on two ranks
EVERY_RUN = frozenset("""add addmm amax bmm cat cumsum div embedding exp expand gather index_select layer_norm linear log
    masked_fill matmul mul nn.functional.cross_entropy nn.functional.embedding nn.functional.gelu nn.functional.linear
    nn.functional.layer_norm nn.functional.rms_norm nn.functional.scaled_dot_product_attention nn.functional.silu permute
    pow reshape rsqrt slice softmax sort split squeeze sub sum topk transpose tril unsqueeze var view where""".split())


@dataclass
class Tally:
    """The numbers of cases that ran and passed, and the reasons why others did not run."""

    ran: int = 0
    passed: int = 0
    failures: list[str] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)  # "operator: reason" -> samples

    def __str__(self) -> str:
        reasons = Counter(line.split(": ", 1)[1] for line in self.left_out.elements())
        listed = "\n".join(f"  not run: {line} ({n})" for line, n in sorted(self.left_out.items()))
        failed = "\n".join(f"  FAILED {line}" for line in self.failures)
        return f"{self.passed} of {self.ran} cases passed; not run, by reason: {dict(reasons)}\n{listed}\n{failed}"


def with_rules() -> list[Any]:
    """Return the entries of op_db whose ATen operator has a rule."""
    return [info for info in op_db if aten_name(info) in RULES]


def aten_name(info: Any) -> str:
    """Return the ATen name of an entry."""
    return (info.aten_name or info.name).split(".")[-1]


def as_function(info: Any, sample: Any) -> tuple[Callable[..., Any], list[Tensor]]:
    """Return the sample as a function of its tensors alone."""
    leaves, tree = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def fn(*tensors: Tensor) -> Any:
        values = list(leaves)
        for i, tensor in zip(positions, tensors):
            values[i] = tensor
        args, kwargs = pytree.tree_unflatten(values, tree)
        out = info.op(*args, **kwargs)
        return sample.output_process_fn_grad(out)

    return fn, [leaves[i] for i in positions]


def obstacle(fn: Callable[..., Any], tensors: list[Tensor]) -> str | None:
    """Return the reason why a sample is not run, if any."""
    if any(x.is_complex() or x.layout is not torch.strided for x in tensors):
        return "complex or sparse input"
    if any(x.is_floating_point() and x.dtype is not torch.float64 for x in tensors):
        return "not in fp64"
    if not any(n > 1 for x in tensors for n in x.shape):
        return "nothing to shard"
    if any(x.numel() == 0 for x in tensors):
        return "empty input"
    if any(x.numel() > LARGEST for x in tensors):
        return f"input of more than {LARGEST} entries"
    try:
        outputs = [o for o in pytree.tree_leaves(fn(*(x.clone() for x in tensors))) if isinstance(o, Tensor)]
    except RuntimeError as error:
        return f"fails on one device, {str(error).splitlines()[0][:80]}"
    if not outputs or any(o.is_complex() or o.numel() == 0 for o in outputs):
        return "no result, an empty or a complex one"
    if any(o.dim() == 4 and not o.is_contiguous() and o.is_contiguous(memory_format=torch.channels_last) for o in outputs):
        return "result in channels_last"
    return None


def samples(info: Any) -> Iterator[Any]:
    """Yield the first samples in fp64, or in the widest integers that the operator takes."""
    dtype = next((d for d in (torch.float64, torch.int64, torch.bool) if d in info.dtypes), torch.float32)
    inputs = info.sample_inputs("cpu", dtype, requires_grad=False)
    yield from list(inputs)[:SAMPLES]  # to its end: what holds `no_grad` open would be traced if collected in a trace


def sweep(info: Any, meshes: tuple[int, ...], tally: Tally) -> None:
    """Run all samples of an operator, with each input dim sharded in turn."""
    name = info.name + ("." + info.variant_test_name if info.variant_test_name else "")
    if info.name in UNCOMPARABLE:
        tally.left_out[f"{name}: {UNCOMPARABLE[info.name]}"] += 1
        return
    for number, sample in enumerate(samples(info)):
        fn, tensors = as_function(info, sample)
        if reason := obstacle(fn, tensors):
            tally.left_out[f"{name}: {reason}"] += 1
            continue
        for ranks in meshes:
            _run(name, number, fn, tensors, ranks, tally)


def _run(name: str, number: int, fn: Callable[..., Any], tensors: list[Tensor], ranks: int, tally: Tally) -> None:
    places = [(i, d) for i, x in enumerate(tensors) for d, n in enumerate(x.shape) if n > 1]
    label = f"{name} sample {number} {[tuple(x.shape) for x in tensors]} on {ranks} ranks"
    tally.ran += len(places)
    try:
        function = capture(fn, tensors, Mesh.of({"tp": ranks}))
    except ir.Refused as refusal:
        tally.ran -= len(places)
        tally.left_out[f"{name}: refused, {str(refusal).rsplit(';')[0].split('default ')[-1]}"] += 1
        return
    except NotPlain as reason:
        tally.ran -= len(places)
        tally.left_out[f"{name}: {reason}"] += 1
        return
    except Exception as error:
        if "derivative" in str(error) and "not implemented" in str(error):
            tally.ran -= len(places)
            tally.left_out[f"{name}: has no derivative"] += 1
            return
        tally.failures.append(f"{label}: capture: {_first_line(error)}")
        return
    for i, d in places:
        try:
            check(function, {i: sharded(tensors[i].shape, d)})
            tally.passed += 1
        except Exception as error:
            tally.failures.append(f"{label}, operand {i} dim {d}: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:200]}".replace("\n", " ")


def _all(infos: list[Any], meshes: tuple[int, ...]) -> Tally:
    tally = Tally()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for info in infos:
            torch.manual_seed(0)
            sweep(info, meshes, tally)
    return tally


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_the_subset_on_two_ranks(record_property):
    infos = [i for i in with_rules() if i.name in EVERY_RUN]
    tally = _all(infos, (2,))
    record_property("counted", f"op_db, subset of {len(infos)} entries on 2 ranks: {tally}")
    assert not tally.failures and tally.ran


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_everything_on_two_and_three_ranks(record_property):
    tally = _all(with_rules(), (2, 3))
    record_property("counted", f"op_db, all {len(with_rules())} entries on 2 and 3 ranks: {tally}")
    assert not tally.failures and tally.ran
