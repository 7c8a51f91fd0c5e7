"""Predicted steps: formulas by hand on tiny graphs, the output of a dry run, and its refusals."""

from __future__ import annotations

import dataclasses
import json
import operator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from commands import call
from small_programs import Small, cut

from compiler_trainer import compile_step, models
from compiler_trainer.cli import app
from compiler_trainer.config import schema as config
from compiler_trainer.config.cluster import ByDtype, ClusterConfig
from compiler_trainer.config.compose import compose
from compiler_trainer.config.device import TABLES, balance_of, cluster_of, read
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import CONF
from compiler_trainer.config.options import build
from compiler_trainer.config.schema import (
    CastConfig,
    Config,
    ExpertsConfig,
    LatentConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    PassesConfig,
    RematConfig,
    RunConfig,
    TrainConfig,
)
from compiler_trainer.config.validate import dry_world_size, validate
from compiler_trainer.models import llama
from compiler_trainer.models.flops import of_decoder
from compiler_trainer.planning.dry import compile_dry, dry_run, predict_step
from passes.cost.cluster import Beside, Cluster, Links, Protocol, collective_seconds
from passes.cost.fusion import fuse
from passes.cost.predict import predict
from passes.cost.rates import Curve, Rates
from passes.ir import ir
from passes.ir.machine import H100, Reach, reach
from passes.ir.mesh import Mesh
from passes.ir.spec import Spec
from passes.torch_private import c10d
from passes.trace.abstract_eval import abstract_eval

aten = torch.ops.aten
F32 = torch.float32
ONE = Curve.flat(1.0)
# a byte a second inside a node, a tenth between nodes, one FLOP and ten bytes a second on the device
SLOW = Cluster(2, Rates({F32: ONE}, ONE, ONE, ONE, Curve.flat(10.0), kernel_s=0.5), Links(1.0, 0.1))


def with_rates(cluster, **changes):
    return replace(cluster, rates=replace(cluster.rates, **changes))


def decoder_flops(cfg: ModelConfig, seq_len: int) -> int:
    return of_decoder(cfg, llama.build(cfg), seq_len)


def ended(small: Small, *results):
    outputs = [("metric", f"m{i}", node, Spec.whole(tuple(ir.example(node).shape))) for i, node in enumerate(results)]
    return small.program(outputs)


def kernels(small: Small, *results):
    program = ended(small, *results)
    found = fuse(program, abstract_eval(program, small.ctx))
    return [([node.name for node in k.nodes], k.moved_bytes) for k in found]


# ---- links ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axis", "nodes", "per_node"), [("tp", 1, 4), ("cp", 2, 2), ("dp_shard", 3, 1), ("dp_replicate", 2, 1)]
)
def test_where_the_ranks_of_an_axis_are(axis, nodes, per_node):
    mesh = Mesh.of({"dp_replicate": 2, "dp_shard": 3, "cp": 4, "tp": 4})
    assert reach(mesh, axis, 8) == Reach(nodes, per_node)


def test_an_axis_of_two_is_spread_as_both_together():
    mesh = Mesh.of({"dp_replicate": 2, "dp_shard": 4, "cp": 2, "tp": 2})
    assert reach(mesh, "dp_shard", 8) == Reach(2, 2)
    assert reach(mesh, "fsdp", 8) == Reach(2, 4)  # neighbours on cp are in the same node
    assert [len(group) for group in mesh.groups("fsdp")] == [8] * 4


LINKS = Links(100.0, 10.0, (Protocol(0.0, 0.01, 0.1),))


@pytest.mark.parametrize(
    ("kind", "nodes", "per_node", "seconds"),
    [
        ("all_gather", 1, 4, 6 + 3 * 0.01),  # inside a node
        ("all_gather", 4, 1, 60 + 3 * 0.1),  # one rank a node
        ("reduce_scatter", 2, 4, max(6, 60 / 7) + 6 * 0.01 + 0.1),  # 1 / 7 of it leaves the node
        ("all_reduce", 4, 1, 60 + 2 * 3 * 0.1),
        ("all_to_all", 2, 4, max(6 * 3 / 7, 60 * 4 / 7) + 0.1),
        ("shift", 2, 4, 60 + 0.1),
    ],
)
def test_seconds_of_collectives_that_send_600_bytes_a_rank(kind, nodes, per_node, seconds):
    assert collective_seconds(kind, 600, Reach(nodes, per_node), LINKS) == pytest.approx(seconds)


