"""Run checks as one rank of a torchrun job: `worker.py FOLDER CHECK...` writes `FOLDER/CHECK.RANK.pt`."""

from __future__ import annotations

import functools
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1] / "support"))

from oracle import NO_DECAY, VOCAB, batches, llama, llama_loss, perceptron, points, squared_error, train_step  # noqa: E402
from played_cuda import played_cuda  # noqa: E402

from compiler_trainer import compile_step, models  # noqa: E402
from compiler_trainer.config.errors import UserError  # noqa: E402
from compiler_trainer.config.options import build  # noqa: E402
from compiler_trainer.config.schema import Config, ModelConfig  # noqa: E402
from compiler_trainer.config.validate import validate  # noqa: E402
from compiler_trainer.models import Llama  # noqa: E402
from compiler_trainer.planning.dry import compile_dry, predict_step  # noqa: E402
from compiler_trainer.step.ranks import start_ranks, stop_ranks  # noqa: E402
from compiler_trainer.training.anomalies import differences  # noqa: E402
from compiler_trainer.training.speed import PeakMemory  # noqa: E402
from passes.lower import inductor  # noqa: E402

F32 = torch.float32


def train(mesh, model=None, loss_fn=llama_loss, data=None, backend="eager", schedule="1f1b", async_tp="none",
          batch_overlap=1, **options):
    """Return metrics, evaluation, full parameters, counts of bodies, names of groups, and replica differences."""
    model, data = model or llama(dtype=F32), data or batches(rows=6)
    step = compile_step(model, loss_fn, data[0], mesh=mesh, optim=NO_DECAY, lower={"backend": backend},
                        passes={"verify": "none", "context": {"method": "ring"}, "pipeline": {"schedule": schedule},
                                "communication": {"async_tp": async_tp, "batch_overlap": batch_overlap}},
                        **options)
    metrics = train_step(step, data)
    return {"metrics": metrics, "evaluation": step.evaluate(data[0]), "state": step.state_dict(),
            "bodies": dict(inductor.counts), "groups": list(step.runtime.groups),
            "differences": list(map(str, differences(step)))}


def disagree():
    """Compile another program on the last rank; return the error message of this rank."""
    another = dist.get_rank() == dist.get_world_size() - 1
    try:
        compile_step(perceptron(), squared_error, points()[0], mesh={"dp_shard": dist.get_world_size()},
                     optim=NO_DECAY | {"max_norm": 0.25 if another else 0.5}, lower={"backend": "eager"})
    except RuntimeError as error:
        return str(error)
    return "agreed"


def drawn_apart():
    """Give a weight another value on the last rank; return the error message of this rank."""
    model = perceptron(dtype=F32)
    with torch.no_grad():
        next(reversed([*model.parameters()]))[-1] += 1e-6 * (dist.get_rank() == dist.get_world_size() - 1)
    try:
        compile_step(model, squared_error, points(dtype=F32)[0], mesh={"dp_shard": dist.get_world_size()}, lower={"backend": "eager"})
    except UserError as error:
        return str(error), [name for name, _ in model.named_parameters()][-1]


def raise_on_rank_1():
    """Raise on rank 1 after its first step, while the other ranks wait for it in their second."""
    data = points()
    step = compile_step(perceptron(), squared_error, data[0], mesh={"dp_shard": 2}, lower={"backend": "eager"})
    step(data[0])
    if dist.get_rank() == 1:
        raise ValueError("rank 1 gives up")
    step(data[1])


def flipped():
    """Flip a bit in a weight of the last rank; return the differences found, and their number after a repair."""
    data, last = points(dtype=F32), dist.get_world_size() - 1
    step = compile_step(perceptron(dtype=F32), squared_error, data[0], mesh={"dp_replicate": last + 1}, lower={"backend": "eager"})
    step(data[0])
    name, (_, local) = next((n, t) for n, t in step.tensors().items() if n.endswith("weight"))
    if dist.get_rank() == last:
        local[last].detach().view(torch.int32)[0, 0] ^= 1 << 26
    before = differences(step)
    step.runtime.send(local, 0, (last,), step.state[name].like)
    return name, [(difference.name, difference.right, difference.wrong) for difference in before], len(differences(step))


CUT = {  # name -> mesh and options of jobs compiled as one program and in segments
    "dp": ({"dp_shard": 2}, {}, {}),
    "tp": ({"tp": 2}, {}, {}),
    "cp": ({"cp": 2}, {}, {}),
    "float8": ({"dp_shard": 2}, {"cast": {"param_dtype": "bfloat16", "float8": "tensorwise"}}, {}),
    "remat": ({"dp_shard": 2}, {"remat": {"policy": "full"}}, {}),
    "microbatches": ({"dp_shard": 2}, {}, {"microbatches": 2}),
    "turns": ({"tp": 2}, {"communication": {"batch_overlap": 2}}, {"microbatches": 2}),
}


