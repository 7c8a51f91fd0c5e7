"""Ahead-of-time compilation of a job for `lower.programs`, in one process without the job's ranks and devices."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from compiler_trainer.config.cluster import ClusterConfig
from compiler_trainer.config.device import for_predicting
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import Config
from compiler_trainer.config.validate import dry_world_size, validate
from compiler_trainer.data.datasets import check_vocabulary
from compiler_trainer.models.subject import subject
from compiler_trainer.request import CompileRequest
from compiler_trainer.step.captured import StepPrograms, mesh_of, one_microbatch
from compiler_trainer.step.program_cache import ProgramCache
from compiler_trainer.step.program_key import name_of_device
from compiler_trainer.step.programs import compile_programs
from compiler_trainer.training.folder import Dumps
from compiler_trainer.training.prepare import make_reproducible, read_data
from compiler_trainer.training.trainer import peek
from passes.lower.store import Store

CPU = torch.device("cpu")


def compile_ahead(cfg: Config, out: Path, tell: Callable[[str], None]) -> str:
    """Compile the programs of a job's ranks into a folder; return a sentence on its contents.

    Raises UserError if they cannot be stored.
    """
    cfg = validate(for_predicting(cfg), dry_world_size(cfg))
    device = CPU if cfg.cluster.host_computes else torch.device("cuda", 0)
    request, compiled = compile_job(cfg, device, device_name(cfg.cluster), Store(out), tell)
    key = compiled.report.key
    size = sum(path.stat().st_size for path in out.iterdir() if path.name.startswith(key))
    status = f"{'was there' if compiled.report.is_read else 'made'}: {key[:12]}, {', '.join(compiled.programs)}"
    return f"{status}, for {request.mesh.world_size:,} ranks on {request.device_name}; {size / 2**20:.1f} MiB in {out}"


def compile_job(
    cfg: Config, device: torch.device, name: str, store: Store, tell: Callable[[str], None]
) -> tuple[CompileRequest, StepPrograms]:
    """Return a job's request and its programs, which are compiled unless they are in the store, and stored.

    `name` is that of the devices if this machine has others, or empty. Raises UserError if programs cannot be stored.
    """
    if cfg.passes.verify == "numeric":
        raise UserError("passes.verify", "is numeric, which needs the values of weights; use spec")
    make_reproducible(cfg.train)
    datasets, trained = read_data(cfg), subject(cfg)
    check_vocabulary(datasets, trained.vocab_size)
    request = CompileRequest(
        model=trained.module,
        loss_fn=trained.loss,
        batch=one_microbatch(peek(datasets.train), cfg.train.microbatches),
        mesh=mesh_of(cfg.mesh),
        passes=cfg.passes,
        optim=cfg.optim,
        device=device,
        cluster=cfg.cluster,
        microbatches=cfg.train.microbatches,
        skip_nonfinite=cfg.train.nonfinite == "skip",
        evaluate=cfg.eval.interval is not None,
        entry_bounds=datasets.below,
        seed=cfg.train.seed,
        device_name=name,
    )
    with tempfile.TemporaryDirectory() as scratch:
        dumps = Dumps(Path(scratch, "graphs")) if cfg.run.dump_graphs else None
        cache = ProgramCache(dumps.folder if dumps else None, store)
        compiled = compile_programs(request, observe=dumps, tell=tell, cache=cache)
    if not compiled.report.key:
        raise UserError("model", f"{compiled.report.notes[-1]}; such a job compiles when it starts")
    return request, compiled


def device_name(cluster: ClusterConfig) -> str:
    """Return the name that a cluster's devices report; raise UserError if the cluster does not state it."""
    if cluster.host_computes:
        return name_of_device(CPU)
    if cluster.device is None:
        raise UserError("cluster.device", "is not set; give the GPU's name from torch.cuda.get_device_name() there")
    return cluster.device