def test_inside_a_node_times_are_those_measured():
    links = replace(LINKS, measured={("all_gather", 2): Curve(((100, 1.0), (400, 4.0))), ("all_gather", 8): Curve.flat(8.0)})

    def seconds(sent_bytes, ranks):
        return collective_seconds("all_gather", sent_bytes, Reach(1, ranks), links)

    assert [seconds(size, 2) for size in (10, 100, 200, 400, 800)] == pytest.approx([1, 1, 2, 4, 8])
    assert seconds(1, 4) == pytest.approx(8**0.5)  # half way between 2 and 8 ranks, as their logarithms are
    assert collective_seconds("all_gather", 600, Reach(4, 1), links) == pytest.approx(60 + 3 * 0.1)


def test_few_bytes_take_the_protocol_of_short_hops_and_a_sum_a_tree():
    quick = replace(LINKS, protocols=(Protocol(0.0, 0.01, 1.0), Protocol(0.0, 0.01, 0.1, share=0.5)))
    assert collective_seconds("all_gather", 1, Reach(32, 1), quick) == pytest.approx(0.1 / 0.5 + 31 * 0.1)
    assert collective_seconds("all_gather", 6000, Reach(32, 1), quick) == pytest.approx(600 + 31)
    assert collective_seconds("all_reduce", 1, Reach(32, 1), LINKS) == pytest.approx(0.1 / 0.92 + 2 * 5 * 0.1)


def test_between_points_logarithms_are_interpolated():
    curve = Curve(((10, 1.0), (1000, 100.0)))
    assert [curve.at(size) for size in (1, 10, 100, 1000, 10_000)] == pytest.approx([1, 1, 10, 100, 100])
    assert curve.seconds(10_000) == pytest.approx(1000)
    assert curve.scaled(2, 3).at(20) == pytest.approx(3)


# ---- kernels ----------------------------------------------------------------------------------------


def test_loops_run_as_one_kernel_and_a_product_alone():
    small = Small()
    x, w = small.input("x", cut((4, 8)), "batch", F32), small.input("w", cut((8, 8)), "parameter", F32)
    y = small.call(aten.relu.default, small.call(aten.mul.Tensor, x, 2.0))
    z = small.call(aten.mm.default, y, w)
    norm = small.call(aten.mean.dim, small.call(aten.mul.Tensor, z, z), [1], True)
    out = small.call(aten.div.Tensor, z, norm)
    assert kernels(small, out) == [
        (["relu_default"], 2 * 4 * 8 * 4),  # x read, y written; the product is made in it and never exists
        (["mm_default"], (2 * 4 * 8 + 8 * 8) * 4),
        (["mean_dim", "div_tensor"], 2 * 4 * 8 * 4),  # a reduction of rows stays in its kernel
    ]


def test_a_cast_that_loops_read_is_made_in_each_and_never_written():
    small = Small()
    x = small.input("x", cut((64, 8)), "batch", F32)
    total = small.call(aten.sum.default, wide := small.call(aten._to_copy.default, x, dtype=torch.float64))
    out = small.call(aten.div.Tensor, wide, total)
    assert kernels(small, out) == [
        (["sum_default"], 64 * 8 * 4 + 8),
        (["div_tensor"], 64 * 8 * (4 + 8) + 8),
    ]


def test_the_eager_backend_runs_each_operator_as_a_kernel():
    small = Small()
    x = small.input("x", cut((4, 8)), "batch", F32)
    program = ended(small, small.call(aten.relu.default, small.call(aten.exp.default, x)))
    avals = abstract_eval(program, small.ctx)
    assert [len(k.nodes) for k in fuse(program, avals)] == [2]
    assert [k.moved_bytes for k in fuse(program, avals, fused=lambda node: False)] == [2 * 4 * 8 * 4] * 2


