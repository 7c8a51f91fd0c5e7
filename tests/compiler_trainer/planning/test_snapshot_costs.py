"""A dry run tells what snapshots of an elastic job take: the bytes that ranks write, in memory and to other machines."""

from __future__ import annotations

import pytest

from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.device import for_predicting
from compiler_trainer.config.validate import validate
from compiler_trainer.models.subject import subject
from compiler_trainer.planning.dry import compile_dry, dry_run
from compiler_trainer.planning.snapshots import snapshot_costs
from compiler_trainer.step.captured import mesh_of

SMALL = ("model.dim=32", "model.n_layers=2", "model.n_heads=2", "model.n_kv_heads=2", "model.ffn_dim=48", "train.seq_len=16",
         "run.elastic=true", "run.dry=true", "cluster=h100", "cluster.gpus_per_node=4", "lower.backend=eager")  # fmt: skip


def config(*mesh):
    cfg = to_config(compose([*SMALL, *mesh]))
    return validate(for_predicting(cfg), mesh_of(cfg.mesh).world_size)


@pytest.mark.parametrize(("mesh", "machines"), [
    (["mesh.dp_shard=2"], 1),
    (["mesh.dp_replicate=2", "mesh.dp_shard=2"], 1),
    (["mesh.dp_shard=4", "mesh.cp=2"], 2),
    (["mesh.dp_shard=2", "mesh.tp=4"], 2),
])
@pytest.mark.sample(2)
def test_ranks_write_each_entry_once(mesh, machines):
    cfg = config(*mesh)
    step, ranks = compile_dry(cfg, None), mesh_of(cfg.mesh).world_size
    costs = snapshot_costs(cfg, step.programs, step.left_out)
    stored = 3 * sum(p.nbytes for p in subject(cfg).module.parameters())  # with two moments
    assert costs["rank_bytes"] * ranks == pytest.approx(stored, rel=0.02)  # padding, counters
    here = costs["rank_bytes"] * ranks / machines
    assert costs["machine_bytes"] == pytest.approx(here * (3 if machines == 1 else 5))
    assert costs["sent_bytes"] == pytest.approx(here if machines > 1 else 0)


@pytest.mark.full
def test_a_dry_run_prints_them(tmp_path, capsys):
    dry_run(config("mesh.dp_shard=8", f"run.dir={tmp_path / 'run'}"))
    output = capsys.readouterr().out
    assert "snapshots, every 10 steps" in output and "sent to the next machine" in output


def test_what_checkpoints_leave_out_is_not_counted():
    cfg = config("mesh.dp_shard=2")
    step = compile_dry(cfg, None)
    left_out = {f"model.{name}" for name, _ in subject(cfg).module.named_parameters()}
    all_bytes, others = (snapshot_costs(cfg, step.programs, names)["rank_bytes"] for names in (set(), left_out))
    assert others == pytest.approx(all_bytes * 2 / 3, rel=0.02)
