"""The first machine decides which processes take part in a round, when others come, are silent, or lose some."""

from __future__ import annotations

import json
import signal
import time

import pytest
import torch.distributed as dist

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import MeshConfig
from compiler_trainer.elastic import rounds
from compiler_trainer.elastic.machine import BEAT, CAME, ENDED, GONE, ORDERS, Came, Ended, Orders, push
from compiler_trainer.elastic.member import CAPACITY, COMING, ELASTIC, LEFT, LISTED, READY, TROUBLE, ask_for


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def job_of(store, machines, spares=3, elastic=True, processes=2, gpus=0):
    """Return the rounds of a job whose machines came in the opposite order; the engine's numbers order them."""
    job = rounds.Rounds(store, machines, spares)
    if elastic:
        store.set(ELASTIC, "")
    for machine in range(machines):
        push(store, CAME, Came(machine, machines - 1 - machine, f"node{machine}", processes, gpus, machines))
    job.poll()
    return job


def orders(store, machine):
    members, *others = json.loads(store.get(ORDERS.format(machine)))
    return Orders(tuple(members), *others)


def listed(store, job):
    return json.loads(store.get(LISTED.format(job.round)))


def lost(store, machine, member, code=-signal.SIGKILL, is_out=False, is_stopping=False):
    push(store, ENDED, Ended(machine, member, code, is_out, is_stopping))


def silence(job, machine):
    """Let a machine be silent for long."""
    job.poll()
    last, _ = job.beats[machine]
    job.beats[machine], job.looked = (last, time.monotonic() - 60), time.monotonic() - rounds.BEATS_S


def test_ranks_follow_the_engines_numbers_of_machines(store):
    job = job_of(store, 2)
    assert (orders(store, 1).members, orders(store, 0).members) == ((0, 1), (2, 3))
    assert listed(store, job) == [[0, 1], [1, 1], [2, 0], [3, 0]] and orders(store, 0).size == 4


def test_no_round_begins_before_all_machines_have_come(store):
    job = rounds.Rounds(store, 2, 3)
    push(store, CAME, Came(0, 0, "node0", 2, 0, 2))
    job.poll()
    assert job.round == -1 and not store.check([ORDERS.format(0)])


def test_machines_that_do_not_come_are_counted(store, capfd):
    job = rounds.Rounds(store, 3, 3)
    push(store, CAME, Came(0, 0, "node0", 2, 0, 3))
    job.began -= rounds.COMING_S + 1
    job.poll()
    assert job.is_over and orders(store, 0).code == 1
    assert capfd.readouterr().err.startswith("error: 1 of 3 machines came within 600 s; start compiler-trainer launch on each")


@pytest.mark.parametrize(("came", "problem"), [
    (Came(2, 1, "node2", 2, 0, 3), "error: machine node2 has --nnodes=3; the job has 2 machines, counted from 0\n"),
    (Came(2, 0, "node2", 2, 0, 2), "error: machine node2 has --node-rank=0, as another one; the job has 2 machines, counted from 0\n"),
])
def test_a_machine_without_a_place_is_refused(came, problem, store, capfd):
    job = rounds.Rounds(store, 2, 3)
    push(store, CAME, Came(0, 0, "node0", 2, 0, 2))
    push(store, CAME, came)
    job.poll()
    assert capfd.readouterr().err == problem and orders(store, 2).code == 2 and job.round == -1


def test_a_lost_process_is_replaced_on_its_machine_and_joins_in_its_place(store, capfd):
    job = job_of(store, 2)
    lost(store, 1, 1)
    job.poll()
    assert capfd.readouterr().err == "rank 1 is gone (SIGKILL): 3 are left, and another one starts\n"
    assert orders(store, 1).members == (0, 1, 4) and listed(store, job) == [[0, 1], [2, 0], [3, 0]] and store.check([COMING.format(1)])
    store.set(READY.format(4), "")
    store.set(LEFT.format(1), "")
    job.poll()
    assert listed(store, job) == [[0, 1], [4, 1], [2, 0], [3, 0]]