def test_operators_that_run_alone_stand_between_kernels():
    """A cast read by an operator that runs alone is written to memory."""
    small = Small()
    x = small.input("x", cut((4, 8)), "batch", F32)
    wide = small.call(aten._to_copy.default, x, dtype=torch.float64)
    first = small.call(aten.exp.default, wide)
    middle = small.call(aten.tanh.default, first)
    program = ended(small, small.call(aten.log.default, middle))
    avals = abstract_eval(program, small.ctx)
    for alone, wanted in (
        ((), [["exp_default", "tanh_default", "log_default"]]),
        ((middle,), [["exp_default"], ["tanh_default"], ["log_default"]]),
        ((first,), [["_to_copy_default"], ["exp_default"], ["tanh_default", "log_default"]]),
    ):
        found = fuse(program, avals, lambda node, alone={n.name for n in alone}: node.name not in alone)
        assert [[n.name for n in k.nodes] for k in found] == wanted


def test_a_reduction_of_everything_ends_its_kernel():
    small = Small()
    x = small.input("x", cut((4, 8)), "batch", F32)
    total = small.call(aten.sum.default, small.call(aten.mul.Tensor, x, x))
    assert kernels(small, small.call(aten.div.Tensor, x, total)) == [
        (["sum_default"], 4 * 8 * 4 + 4),
        (["div_tensor"], 2 * 4 * 8 * 4 + 4),
    ]


def test_views_move_nothing_and_an_update_in_place_writes_what_it_updates():
    small = Small()
    p = small.input("p", cut((4, 8)), "parameter", F32)
    turned = small.call(aten.t.default, small.call(aten.neg.default, p))
    done = small.call(aten.copy_.default, p, small.call(aten.t.default, turned), phase="forward")
    assert kernels(small, done) == [(["neg_default", "copy__default"], 2 * 4 * 8 * 4)]


def test_a_lookup_reads_of_a_table_only_what_it_yields():
    small = Small()
    table, ids = small.input("table", cut((1000, 8)), "parameter", F32), small.input("ids", cut((3,)), "batch", torch.int64)
    assert kernels(small, small.call(aten.embedding.default, table, ids)) == [(["embedding_default"], 2 * 3 * 8 * 4 + 3 * 8)]


# ---- the timeline -----------------------------------------------------------------------------------


def one_product_one_gather(*, wait_first: bool):
    """Return mm [2, 3] x [3, 4] and an all-gather of 5 entries a rank over tp=2, waited for before or after the mm."""
    small = Small(tp=2)
    a, b = small.input("a", cut((2, 3)), "batch", F32), small.input("b", cut((3, 4)), "batch", F32)
    x = small.input("x", cut((10,), tp=0), "batch", F32)
    start = small.call(c10d.all_gather_into_tensor.default, x, 2, "tp")
    steps = [(c10d.wait_tensor.default, start), (aten.mm.default, a, b)]
    done = [small.call(*step) for step in (steps if wait_first else steps[::-1])]
    return ended(small, *done), small.ctx


PRODUCT_S = 2 * 2 * 3 * 4  # 48 FLOPs at one a second; 26 entries are read or written at 10 bytes a second
GATHER_S = 5 * 4  # a rank sends its 5 entries


def test_a_gather_that_is_waited_for_at_once_is_exposed():
    found = predict(*one_product_one_gather(wait_first=True), SLOW)
    assert found.timeline.step_s == pytest.approx(GATHER_S + PRODUCT_S)
    assert found.timeline.exposed_s == pytest.approx({"tp": GATHER_S})
    assert [(span.stream, span.start, span.end) for span in found.timeline.spans.values()] == [
        ("tp", 0, GATHER_S), ("compute", GATHER_S, GATHER_S + PRODUCT_S)]
    assert found.sent_bytes == {("tp", "intra"): 20, ("tp", "inter"): 0}


