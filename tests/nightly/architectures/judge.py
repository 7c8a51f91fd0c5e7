"""Judge one architecture; run as a process, which prints a line of JSON for each mesh.

A small model of that type, with random weights, is trained by jobs whose `model.path` is a folder with its config.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers.utils.logging import set_verbosity_error

from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.device import resolve_auto
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import Config
from compiler_trainer.config.validate import ranks_of, validate
from compiler_trainer.models.documents import UNTRIED
from compiler_trainer.models.probes import way_of
from compiler_trainer.parity import compare, oracle
from compiler_trainer.parity.compare import Outcome
from compiler_trainer.parity.of_config import SMALL, check, settings_of, subject_of
from compiler_trainer.parity.oracle import Found
from compiler_trainer.parity.subject import Settings, Subject
from tests.nightly.architectures.tiny import tiny

Record = dict[str, Any]
DOCUMENTS, HALF = "documents", "bf16"
MESHES = {
    "dp_shard 2 x tp 2": ["mesh.dp_shard=2", "mesh.tp=2"],
    "cp 2": ["mesh.cp=2"],
    "pp 2": ["mesh.pp=2"],
    "ep 2": ["mesh.dp_shard=2", "mesh.ep=2"],
    HALF: ["mesh.dp_shard=2", "mesh.tp=2"],
}
NAMES = (DOCUMENTS, *MESHES)
NEAR = 5e-2  # relative difference of a loss and a gradient norm in bf16


def judge(kind: str, meshes: Sequence[str]) -> Iterator[Record]:
    """Yield the record on each mesh (`DOCUMENTS` is one); all are "unbuilt" if no small model can be built."""
    try:
        config = tiny(kind)
        first = of_documents(config)
    except Exception as error:
        yield from ({"mesh": mesh, "verdict": "unbuilt", "why": brief(error)} for mesh in meshes)
        return
    attention = "documents" if first["verdict"] == "right" else "causal"
    with tempfile.TemporaryDirectory() as folder:
        config.architectures = None
        config.save_pretrained(folder)
        options = [f"model.path={folder}", f"model.attention={attention}"]
        for mesh in meshes:
            began = time.perf_counter()
            record = first if mesh == DOCUMENTS else on_mesh(mesh, options)
            yield {"mesh": mesh} | record | {"seconds": round(time.perf_counter() - began, 1)}


def of_documents(config: Any) -> Record:
    """Return how documents of a sequence are kept apart, "right" if logits are those of each document alone."""
    try:
        way = way_of("documents", config)
    except UserError as error:
        return {"verdict": "refused", "why": str(error)}
    if way == UNTRIED:
        raise ValueError("no small model can be built")
    return {"verdict": "right", "why": "", "way": way}


def on_mesh(mesh: str, options: Sequence[str]) -> Record:
    """Return the record of three steps on a mesh."""
    try:
        overrides = [*SMALL, "model=hf", "model.init=random", *options, *MESHES[mesh]]
        cfg = resolve_auto(to_config(compose(overrides)), on_gpu=False)
        cfg = validate(cfg, ranks_of(cfg.mesh))
        outcome = in_half(cfg) if mesh == HALF else check(cfg)
    except UserError as error:
        return {"verdict": "refused", "why": str(error)}
    except Exception as error:
        return {"verdict": "crash", "why": brief(error)}
    if outcome.verdict in ("refused", "crash"):
        return {"verdict": outcome.verdict, "why": outcome.reason}
    why = "" if outcome.verdict == "right" else str(outcome)
    return {"verdict": outcome.verdict, "why": why, "error": outcome.error, "allowed": outcome.allowed}


def in_half(cfg: Config) -> Outcome:
    """Return the verdict on the loss and the gradient norm of the first step with weights in bf16."""
    subject, settings = subject_of(cfg), settings_of(cfg)
    try:
        expected = oracle.train(subject, settings)[0]
    except Exception as error:
        return Outcome("refused", where="eager PyTorch", why=brief(error))
    cast = replace(cfg.passes.cast, param_dtype="bfloat16")
    try:
        actual = compare.train(subject, replace(settings, passes=replace(cfg.passes, cast=cast)))[0][0]
    except Exception as error:
        return compare.failed(error)
    largest, name = largest_difference(actual, expected)
    allowed = NEAR if largest <= NEAR else max(NEAR, 2 * effect_of_rounding(subject, settings, expected))
    return Outcome("right" if largest <= allowed else "wrong", largest, name, allowed=allowed)


def largest_difference(actual: Found, expected: Found) -> tuple[float, str]:
    """Return the largest difference of the loss and the gradient norm, and which it is."""
    return max((compare.difference(actual[name], expected[name]), name) for name in ("loss", "grad_norm"))


def effect_of_rounding(subject: Subject, settings: Settings, expected: Found) -> float:
    """Return the largest difference of eager PyTorch's own results when each weight changes as by one rounding to bf16."""
    eps = torch.finfo(torch.bfloat16).eps / 2
    trials = (compare.rounded(subject, seed, eps) for seed in range(compare.ROUNDINGS))
    return max(largest_difference(oracle.train(trial, settings)[0], expected)[0] for trial in trials)


def brief(error: Exception) -> str:
    """Return an error's type and first line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def main() -> None:
    """Judge the type that the first argument names on the meshes that the others name."""
    set_verbosity_error()
    warnings.simplefilter("ignore")
    for record in judge(sys.argv[1], sys.argv[2:]):
        print(json.dumps({"model": sys.argv[1], **record}), flush=True)


if __name__ == "__main__":
    main()