def test_a_silent_machine_is_left_out_and_ends_if_it_is_heard_of_again(store, capfd):
    job = job_of(store, 2, spares=0)
    silence(job, 0)
    job.poll()
    assert capfd.readouterr().err == "machine node0 is silent, and with it ranks 2, 3: 2 are left\n"
    assert listed(store, job) == [[0, 1], [1, 1]] and orders(store, 0) == Orders((2, 3), 4, signal.SIGKILL, 1)
    lost(store, 0, 2)
    job.poll()
    assert job.round == 1 and not capfd.readouterr().err
    push(store, CAME, Came(2, 1, "node0", 3, 0, 2))
    job.poll()
    assert orders(store, 2).members == (4, 5, 6) and capfd.readouterr().err == "machine node0 has come, with 3 processes\n"


def test_a_machine_that_is_heard_of_stays(store):
    job = job_of(store, 2)
    silence(job, 0)
    store.add(BEAT.format(0), 1)
    job.poll()
    assert job.round == 0 and len(job.machines) == 2


def test_silence_counts_sooner_if_ranks_have_failed(store):
    job = job_of(store, 2)
    for is_lost, last in enumerate((0.5, 2.0), 1):
        job.looked = time.monotonic() - rounds.BEATS_S
        job.beats[0] = b"", time.monotonic() - last
        store.set(TROUBLE.format(job.round), "")
        job.poll()
        assert len(job.machines) == 3 - is_lost


def test_nobody_is_lost_when_this_process_was_held_up(store):
    job = job_of(store, 2)
    silence(job, 0)
    job.looked -= 60
    job.poll()
    assert len(job.machines) == 2


def test_a_silent_machine_ends_a_job_that_is_not_elastic(store):
    job = job_of(store, 2, elastic=False)
    silence(job, 0)
    job.poll()
    assert job.code == 1 and orders(store, 1).signal == signal.SIGTERM


def test_a_failed_process_ends_all_machines_with_its_exit_code(store):
    job = job_of(store, 2)
    lost(store, 0, 2, code=5)
    job.poll()
    assert orders(store, 1).signal == orders(store, 0).signal == signal.SIGTERM and job.code == 5
    for machine, member in ((0, 3), (1, 0), (1, 1)):
        lost(store, machine, member, code=3)
    job.poll()
    assert job.is_over and orders(store, 0).code == orders(store, 1).code == 5


def test_processes_that_are_asked_to_end_are_no_losses(store):
    job = job_of(store, 2)
    lost(store, 0, 2, is_stopping=True)
    job.poll()
    assert job.round == 0 and job.code == 137 and job.spares == 3


def test_a_larger_mesh_starts_processes_where_gpus_are_free(store):
    job = job_of(store, 2, processes=1, gpus=2)
    job.resize(json.dumps({"mesh": {}, "ranks": 4}))
    assert [len(orders(store, machine).members) for machine in range(2)] == [2, 2]


def test_a_mesh_of_more_ranks_than_usable_gpus_is_refused(store):
    job = job_of(store, 2, processes=2, gpus=2)
    lost(store, 0, 3, code=0, is_out=True)
    store.set("out3", "it is slow")
    job.poll()
    assert store.get(CAPACITY) == b"3"
    with pytest.raises(UserError, match="^mesh: needs 4 ranks, and the job has 3 GPUs; choose smaller sizes"):
        ask_for(f"127.0.0.1:{store.port}", MeshConfig(dp_shard=4), 4)


def test_the_first_machine_waits_for_others_to_read_the_exit_code(store):
    job = job_of(store, 2)
    assert job.has_followers()
    store.set(GONE.format(1), "")  # the first machine by the engine's numbers
    assert job.has_followers()
    store.set(GONE.format(0), "")
    assert not job.has_followers()