def test_a_gather_beside_a_product_is_hidden():
    found = predict(*one_product_one_gather(wait_first=False), SLOW).timeline
    assert (found.step_s, found.compute_s) == (pytest.approx(PRODUCT_S), pytest.approx(PRODUCT_S))
    assert found.exposed_s == {"tp": 0}


def test_what_is_left_of_a_longer_gather_is_exposed():
    slower = replace(SLOW, links=Links(0.25, 0.1))  # 80 s
    found = predict(*one_product_one_gather(wait_first=False), slower).timeline
    assert found.exposed_s["tp"] == pytest.approx(80 - PRODUCT_S)
    assert found.step_s == pytest.approx(80)


def test_kernels_and_collectives_beside_each_other_are_slower():
    beside = replace(SLOW, beside=Beside(computing=0.5, moving=0.9, sending=0.8))
    found = predict(*one_product_one_gather(wait_first=False), beside).timeline
    sending = GATHER_S / 0.8
    assert found.step_s == pytest.approx(sending + PRODUCT_S - sending * 0.5)
    assert found.slowed_s == pytest.approx(found.step_s - PRODUCT_S)


def test_nothing_starts_before_the_host_has_launched_it():
    slow_host = with_rates(SLOW, launch_s=100.0)
    found = predict(*one_product_one_gather(wait_first=False), slow_host).timeline
    assert found.step_s == pytest.approx(200 + PRODUCT_S)
    assert found.launch_s == pytest.approx(200)


def test_a_host_that_computes_launches_nothing_meanwhile():
    host = with_rates(SLOW, launch_s=100.0, host_computes=True)
    found = predict(*one_product_one_gather(wait_first=False), host).timeline
    assert found.step_s == pytest.approx(200 + max(PRODUCT_S, GATHER_S - 100))


def test_what_is_interpreted_costs_the_host_time_for_each_operator():
    program, ctx = one_product_one_gather(wait_first=False)
    host = with_rates(SLOW, launch_s=1.0, operator_s=1e4)
    found = predict(program, ctx, host, lambda node: False, interpreted=True).timeline
    upto = list(program.calls()).index(next(n for n in program.calls() if "mm" in str(n.target))) + 1
    assert found.step_s == pytest.approx(1e4 * upto + PRODUCT_S)
    assert predict(program, ctx, host, lambda node: False).timeline.step_s < 1e4


def test_a_small_product_takes_as_long_as_its_bytes():
    quick = with_rates(SLOW, products={F32: Curve.flat(1e9)})
    found = predict(*one_product_one_gather(wait_first=False), quick).timeline
    assert found.compute_s == pytest.approx((6 + 12 + 8) * 4 / 10)


def test_a_causal_attention_does_half_of_the_work():
    def seconds(causal):
        small = Small()
        q, k, v = (small.input(n, cut((1, 2, 64, 16)), "batch", F32) for n in "qkv")
        both = small.call(aten._scaled_dot_product_flash_attention_for_cpu.default, q, k, v, 0.0, causal)
        parts = [small.call(operator.getitem, both, i) for i in range(2)]
        return predict(ended(small, *parts), small.ctx, SLOW).timeline.compute_s

    assert seconds(True) == pytest.approx(seconds(False) / 2)
    assert seconds(False) == pytest.approx(4 * 2 * 64 * 64 * 16)


def test_float8_products_run_at_their_own_rate():
    small = Small()
    a, b = (small.input(n, cut((16, 16)), "batch", torch.float8_e4m3fn) for n in "ab")
    scales = [small.input(n, cut(()), "batch", F32) for n in ("sa", "sb")]
    flipped = small.call(aten.t.default, b)
    out = small.call(aten._scaled_mm.default, a, flipped, *scales, None, None, torch.bfloat16)
    rates = with_rates(SLOW, products={torch.float8_e4m3fn: Curve.flat(2.0)}, memory=Curve.flat(1e9))
    assert predict(ended(small, out), small.ctx, rates).timeline.step_s == pytest.approx(2 * 16**3 / 2)


