"""CUDA without a GPU: Inductor writes every body as Triton for an H100, and every kernel compiles to a cubin."""

from __future__ import annotations

import pytest
from absent_gpu import HERE, run

from compiler_trainer.config.compose import compose
from compiler_trainer.doctor.probes import PROBES
from compiler_trainer.doctor.probes import SMALL as PROBED

FAKE_CUDA, FLEX_CUDA = HERE / "fake_cuda.py", HERE / "flex_cuda.py"
H100_SHARED = 232448  # bytes of shared memory of a thread block
EXPERTS = {"experts": {"count": 4, "top_k": 2, "width": 128, "balance_loss": 0.01, "bias_rate": 0.001}}
JOBS = {
    "default": {"mesh": {"dp_shard": 1}},
    "dp_shard 2, tp 2, cp 2": {"mesh": {"dp_shard": 2, "tp": 2, "cp": 2}},
    "float8": {"mesh": {"dp_shard": 1}, "passes": {"cast": {"param_dtype": "bfloat16", "float8": "tensorwise"}}},
    "dp_shard 2, ep 2": {"mesh": {"dp_shard": 2, "ep": 2}, "model": EXPERTS, "passes": {"cast": {"param_dtype": "bfloat16"}}},
    "tp 4, async": {"mesh": {"dp_shard": 1, "tp": 4}, "passes": {"communication": {"async_tp": "all"}}},
    "pp 2, dp_shard 2": {"mesh": {"dp_shard": 2, "pp": 2}, "train": {"microbatches": 4, "global_batch_size": 8}},
}
CALLED = {"float8": "_scaled_mm", "dp_shard 2, ep 2": "grouped_mm"}  # a kernel that CUDA has for it


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", JOBS)
def test_every_body_becomes_cubins(name, library, record_property):
    result = run(FAKE_CUDA, library, JOBS[name])
    assert result["kernels"] >= result["bodies"] > 5
    assert len(result["cubins"]) >= result["kernels"] and min(result["cubins"]) > 0
    assert result["targets"] == [".target sm_90a"]
    assert not result["breaks"]  # a CUDA graph can record it
    assert name not in CALLED or any(CALLED[name] in operator for operator in result["extern"])
    extern = ", ".join(f"{count} {operator}" for operator, count in sorted(result["extern"].items())) or "none"
    counted = f"{result['bodies']} bodies, {result['kernels']} Triton kernels, {len(result['cubins'])} cubins"
    record_property("counted", f"Triton for an H100, {name}: {counted}; attention and float8 products called: {extern}")


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.sweep(3)
@pytest.mark.parametrize("probe", [probe for probe in PROBES if "lower.backend=eager" not in probe.options], ids=lambda p: p.name)
def test_the_small_jobs_of_the_doctor_compile_for_an_h100(probe, library):
    """Compile sequences of one block, a batch of four: these sizes become constants in a kernel."""
    options = [option.replace("=-1", "=2") for option in probe.options]
    dp_shard = 2 if "mesh.ep=2" in options else 1  # experts are spread over other axes
    job = compose([*PROBED, f"mesh.dp_shard={dp_shard}", f"train.global_batch_size={8 if probe.mesh else 4}", *options])
    assert run(FAKE_CUDA, library, job)["kernels"] > 5


# ---- attention by interval --------------------------------------------------------------------------

SMALL = {"attention": "documents", "dim": 128, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2}
HALF = {"cast": {"param_dtype": "bfloat16"}, "context": {"method": "ring"}}
LENGTH = 640
PACKED = {
    f"cp {ranks}": {
        "mesh": {"dp_shard": 1, "cp": ranks},
        "model": SMALL,
        "passes": HALF | {"context": {"method": "ring", "skip_steps": False}},  # otherwise the distance that keys travel is data, which a replay does not read
        "train": {"seq_len": LENGTH, "global_batch_size": 2},
    }
    for ranks in (1, 2)
}


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", PACKED)
def test_packed_documents_take_flex_attention_and_no_mask(name, library, record_property):
    """Compile a step of two layers, alone and in a ring."""
    result, ranks = run(FAKE_CUDA, library, PACKED[name]), int(name[-1])
    assert all(result["flex"])  # forward and backward
    assert result["shared"] <= H100_SHARED and min(result["cubins"]) > 0 and not result["breaks"]
    assert not [shape for shape in result["squares"] if shape[-1] in (LENGTH, LENGTH // ranks)]
    counted = f"{result['kernels']} Triton kernels, {sum(result['flex'])} of them FlexAttention's"
    record_property("counted", f"Triton for an H100, packed documents, {name}: {counted}; no mask")


@pytest.mark.full
def test_attention_by_interval_becomes_cubins(library):
    (result,) = run(FLEX_CUDA, library, [{"dtype": "bfloat16", "widths": (64, 64), "runs": True}])
    assert result["flex"] == [1, 1] and result["shared"] <= H100_SHARED


WIDTHS = [(8, 8), (24, 80), (40, 40), (64, 64), (80, 80), (96, 96), (128, 128), (160, 160), (192, 128), (256, 256)]


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_heads_of_all_widths_share_no_more_memory_than_there_is(dtype, library, record_property):
    result = run(FLEX_CUDA, library, [{"dtype": dtype, "widths": widths} for widths in WIDTHS])
    assert all(case["flex"] == [1, 1] for case in result)
    shared = [case["shared"] for case in result]
    assert max(shared) <= H100_SHARED, dict(zip(map(str, WIDTHS), shared))
    record_property("counted", f"FlexAttention for an H100, {dtype}: {len(result)} widths of heads up to 256")


INTERPRETED = [
    {"form": "documents", "runs": True},
    {"form": "any", "heads": (6, 2), "widths": (8, 24)},
]


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", INTERPRETED, ids=lambda case: case["form"])
def test_triton_computes_what_the_cpu_does(case, library, record_property):
    """Run every kernel of the compiled graph, including lists of blocks, in Triton's interpreter in fp32."""
    (result,) = run(FLEX_CUDA, library, [case], TRITON_INTERPRET="1")
    assert max(result) < 2e-5, result
    record_property("counted", f"FlexAttention's kernels in Triton's interpreter, {case}: {max(result):.1e} from fp64")