def wide_llama():
    """Return a Llama whose dims are multiples of 16, as float8 requires."""
    torch.manual_seed(0)
    cfg = ModelConfig(dim=32, n_layers=2, n_heads=2, n_kv_heads=2, ffn_dim=64, vocab_size=VOCAB)
    return Llama(cfg)


def cut(name):
    """Return metrics of each step under Inductor, in segments and as one program."""
    mesh, passes, options = CUT[name]
    model, data = wide_llama() if name == "float8" else llama(2, dtype=F32), batches(rows=4)
    results = []
    for enabled in (True, False):
        step = compile_step(model, llama_loss, data[0], mesh=mesh, optim=NO_DECAY, lower={"backend": "inductor"},
                            passes={**passes, "verify": "none", "segment": {} if enabled else {"max_nodes": None}}, **options)
        results.append(train_step(step, data))
    return results


def recorded(mesh, layers, backend, schedule):
    """Return metrics and parameters, without and with played CUDA graphs, each with the number of recordings."""
    options = {"mesh": mesh, "optim": NO_DECAY, "microbatches": 4, "lower": {"backend": backend, "cudagraphs": "auto"},
           "passes": {"verify": "none", "pipeline": {"schedule": schedule}}}
    results = []
    for context in (nullcontext(), patch("compiler_trainer.step.runtime.why_nothing_is_recorded", lambda device: "")):
        with played_cuda() as done, context:
            data = batches(rows=8)
            step = compile_step(llama(layers, tied=True, dtype=F32), llama_loss, data[0], **options)
            metrics = [step(data[i % len(data)]) for i in range(5)]
            results.append(((metrics, {name: t.tolist() for name, t in step.state_dict().items()}), done.count("record")))
    return results


def memory(schedule, microbatches):
    """Return this pipeline rank's peak bytes in a step: measured, and as a dry run predicts them."""
    options = {
        "model": {"dim": 64, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 128, "vocab_size": VOCAB},
        "train": {"seq_len": 64, "global_batch_size": microbatches, "microbatches": microbatches},
        "passes": {"cast": {"param_dtype": None}, "verify": "none", "pipeline": {"schedule": schedule}},
        "mesh": {"pp": 2, "dp_shard": 1},
        "lower": {"backend": "eager"},
    }
    cfg = validate(build(Config, options), 2)
    model = models.build(cfg.model, F32).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    batch = {name: torch.zeros(microbatches, 64, dtype=torch.int64) for name in models.INPUTS}
    step = compile_step(model, models.loss_fn, batch, mesh=cfg.mesh, optim=cfg.optim, passes=cfg.passes, lower=cfg.lower,
                        microbatches=microbatches, evaluate=False)
    step(batch)
    peak = PeakMemory(torch.device("cpu"), [x for state in step.state.values() for x in state.local.values()])
    peak.during(lambda: step(batch))
    predicted = predict_step(cfg, compile_dry(cfg, None))["prediction"]["pipeline"]["memory"][dist.get_rank()]
    return {"measured": peak.bytes, "predicted": predicted["bytes"], "kinds": predicted["kinds"]}


MEMORIES = (("1f1b", 4), ("1f1b", 16), ("zero_bubble", 4), ("interleaved", 4))
CHECKS = {
    **{f"cut_{name}": functools.partial(cut, name) for name in CUT},
    "flipped": flipped,
    "shard2": lambda: train({"dp_shard": 2}),
    "replicate2": lambda: train({"dp_replicate": 2}),
    "inductor2": lambda: train({"dp_shard": 2}, perceptron(dtype=F32), squared_error, points(dtype=F32), "inductor"),
    "shard4": lambda: train({"dp_shard": 4}),
    "ring4": lambda: train({"cp": 4}),
    "hybrid4": lambda: train({"dp_replicate": 2, "dp_shard": 2}),
    "context4": lambda: train({"dp_shard": 2, "cp": 2}),
    "stages2": lambda: train({"pp": 2}, llama(4, tied=True, dtype=F32), schedule="zbv", microbatches=3),
    "stages4": lambda: train({"pp": 2, "dp_shard": 2}, llama(2, dtype=F32), backend="inductor", schedule="zero_bubble", microbatches=3),
    "rings2": lambda: train({"tp": 2}, async_tp="all"),
    "turns2": lambda: train({"tp": 2}, batch_overlap=2, microbatches=2),
    "rings4": lambda: train({"tp": 4}, async_tp="all"),
    "memory2": lambda: {case: memory(*case) for case in MEMORIES},
    "recorded2": lambda: recorded({"pp": 2}, 4, "eager", "zbv"),
    "recorded4": lambda: recorded({"pp": 2, "dp_shard": 2}, 4, "inductor", "interleaved"),
    "disagree": disagree,
    "drawn_apart": drawn_apart,
    "raise": raise_on_rank_1,
}


def main(folder: str, *checks: str) -> None:
    """Run the checks on this rank."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/kernels"  # empty at first, shared by all ranks of a machine
    start_ranks()
    try:
        for check in checks:
            torch.save(CHECKS[check](), f"{folder}/{check}.{dist.get_rank()}.pt")
    finally:
        stop_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])
