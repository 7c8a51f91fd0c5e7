"""A calibration of a machine, and its figures as a cluster."""

from __future__ import annotations

import pytest
import yaml
from commands import call

from compiler_trainer.calibrate import probes
from compiler_trainer.calibrate.measure import options_of
from compiler_trainer.config.device import cluster_of
from compiler_trainer.config.options import build
from compiler_trainer.config.schema import ClusterConfig


@pytest.fixture
def quick(monkeypatch):
    """Use probes of small sizes."""
    monkeypatch.setattr(probes, "BUDGET_S", 1e-4)
    monkeypatch.setattr(probes, "MATMUL_SIZES", ((8, 8), (16, 16), (32, 32)))
    monkeypatch.setattr(probes, "ATTENTION_LENGTHS", (16, 32))
    monkeypatch.setattr(probes, "ADDITION_MIB", (0.01, 0.02))


def test_what_one_rank_measures_is_a_cluster(quick, tmp_path):
    found = probes.Probes(0, 1, 1, 0).measure_all()
    options = options_of("here", found)
    cluster = cluster_of(build(ClusterConfig, yaml.safe_load(yaml.safe_dump(options))))
    assert 0 < cluster.rates.kernel_s < 1e-2 and not cluster.links.measured
    assert options["sources"]["intra_gb_s"] == options["sources"]["inter_gb_s"] == "not measured"
    gflop, tflops = found["products"]["float32"][-1]
    assert gflop == pytest.approx(2 * 32**3 / 1e9, rel=1e-3)
    (curve,) = [c for dtype, c in cluster.rates.products.items() if "float32" in str(dtype)]
    assert curve.at(1e9 * gflop) == pytest.approx(1e12 * tflops)


@pytest.mark.full
def test_two_ranks_calibrate_this_machine_and_a_dry_run_takes_it(tmp_path, capsys):
    path = tmp_path / "cluster" / "here.yaml"
    assert call("calibrate", "--out", path, "--ranks", "2") == 0
    printed = capsys.readouterr().out
    assert f"{path}: 2 ranks, measured in" in printed and "not measured: context_gib, inter_gb_s;" in printed
    cluster = cluster_of(build(ClusterConfig, yaml.safe_load(path.read_text())))
    assert set(cluster.links.measured) == {
        (kind, 2) for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "shift")}


@pytest.mark.parametrize(("arguments", "says"), [
    (("--out", "x.yaml", "--ranks", "0"), "--ranks, --threads: must be at least 1"),
    (("--out", "x.yaml", "--clock", "cpu", "--threads", "2"), "--clock: is cpu, which adds up the time of all threads"),
    (("--out", "cluster/desk"), "--out: cluster/desk is no name of a YAML file; end it with .yaml"),
    (("--out", "file/cluster/desk.yaml"), "--out: file/cluster cannot be written: Not a directory; choose another"),
])  # fmt: skip
def test_bad_input_is_refused_before_measuring(capsys, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert call("calibrate", *arguments) == 2
    assert capsys.readouterr().err.startswith(f"error: {says}")