def test_a_dtype_without_a_rate_is_named():
    program, ctx = one_product_one_gather(wait_first=True)
    with pytest.raises(ir.CompileError, match=r"%mm_default computes in torch.float32, for which the cluster states no"):
        predict(program, ctx, with_rates(SLOW, products={}))


# ---- dry runs ---------------------------------------------------------------------------------------

MODEL = ModelConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=64)


PLAIN = CastConfig(param_dtype=None)


def options(folder="unused", mesh=None, **changes):
    """Return the options of a dry run of a tiny model on 64 ranks."""
    return replace(
        Config(
            model=MODEL,
            train=TrainConfig(seq_len=32, global_batch_size=8),
            mesh=mesh or MeshConfig(dp_shard=8, cp=2, tp=4),
            optim=OptimConfig(max_norm=1.0),
            passes=PassesConfig(PLAIN),
            cluster=ClusterConfig(),
            run=RunConfig(dir=str(folder), dry=True),
        ),
        **changes,
    )


@pytest.fixture(scope="module")
def sixty_four(tmp_path_factory):
    """Return the config, folder and report of a dry run on 64 ranks."""
    cfg = options(tmp_path_factory.mktemp("dry") / "run")
    dry_run(cfg)
    folder = Path(cfg.run.dir)
    return cfg, folder, json.loads((folder / "report.json").read_text())


def test_a_dry_run_leaves_a_folder_and_no_process_group(sixty_four):
    cfg, folder, report = sixty_four
    assert not dist.is_initialized()
    assert {path.name for path in folder.iterdir()} == {"config.yaml", "graphs", "report.json"}
    assert config.load(folder / "config.yaml") == cfg
    assert set(report["predicted"]) == {"peak_mem_bytes", "step_ms", "tokens_per_s_per_gpu", "mfu"}
    predicted = report["predicted"]
    assert predicted["tokens_per_s_per_gpu"] * predicted["step_ms"] == pytest.approx(1e3 * 8 * 32 / 64)
    flops = decoder_flops(MODEL, 32)
    assert predicted["mfu"] == pytest.approx(flops * predicted["tokens_per_s_per_gpu"] / 67e12)  # of fp32's peak
    assert report["prediction"]["ranks"] == 64


def test_the_timeline_accounts_for_the_whole_step(sixty_four):
    _, folder, report = sixty_four
    made_of, step_ms = report["prediction"], report["predicted"]["step_ms"]
    spent = made_of["compute_ms"] + made_of["launch_ms"] + sum(made_of["exposed_ms"].values())
    assert spent == pytest.approx(step_ms, rel=1e-3)
    assert max(event["end_ms"] for event in report["timeline"]) == pytest.approx(step_ms, abs=1e-3)
    by_stream: dict[str, float] = {}
    for event in report["timeline"]:
        assert event["start_ms"] >= by_stream.get(event["stream"], 0) - 1e-3, "a stream does one thing at a time"
        by_stream[event["stream"]] = event["end_ms"]
    assert set(by_stream) == {"compute", "fsdp", "cp", "tp"}
    (graph,) = (folder / "graphs").glob("*step_overlap.txt")
    names = {line.split(" ")[0][1:] for line in graph.read_text().splitlines() if line.startswith("%")}
    assert {event["node"] for event in report["timeline"]} <= names


def test_bytes_sent_are_those_of_the_accounting(sixty_four):
    _, _, report = sixty_four
    counted: dict[str, int] = {}
    for part in report["passes"][-1]["accounting"]["traffic"]:
        counted[part["axis"]] = counted.get(part["axis"], 0) + part["sent_bytes"]
    sent = report["prediction"]["sent_bytes"]
    assert {axis: links["intra"] for axis, links in sent.items()} == {
        "tp": counted["tp"], "cp": counted["cp"], "fsdp": counted["fsdp"]}  # tp and cp fill a node of 8
    # fsdp: 16 ranks on 8 nodes
    between = {axis: links["inter"] for axis, links in sent.items()}
    assert between == {"tp": 0, "cp": 0, "fsdp": pytest.approx(counted["fsdp"] * 7 / 15, abs=1)}


