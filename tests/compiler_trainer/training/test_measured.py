"""The time breakdown of a step, from handwritten traces."""

from __future__ import annotations

from compiler_trainer.training.trace import ELEMENTWISE, HOST, WAITS, Mark, break_down

MARKS = {"%block_1 of step": Mark("forward layers.0", ELEMENTWISE), "%head of step": Mark("forward outside of layers", HOST)}


def event(name: str, begin: float, end: float, cat: str = "cpu_op", tid: int = 1, **args) -> dict:
    """Return an event with begin and end in ms."""
    return {"name": name, "cat": cat, "ts": 1e3 * begin, "dur": 1e3 * (end - begin), "pid": 1, "tid": tid, "args": args}


def steps(*durations: float) -> list[dict]:
    """Return events of consecutive steps."""
    begins = [sum(durations[:i]) for i in range(len(durations))]
    return [event(f"step {i}", b, b + d, "user_annotation") for i, (b, d) in enumerate(zip(begins, durations), 3)]


def test_on_a_cpu_each_moment_belongs_to_the_innermost_of_nested_events():
    events = [
        *steps(20.0),
        event("data", 0.0, 2.0, "user_annotation"),
        event("aten::mm", 1.0, 2.0),  # while a batch is made: data
        event("%block_1 of step", 3.0, 13.0, "user_annotation"),
        event("aten::mm", 4.0, 8.0),
        event("aten::copy_", 5.0, 6.0),  # inside the matmul
        event("wait for all_gather tp %w", 9.0, 12.0, axis="tp", operator=WAITS[0]),
        event("%head of step", 13.0, 16.0, "user_annotation"),
        event("aten::add", 14.0, 15.0),
        event("aten::mm", 0.0, 20.0, tid=2),  # on another thread
    ]
    result = break_down(events, MARKS)
    assert (result.step_ms, result.data_ms, result.exposed_ms) == (20.0, 2.0, {"tp": 3.0})
    assert result.kinds == {"products": 4.0, "loops": 3.0 + 1.0}
    assert result.places == {"forward layers.0": 7.0, "forward outside of layers": 1.0}
    assert result.host_ms == 20.0 - 2.0 - 3.0 - 8.0


def test_it_is_the_average_of_the_steps():
    events = [*steps(10.0, 20.0), event("data", 1.0, 2.0, "user_annotation"), event("data", 12.0, 15.0, "user_annotation")]
    result = break_down(events, {})
    assert (result.step_ms, result.data_ms, result.host_ms) == (15.0, 2.0, 13.0)


def test_on_a_gpu_kernels_are_what_the_host_launched_and_collectives_count_where_nothing_else_runs():
    events = [
        *steps(20.0),
        event("data", 0.0, 1.0, "user_annotation"),
        event("%block_1 of step", 1.0, 3.0, "user_annotation"),
        event("aten::mm", 1.2, 1.4),
        event("cudaLaunchKernel", 1.3, 1.31, "cuda_runtime", correlation=1),
        event("all_gather tp %w", 1.5, 1.7, axis="tp", operator="_c10d_functional::all_gather_into_tensor"),
        event("cudaLaunchKernel", 1.6, 1.61, "cuda_runtime", correlation=2),
        event("cudaLaunchKernel", 2.0, 2.01, "cuda_runtime", correlation=3),
        event("cudaGraphLaunch", 4.0, 4.01, "cuda_runtime", correlation=4),
        event("nvjet_tst", 2.0, 6.0, "kernel", 7, correlation=1),
        event("ncclDevKernel_AllGather", 5.0, 9.0, "kernel", 8, correlation=2),
        event("triton_poi_fused_mul", 9.0, 11.0, "kernel", 7, correlation=3),
        event("flash_fwd_kernel", 11.0, 12.0, "kernel", 7, correlation=4),
        event("of another step", 30.0, 40.0, "kernel", 7, correlation=99),
    ]
    result = break_down(events, MARKS)
    assert result.kinds == {"products": 4.0, "loops": 2.0, "attention": 1.0}
    assert result.exposed_ms == {"tp": 3.0}
    assert (result.data_ms, result.host_ms) == (1.0, 20.0 - 4.0 - 3.0 - 2.0 - 1.0 - 1.0)
    assert result.places == {"forward layers.0": 6.0, "": 1.0}


def test_a_step_that_is_launched_ahead_lasts_from_the_end_of_the_one_before():
    launches = [event("cudaLaunchKernel", at, at + 0.1, "cuda_runtime", correlation=n) for n, at in enumerate((0.5, 2.5, 12.5))]
    kernels = [event("gemm", at, at + 9.0, "kernel", 7, correlation=n) for n, at in enumerate((3.0, 12.0, 22.0))]
    result = break_down([*steps(2.0, 10.0, 10.0), *launches, *kernels], {})  # the device runs a previous step until 3
    assert (result.step_ms, result.kinds, result.host_ms) == (9.5, {"products": 9.0}, 0.5)
