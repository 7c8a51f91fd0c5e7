"""Samplers of rollouts: transformers' `generate` in the processes of the ranks, or a server."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import Tensor, nn

from compiler_trainer.checkpoint.load import MODEL
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import Config, FolderConfig, RolloutConfig
from compiler_trainer.data.chat import Prompt
from compiler_trainer.models.folder import plain
from compiler_trainer.models.merge import merged, save
from compiler_trainer.models.sampling import Drawn, Sampling, computed_dtype, group, in_use
from compiler_trainer.models.skeleton import fill
from compiler_trainer.models.subject import Subject, model_of
from compiler_trainer.step.ranks import gather, host_group, place_in_job, rank, try_on_rank_0
from compiler_trainer.step.step import Step
from compiler_trainer.training.evaluate import on_rank_0
from compiler_trainer.training.server import connect
from compiler_trainer.widths import dtypes_in

WEIGHTS = "rollout_weights"  # a folder in the run folder


class Sampler(Protocol):
    """A function that draws `group_size` answers to each prompt with the weights of a step, group by group.

    All ranks must call it, and get all answers. Draws depend on `data.seed` and on the number of prompts before.
    """

    def __call__(self, step: Step, prompts: Sequence[Prompt], before: int) -> list[Drawn]: ...


def sampler_of(cfg: Config, trained: Subject) -> Sampler:
    """Return the sampler of a run; raise UserError if `loss.server` does not answer."""
    assert isinstance(cfg.loss, RolloutConfig)
    return Served(cfg, trained) if cfg.loss.server else InProcess(cfg, trained)


def seed_of(*numbers: int) -> int:
    """Return a seed below 2**63 from numbers, as `data.seed` and the number of prompts before a group."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


def short_seed_of(*numbers: int) -> int:
    """Return a seed below 2**31 from numbers, because some versions of SGLang store seeds in 32 bits."""
    return seed_of(*numbers) >> 32


# ---- transformers' generate ----------------------------------------------------------------------------


class InProcess:
    """Each rank gathers the whole model, in the dtype of computation, while it draws its share of the groups."""

    def __init__(self, cfg: Config, trained: Subject):
        assert isinstance(cfg.loss, RolloutConfig)
        self.cfg, self.loss, self.trained = cfg, cfg.loss, trained
        self.group = host_group()

    def __call__(self, step: Step, prompts: Sequence[Prompt], before: int) -> list[Drawn]:
        """Return the answers to prompts."""
        at, count = place_in_job()
        model, drawn = whole_model(self.cfg, self.trained, step), list[list[Drawn]]()
        for number in range(at, len(prompts), count):
            seed = seed_of(self.cfg.data.seed, before + number)
            sampling = Sampling(self.loss.answer_tokens, self.loss.temperature, seed=seed)
            drawn.append(group(model, prompts[number].ids, prompts[number].ends, sampling, self.loss.group_size))
        by_rank = gather(drawn, self.group)
        return [answer for number in range(len(prompts)) for answer in by_rank[number % count][number // count]]


def whole_model(cfg: Config, trained: Subject, step: Step) -> nn.Module:
    """Return transformers' model with the weights of a step, on its device; all ranks must call this."""
    module = untaught(cfg, trained)
    names = [name for name in step.state if name.startswith(MODEL) and name not in trained.teacher]
    parameters = {f"{MODEL}{name}" for name, _ in module.named_parameters()}
    dtype_of = dtypes_in(module, computed_dtype(cfg))

    def values() -> Iterator[tuple[str, Tensor]]:
        for name in names:  # each is cast at once, so that there is one full tensor of the master weights at a time
            full = step.whole(name)
            yield name.removeprefix(MODEL), full.to(dtype_of(name, full)) if name in parameters else full

    return plain(in_use(cfg, fill(module, values()), step.device))


def untaught(cfg: Config, trained: Subject) -> nn.Module:
    """Return a new module of the model without weights, and without its teacher if it has one."""
    return model_of(cfg).module if trained.teacher else copy.deepcopy(trained.module)


# ---- a server ------------------------------------------------------------------------------------------


class Served:
    """Rank 0 writes the weights into a folder, and asks a server to load them and to draw all answers."""

    def __init__(self, cfg: Config, trained: Subject):
        assert isinstance(cfg.loss, RolloutConfig) and cfg.loss.server is not None
        self.cfg, self.loss, self.trained = cfg, cfg.loss, trained
        address = cfg.loss.server
        self.server = try_on_rank_0(lambda: connect(address))

    def __call__(self, step: Step, prompts: Sequence[Prompt], before: int) -> list[Drawn]:
        """Return the answers to prompts; raise UserError on all ranks if the server gives none."""
        weights = on_rank_0(step, rank(), self.trained.teacher)

        def draw() -> list[Drawn]:
            self.update(weights)
            size = self.loss.group_size
            repeated = [prompt for prompt in prompts for _ in range(size)]
            places = [(before + number, answer) for number in range(len(prompts)) for answer in range(size)]
            plain_sampling = Sampling(self.loss.answer_tokens, self.loss.temperature)
            samplings = [replace(plain_sampling, seed=short_seed_of(self.cfg.data.seed, *place)) for place in places]
            return self.server.draw(repeated, samplings)

        return try_on_rank_0(draw)

    def update(self, weights: dict[str, Tensor]) -> None:
        """Make the server draw with weights, the full parameters and buffers by name, through a folder."""
        folder = Path(self.cfg.run.dir, WEIGHTS).resolve()
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
        save(served_model(self.cfg, self.trained, weights), folder)
        self.server.load(folder)
        shutil.rmtree(folder)


def served_model(cfg: Config, trained: Subject, weights: dict[str, Tensor]) -> nn.Module:
    """Return transformers' model with weights, in the dtype of computation, on the CPU; adapters are merged."""
    module = fill(untaught(cfg, trained), weights.items())
    if isinstance(cfg.model, FolderConfig) and cfg.model.lora:
        is_tied = plain(module).config.tie_word_embeddings
        module = merged(module)
        if module.config.tie_word_embeddings != is_tied:
            problem = f"{list(cfg.model.lora.targets)} adapts the embedding or the head, which the server ties"
            raise UserError("model.lora.targets", f"{problem}; leave it out, or set loss.server=null")
    return in_use(cfg, module, next(module.parameters()).device)