@pytest.fixture(scope="module")
def four():
    """Return the config, the programs and the prediction of a dry run on 4 ranks."""
    cfg = options(mesh=MeshConfig(dp_shard=2, tp=2), passes=PassesConfig(PLAIN, verify="none"))
    dry = compile_dry(cfg, None)
    return cfg, dry, predict_step(cfg, dry)


@pytest.mark.full
def test_memory_is_that_of_the_step_that_is_run(four):
    cfg, _, found = four
    batch = {key: torch.zeros(8, 32, dtype=torch.int64) for key in models.INPUTS}
    model = models.build(MODEL)
    weights = models.initial_parameters(model, 0, F32)
    step = compile_step(model, models.loss_fn, batch, mesh=cfg.mesh, optim=cfg.optim, passes=cfg.passes,
                        ranks="lockstep", initial=weights)
    (last,) = [p for p in step.report["passes"] if (p["program"], p["name"]) == ("step", "overlap")]
    assert found["predicted"]["peak_mem_bytes"] == last["accounting"]["peak_bytes"]


def test_with_microbatches_the_moments_lie_beside_what_accumulates():
    train, passes = TrainConfig(seq_len=32, global_batch_size=8, microbatches=4), PassesConfig(PLAIN, verify="none")
    cfg = options(mesh=MeshConfig(dp_shard=2), train=train, passes=passes, model=replace(MODEL, n_layers=1))
    step = compile_dry(cfg, None)
    found = predict_step(cfg, step)
    memory = found["prediction"]["memory"]
    parameters = sum(p.numel() for p in models.build(cfg.model).parameters())
    assert memory["program"] == "accumulate"
    assert memory["kinds"]["state of other programs"] >= 2 * parameters * 4 // 2  # Adam's two moments, of half of them
    times = {name: max(e["end_ms"] for e in found["timeline"] if e["program"] == name) for name in step.programs}
    assert found["predicted"]["step_ms"] == pytest.approx(4 * times["accumulate"] + times["apply"], rel=1e-3)


SLOWED = ClusterConfig(throttle=0.5, beside_computing=0.5, beside_moving=0.5, beside_sending=0.5)
QUICKER = {
    "intra_gb_s": 2.0, "inter_gb_s": 2.0, "hbm_gb_s": 2.0, "kernel_us": 0.5, "launch_us": 0.5, "operator_us": 0.5, "throttle": 2.0,
    "beside_computing": 2.0, "beside_moving": 2.0, "beside_sending": 2.0, "gpus_per_node": 2,
}


@pytest.mark.parametrize("field", QUICKER)
@pytest.mark.sample(2)
def test_a_better_cluster_is_never_slower(four, field):
    cfg, dry, _ = four
    value = getattr(SLOWED, field)
    better = replace(SLOWED, **{field: type(value)(value * QUICKER[field])})
    before, after = (predict_step(replace(cfg, cluster=c), dry)["predicted"]["step_ms"] for c in (SLOWED, better))
    assert after <= before


def test_model_flops_are_six_a_parameter_and_attention():
    cfg = ModelConfig(dim=16, n_layers=3, n_heads=2, n_kv_heads=2, ffn_dim=32, vocab_size=10)
    layer = 4 * 16 * 16 + 3 * 16 * 32 + 2 * 16
    assert decoder_flops(cfg, 8) == 6 * (3 * layer + 16 + 10 * 16) + 12 * 3 * 16 * 8
    assert decoder_flops(replace(cfg, tied=True), 8) == decoder_flops(cfg, 8)


