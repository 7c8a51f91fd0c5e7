"""The number of collectives: one gather per use region, one reduction per gradient, and nothing else."""

from __future__ import annotations

import functools
from collections import Counter

import pytest
from oracle import ADAMW, batches, compile_lockstep, llama, llama_loss

from passes.check.runner import PassRecord
from passes.ir import ir
from passes.ir.operators import axis_of

N_LAYERS = 2
SCALARS = 3  # sum and count of the loss, square of the norm
FSDP, HSDP, REPLICAS = (("dp_shard", 2),), (("dp_replicate", 2), ("dp_shard", 2)), (("dp_replicate", 2),)
CONTEXT = (("dp_shard", 2), ("cp", 2))


@functools.cache
def compiled(mesh: tuple, bucket_mib: float = 0.0, policy: str = "none", regather: bool = True, microbatches: int = 1,
             least: int = 1):
    """Return the final programs by name, and the records of the step's passes by name."""
    records: dict[tuple[str, str], PassRecord] = {}

    def observe(program: ir.Program, record: PassRecord) -> None:
        records[record.program, record.name] = record

    passes = {"communication": {"bucket_mib": bucket_mib}, "remat": {"policy": policy, "regather": regather},
              "shard": {"min_shard_elements": least}, "verify": "none"}
    step = compile_lockstep(llama(N_LAYERS), llama_loss, batches(rows=4)[0], dict(mesh), ADAMW, passes=passes,
                            microbatches=microbatches, observe=observe)
    return {name: c.program for name, c in step.train.items()}, records


N_PARAMETERS = len(list(llama(N_LAYERS).parameters()))


def collectives(program: ir.Program) -> Counter:
    """Return (kind, axis, phase) -> number of non-scalar tensors sent; scalars are counted as ("scalar", axis)."""
    result: Counter = Counter()
    for node in program.calls():
        if "c10d" not in str(node.target) or "wait_tensor" in str(node.target):
            continue
        kind, axis = str(node.target).split(".")[1], axis_of(node)
        is_scalar = ir.example(node).dim() == 0
        result[("scalar", axis) if is_scalar else (kind, axis, ir.phase(node))] += 1
    return result


def traffic(record: PassRecord) -> tuple[int, int]:
    """Return the calls and bytes of a program's collectives."""
    return sum(t.calls for t in record.accounting.traffic), sum(t.sent_bytes for t in record.accounting.traffic)


GATHERS, AGAIN = ("all_gather_into_tensor", "dp_shard", "forward"), ("all_gather_into_tensor", "dp_shard", "backward")
SCATTERS = ("reduce_scatter_tensor", "dp_shard", "backward")
USED_AGAIN = N_PARAMETERS - 1  # the backward of a lookup does not read the table


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.sample(1)
def test_fsdp_gathers_once_a_use_region_and_reduces_once(policy):
    programs, _ = compiled(FSDP, policy=policy)
    wanted = {GATHERS: N_PARAMETERS, AGAIN: USED_AGAIN, SCATTERS: N_PARAMETERS, ("scalar", "dp_shard"): SCALARS}
    assert collectives(programs["step"]) == wanted


@pytest.mark.parametrize("policy", ["none", "full"])
def test_with_a_sharded_sequence_both_axes_are_gathered_and_reduced_over_at_once(policy):
    programs, _ = compiled(CONTEXT, policy=policy)
    actual = collectives(programs["step"])
    attention = {key: actual.pop(key) for key in list(actual) if key[1] == "cp"}
    assert all(kind != "all_reduce" for kind, *_ in attention)
    axis = {"dp_shard": "fsdp"}
    wanted = {GATHERS: N_PARAMETERS, AGAIN: USED_AGAIN, SCATTERS: N_PARAMETERS, ("scalar", "dp_shard"): SCALARS}
    assert actual == {tuple(axis.get(k, k) for k in key): count for key, count in wanted.items()}
    gathers = [node for node in programs["step"].calls() if "all_gather_into_tensor" in str(node.target)]
    assert {node.args[1] for node in gathers if node.args[2] == "fsdp"} == {4}
    stored = [entry for entry in programs["step"].inputs if entry.kind in ("parameter", "moment") and entry.spec.dims]
    for entry in stored:
        assert entry.spec.sharded == ("fsdp",)
        first, *_ = entry.spec.shape
        assert entry.spec.local_shape(programs["step"].mesh)[0] == -(-first // 4)


def test_small_parameters_are_summed_over_both_axes_at_once():
    programs, _ = compiled(CONTEXT, least=10**9)
    result = {key: count for key, count in collectives(programs["step"]).items() if key[1] != "cp"}
    sums = ("all_reduce", "fsdp", "optimizer")
    assert result.pop(sums) + result.pop(("all_reduce", "fsdp", "backward"), 0) == N_PARAMETERS
    assert result == {("scalar", "fsdp"): SCALARS - 1}


def test_without_regather_parameters_are_gathered_once():
    programs, _ = compiled(FSDP, regather=False)
    wanted = {GATHERS: N_PARAMETERS, SCATTERS: N_PARAMETERS, ("scalar", "dp_shard"): SCALARS}
    assert collectives(programs["step"]) == wanted


def test_replicas_sum_each_gradient_once():
    programs, _ = compiled(REPLICAS)
    sums = ("all_reduce", "dp_replicate", "optimizer")
    assert collectives(programs["step"]) == {sums: N_PARAMETERS, ("scalar", "dp_replicate"): SCALARS - 1}


def test_replicas_of_shards_sum_what_is_scattered():
    programs, _ = compiled(HSDP)
    result = collectives(programs["step"])
    assert result[("all_reduce", "dp_replicate", "optimizer")] == N_PARAMETERS
    assert (result[GATHERS], result[AGAIN], result[SCATTERS]) == (N_PARAMETERS, USED_AGAIN, N_PARAMETERS)
    assert sum(result.values()) == 4 * N_PARAMETERS - 1 + 2 * (SCALARS - 1) + 1


def test_accumulation_leaves_the_sum_over_replicas_to_the_end():
    programs, _ = compiled(REPLICAS, microbatches=2)
    assert collectives(programs["accumulate"]) == {("scalar", "dp_replicate"): SCALARS - 2}  # the count is an input
    assert collectives(programs["apply"]) == {("all_reduce", "dp_replicate", "optimizer"): N_PARAMETERS}


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", [FSDP, REPLICAS], ids=str)
def test_buckets_are_fewer_and_carry_the_same_bytes(mesh):
    _, one_by_one = compiled(mesh)
    _, merged = compiled(mesh, bucket_mib=25.0)
    calls, sent = traffic(one_by_one["step", "overlap"])
    calls_merged, sent_merged = traffic(merged["step", "overlap"])
    assert calls_merged < calls / 2 and sent_merged == sent
