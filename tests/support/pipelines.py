"""Requests and pipelines of a tiny model, for tests of the programs and passes that options request."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from compiler_trainer.config.options import build
from compiler_trainer.config.schema import CastConfig, OptimConfig, PassesConfig
from compiler_trainer.pipeline import Pipeline, build_pipeline
from compiler_trainer.request import CompileRequest
from passes.ir.mesh import Mesh


class OneWeight(nn.Module):
    """A model with one parameter, `w`."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))


def request_of(passes: PassesConfig | None = None, pp: int = 1, **fields: Any) -> CompileRequest:
    """Return the request of a tiny model, on one device or in `pp` stages."""
    passes = PassesConfig(CastConfig(None)) if passes is None else passes
    mesh = Mesh.of({"pp": pp})
    defaults = {"model": OneWeight(), "loss_fn": lambda model, batch: model.w.sum(), "batch": {}}
    return CompileRequest(**{**defaults, "mesh": mesh, "passes": passes, **fields})


def pipeline_of(passes: PassesConfig | None = None, pp: int = 1, **fields: Any) -> Pipeline:
    """Return the pipeline of a tiny model."""
    if isinstance(fields.get("optim"), dict):
        fields["optim"] = build(OptimConfig, fields["optim"], "optim")
    return build_pipeline(request_of(passes, pp, **fields))