def test_model_flops_are_those_of_the_experts_that_a_token_takes_and_of_heads_of_any_size():
    cfg = ModelConfig(dim=16, n_layers=3, n_heads=2, n_kv_heads=2, ffn_dim=32, vocab_size=10)
    two_of_eight = replace(cfg, experts=ExpertsConfig(8, 2, 16))  # as wide as the layer that they replace, and a router
    assert decoder_flops(two_of_eight, 8) == decoder_flops(cfg, 8) + 6 * 3 * 8 * 16
    latent = replace(cfg, latent=LatentConfig(4, 6, 2, 5))
    layer = 16 * 2 * 8 + 16 * (4 + 2) + 4 + 4 * 2 * (6 + 5) + 2 * 5 * 16 + 3 * 16 * 32 + 2 * 16
    assert decoder_flops(latent, 8) == 6 * (3 * layer + 16 + 10 * 16) + 6 * 3 * 2 * (8 + 5) * 8


# ---- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mesh": MeshConfig(tp=2)}, r"^mesh.dp_shard: -1 takes the remaining ranks.*set mesh.dp_shard, or cluster.gpus"),
        ({"cluster": ClusterConfig(gpus=12)}, "^mesh: dp_shard=8.*needs 64 ranks, not 12"),
        ({"passes": PassesConfig(remat=RematConfig(policy="offload"))}, "^passes.remat.policy: offload with run.dry=true"),
    ],
)
def test_what_a_dry_run_cannot_do_is_refused_with_nothing_written(tmp_path, changes, said):
    with pytest.raises(UserError, match=said):
        dry_run(options(tmp_path / "run", **changes))
    assert not list(tmp_path.iterdir())


def test_the_rest_of_the_gpus(tmp_path):
    cfg = options(mesh=MeshConfig(tp=2), cluster=ClusterConfig(gpus=48))
    assert validate(cfg, dry_world_size(cfg)).mesh.dp_shard == 24


def test_a_run_is_not_written_over(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="run.dir: .* contains a run"):
        dry_run(options(tmp_path))


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("cluster=h10", "cluster: 'h10' is not one of a100, auto, cpu, grand_teton, h100, h200; did you mean 'h100'?"),
        ("cluster.throttle=1.5", "cluster.throttle: 1.5 must be above 0 and at most 1"),
        ("cluster.rates=h10", "cluster.rates: 'h10' is not one of a100, cpu, h100; did you mean 'h100'?"),
        ("cluster.attention=flas2", "cluster.attention: 'flas2' is not one of flash2, cudnn, flash3; did you mean 'flash2'?"),
        ("cluster.intra_gbs=3", "cluster.intra_gbs: no such option; did you mean 'intra_gb_s'?"),
    ],
)
@pytest.mark.sample(2)
def test_a_bad_cluster_is_one_line(monkeypatch, capsys, tmp_path, argument, said):
    monkeypatch.chdir(tmp_path)
    named = () if argument.startswith("cluster=") else ("cluster=h100",)
    assert call("run.dry=true", "mesh.dp_shard=2", *named, argument) == 2
    assert capsys.readouterr().err.strip() == f"error: {said}"


def test_a_dry_run_is_one_process(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(app, "ranks", lambda: 2)
    assert call("run.dry=true", "mesh.dp_shard=2") == 2
    assert "error: run.dry: runs in one process, and 2 were started" in capsys.readouterr().err


NAMES = sorted({path.stem for path in (CONF / "cluster").glob("*.yaml")} - {"auto"})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sample(2)
def test_every_cluster_is_whole(name):
    given = compose([f"cluster={name}"])["cluster"]
    found = build(ClusterConfig, given, "cluster")
    assert found.name == name
    assert set(given) == {f.name for f in dataclasses.fields(ClusterConfig)} - {"gpus"}
    assert cluster_of(found).rates.memory.at(2**30) <= 1e9 * found.hbm_gb_s
    assert set(found.sources) <= set(given)


@pytest.mark.parametrize("path", sorted(TABLES.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_table_of_rates_can_be_read(path):
    assert read(path).protocols


def test_the_default_figures_are_those_of_h100():
    found = build(ClusterConfig, compose(["cluster=h100"])["cluster"])
    assert replace(found, sources={}, device=None) == ClusterConfig()
    assert isinstance(ClusterConfig().peak_tflops, ByDtype)
    moved = balance_of(found, "bfloat16").flops_per_moved_byte
    assert moved == pytest.approx(H100.flops_per_moved_byte, rel=1e-2)
