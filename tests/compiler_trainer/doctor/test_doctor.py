"""`doctor` reports facts about the machine and tells working features from failing ones."""

from __future__ import annotations

import dataclasses
import math

import pytest
from commands import call

from compiler_trainer.doctor import machine, probes

EAGER = probes.PROBES[0]


def test_the_machine_is_described():
    found = {fact.name: fact.text for fact in machine.facts()}
    assert {"versions", "processor", "memory", "C++ compiler", "GPUs", "kernels", "loopback"} <= set(found)
    assert "torch 2." in found["versions"] and all(found.values())


def no_loopback(*args, **how):
    raise OSError("Cannot assign requested address")


WRONG = {
    "C++ compiler": lambda patch: patch.setenv("CXX", "no-such-compiler"),
    "kernels": lambda patch: patch.setenv("TORCHINDUCTOR_CACHE_DIR", "/proc/kernels"),
    "interfaces": lambda patch: patch.setenv("GLOO_SOCKET_IFNAME", "nowhere0"),
    "loopback": lambda patch: patch.setattr(machine.socket, "create_server", no_loopback),
    "memory": lambda patch: patch.setattr(machine, "memory", lambda: (24.0, 11.0)),
    "GPUs": lambda patch: patch.setattr(machine.torch.cuda, "is_available", no_loopback),  # a driver that raises
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named_with_a_fix(name, monkeypatch):
    monkeypatch.setattr(machine, "memory", lambda: (24.0, 20.0))
    assert not {fact.name: fact.fix for fact in machine.facts()}[name]
    WRONG[name](monkeypatch)
    assert {fact.name: fact.fix for fact in machine.facts()}[name]


@pytest.mark.parametrize(("nccl", "gloo", "variables"), [
    ("^docker0", "", []), ("=eth0", "eth0", []), ("eth", "lo,eth0", []), ("lo,eth9", "", []), ("^=lo,=eth0", "", []),
    ("eth9", "", ["NCCL"]), ("=et", "", ["NCCL"]), ("^eth,lo", "eth", ["GLOO", "NCCL"]), ("eth0", "eth0,eth9", ["GLOO"])])
def test_interfaces_are_those_that_nccl_and_gloo_take(nccl, gloo, variables, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", nccl)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", gloo)
    assert [*machine.unmatched(["lo", "eth0"])] == [f"{name}_SOCKET_IFNAME" for name in variables]


def test_features_that_do_not_fit_the_ranks_are_left_out(capsys):
    every, chosen = ([probe.name for probe in probes.probes(ranks)] for ranks in (2, 3))
    left_out = [line.split(" is left out: ")[0] for line in capsys.readouterr().out.splitlines()]
    assert left_out[:3] == ["expert parallelism", "pipeline stages", "pipeline stages that offload"]
    assert chosen == [name for name in every if name not in left_out]


def test_each_feature_works_fails_or_says_why(monkeypatch, capsys):
    exact = dataclasses.replace(EAGER, name="exact", allowed=0.0)
    refused = dataclasses.replace(EAGER, name="refused", options=("lower.backend=eager", "optim.lr=-1"))
    again = dataclasses.replace(refused, name="again")
    monkeypatch.setattr(probes, "PROBES", (EAGER, exact, refused, again))
    assert call("doctor") == 1
    rows = {line.split("│")[1].strip(): line for line in capsys.readouterr().out.splitlines() if line.count("│") == 8}
    assert "works" in rows["eager"] and "FAILS" in rows["exact"] and "FAILS" in rows["refused"] and "must be" in rows["refused"]
    assert "as refused" in rows["again"]


def test_of_a_compiler_s_error_what_it_printed_is_shown():
    failure = RuntimeError("C++ compile error\n\nCommand:\ng++ " + 400 * "-D X " + "\n\nOutput:\ncannot find -lgone\n")
    assert probes.shortened(failure) == "RuntimeError: C++ compile error cannot find -lgone"
    assert probes.shortened(ValueError("no\n number")) == "ValueError: no number"


def test_an_error_is_of_what_the_step_computes(monkeypatch):
    """A model trained with a wrong rate exceeds the tolerance."""
    job = probes.job(EAGER, 1)
    assert probes.worst_error(job) < EAGER.allowed
    monkeypatch.setattr(probes, "difference", lambda ours, theirs: probes_difference(1.001 * ours, theirs))
    assert EAGER.allowed < probes.worst_error(job) < math.inf


probes_difference = probes.difference


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_all_features_work_here(ranks, capfd):
    assert call("doctor", "--ranks", ranks) == 0
    assert f"features work, ranks: {ranks}" in capfd.readouterr().out
