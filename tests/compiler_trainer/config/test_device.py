"""`auto` is resolved when the device is known: the cluster, and the dtype of parameters in compute."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compiler_trainer import compile_step
from compiler_trainer.cli.verbs.plan import question
from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.device import cluster_of_device, for_predicting, for_running, passes_on
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import AUTO, CastConfig, PassesConfig

ON_CPU, ON_GPU = (None, None), ("bfloat16", "float32")


@pytest.fixture
def on(monkeypatch):
    """Simulate a machine with a GPU of that name; without a name, one without a GPU."""

    def become(name=None):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: name is not None)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)

    return become


def job(*overrides):
    return to_config(compose(overrides))


def outcome(cfg):
    return cfg.cluster.name, (cfg.passes.cast.param_dtype, cfg.passes.cast.reduce_dtype)


@pytest.mark.parametrize(
    "name, cluster",
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 PCIe", None),  # a different GPU whose name contains the name of another
        ("NVIDIA GH200 480GB", None),
        (None, "cpu"),
    ],
)
@pytest.mark.sample(2)
def test_the_cluster_is_that_of_the_device(on, name, cluster):
    on(name)
    assert cluster_of_device() == cluster
    cfg = for_running(job("cluster.gpus=16"))
    assert outcome(cfg) == (cluster or "auto", ON_CPU if name is None else ON_GPU)
    assert cfg.cluster.gpus == 16 and for_running(cfg) == cfg


def test_figures_are_those_of_the_file(on):
    on("NVIDIA H200")
    assert for_running(job()).cluster.hbm_gb_s == 4800.0 and job().cluster.hbm_gb_s != 4800.0


def test_what_is_named_is_predicted_whatever_the_device(on):
    for name in (None, "NVIDIA H200"):
        on(name)
        assert outcome(for_predicting(job("cluster=h100"))) == ("h100", ON_GPU)
        assert outcome(for_predicting(job("cluster=cpu"))) == ("cpu", ON_CPU)
        assert outcome(question(["cluster=a100"], [], {}).cfg) == ("a100", ON_GPU)
    assert outcome(for_predicting(job())) == ("h200", ON_GPU)


@pytest.mark.parametrize("name", [None, "NVIDIA H100 PCIe"])
def test_without_a_known_gpu_a_prediction_needs_a_name(on, name):
    on(name)
    with pytest.raises(UserError, match="^cluster: auto, but no cluster describes a GPU here .*; name one, as cluster=h100$"):
        for_predicting(job())


def test_a_mesh_is_planned_for_a_known_device_alone(on):
    on("NVIDIA H100 PCIe")
    with pytest.raises(UserError, match="^cluster: auto, but no cluster describes NVIDIA H100 PCIe; name one to plan for"):
        for_running(job("mesh=auto"))
    on()
    assert for_running(job("mesh=auto")).mesh == AUTO


def test_a_figure_goes_with_a_name():
    with pytest.raises(UserError, match="^cluster.throttle: goes with a named cluster; set cluster=h100, too, for example$"):
        job("cluster.throttle=0.5")
    assert job("cluster=h100", "cluster.throttle=0.5").cluster.throttle == 0.5


def test_what_is_stated_stays():
    for stated in (CastConfig("float32"), CastConfig(None), CastConfig("bfloat16")):
        assert passes_on(PassesConfig(stated), True).cast == stated
    assert passes_on(PassesConfig(CastConfig(reduce_dtype="bfloat16")), True).cast == CastConfig("bfloat16", "bfloat16")


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_step_computes_as_its_device_does(monkeypatch, on_gpu):
    batch, calls = {"x": torch.tensor([[0, 1], [2, 3]])}, []

    def record(passes, of_device):
        calls.append(of_device)
        return passes_on(passes, on_gpu)

    def first_loss(**how):
        torch.manual_seed(0)
        loss = compile_step(nn.Embedding(4, 4), lambda model, b: model(b["x"]).square().mean(), batch, ranks="lockstep", **how)(batch)
        return float(loss["loss"])

    stated = {"param_dtype": "bfloat16", "reduce_dtype": "float32"} if on_gpu else {"param_dtype": None}
    expected = first_loss(passes={"cast": stated})
    monkeypatch.setattr("compiler_trainer.step.compile.passes_on", record)
    assert first_loss() == expected and calls == [False]
