"""Code and names of compiled bodies are those of a kind of device: ranks of a machine, each on its GPU, share them."""

from __future__ import annotations

import pytest
import torch
from small_programs import Small, cut
from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides
from torch._inductor.runtime.hints import DeviceProperties

from passes.program import ir
from passes.program.bodies import text_of
from passes.program.torch_private import FakeTensor, for_gpu

aten = torch.ops.aten


def written(number: int) -> str:
    """What Inductor writes for a GPU, wherever it says for which."""
    ops = CUDADeviceOpOverrides()
    properties = DeviceProperties(type="cuda", index=number, multi_processor_count=132, cc=90)
    return f"""
# Graph fragment: %p0 : Tensor "f32[4, 8][8, 1]cuda:{number}" = PlaceHolder[target=p0]
triton_poi_fused_add_0 = async_compile.triton('triton_poi_fused_add_0', '''
    triton_meta={{'signature': {{'in_ptr0': '*fp32', 'xnumel': 'i32'}}, 'device': {properties!r}, 'constants': {{}}}},
    xindex = xoffset + tl.arange(0, XBLOCK)[:]
''', device_str='cuda')
def call(args):
    with {ops.device_guard(number)}:
        {ops.set_device(number)}
        buf0 = empty_strided_cuda((4, 8), (8, 1), torch.float32)
        stream{number} = get_raw_stream({number})
        triton_poi_fused_add_0.run(p0, buf0, 32, stream=stream{number})
        buf10 = torch.ops.aten.full.default([0], 0, dtype=torch.int64, device={torch.device("cuda", number)!r})
"""


@pytest.mark.parametrize(("of", "to"), [(0, 3), (3, 0), (1, 11), (12, 2), (5, 5)])
def test_code_for_a_gpu_becomes_that_for_another(of, to):
    assert for_gpu(written(of), to) == written(to)


def test_code_for_the_cpu_stays():
    code = "buf0 = empty_strided_cpu((0, 1), (1, 0), torch.float32)\nset_0 = index_0[0]; upstream0 = device(type='cpu')"
    assert for_gpu(code, 7) == code


def test_bodies_of_ranks_on_different_gpus_have_one_text():
    def text(number):
        small, device = Small(), torch.device("cuda", number)
        x = small.input("x", cut((4, 4)), dtype=torch.float32)
        zeros = small.call(aten.full.default, [4, 4], 0.0, device=torch.device("cpu"))
        zeros.update_kwarg("device", device)
        total = small.call(aten.add.Tensor, x, zeros)
        for node in (x, zeros, total):
            ir.set_value(node, FakeTensor(small.ctx.fake_mode, torch.empty(4, 4, device="meta"), device))
        small.builder.graph.output((total,))
        return text_of(small.builder.graph)

    assert text(0) == text(3) and "cuda" in text(0)
