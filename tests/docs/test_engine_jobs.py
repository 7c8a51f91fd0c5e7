"""The jobs for Kubernetes that a guide shows fit the schemas of Kubeflow Trainer and JobSet, and start our command."""

from __future__ import annotations

import re
from pathlib import Path

import kubeflow_trainer_api.models as schemas
import yaml

from compiler_trainer.cli.verbs.launch import split

GUIDE = Path(__file__).parents[2] / "docs/guides/several-nodes.md"
JOBS = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.DOTALL)]
TYPES = {"TrainJob": schemas.TrainerV1alpha1TrainJob, "JobSet": schemas.JobsetV1alpha2JobSet}


def test_they_fit_the_schemas():
    jobs = [job for job in JOBS if "kind" in job]
    assert [job["kind"] for job in jobs] == ["TrainJob", "JobSet"]
    for job in jobs:  # an entry that a schema does not know would be missing afterwards
        assert TYPES[job["kind"]].from_dict(job).to_dict() == job


def test_their_command_starts_ranks_with_the_options():
    train_job, job_set = (job["spec"] for job in JOBS if "kind" in job)
    pod = job_set["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    for place in (train_job["trainer"], pod):
        assert place["command"] == ["compiler-trainer", "launch"] and split(place["args"]) == ([], place["args"])
    (cloud,) = (job for job in JOBS if "run" in job)
    assert cloud["run"].startswith("compiler-trainer launch recipe=")
    assert set(cloud["resources"]["job_recovery"]) == {"max_restarts_on_errors", "recover_on_exit_codes"}
