"""Sampling: transformers draws tokens if it has the model, otherwise each token takes a forward of all tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import ends_of_answers
from compiler_trainer.config.schema import Config, FolderConfig, ModelConfig
from compiler_trainer.models import folder
from compiler_trainer.models.decoders import as_transformers, form_of
from compiler_trainer.models.place import folder_of
from compiler_trainer.models.subject import Subject
from compiler_trainer.widths import cast_parameters


@dataclass(frozen=True)
class Sampling:
    """The settings of sampling: at most `tokens` tokens at a `temperature` (0: always the likeliest).

    A token is drawn from the `top_k` likeliest, and of these from the likeliest with a total probability of `top_p`.
    """

    tokens: int
    temperature: float = 0.8
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0


def continued(
    cfg: Config,
    subject: Subject,
    model: nn.Module,
    prompt: list[int],
    ends: Set[int],
    sampling: Sampling,
    inputs: Mapping[str, Tensor] = MappingProxyType({}),
) -> list[int]:
    """Return the tokens that `model`, made from `subject`'s model by `in_use`, adds to a prompt, up to an end.

    The prompt has at least one token; `inputs` are further ones of transformers' model, such as images. With a cache,
    sampling ends at the model's last position. Raises UserError if the model cannot take the prompt.
    """
    check_prompt(cfg, subject, prompt)
    drawn: Iterable[int]
    if why_uncached(cfg):
        drawn = islice(one_by_one(subject, model, prompt, cfg.train.seq_len, sampling), sampling.tokens)
    else:
        is_folder = isinstance(cfg.model, FolderConfig)
        ends = ends | set(ends_of_answers(Path(folder_of(cfg).path)) if is_folder else ())
        sampling = replace(sampling, tokens=min(sampling.tokens, positions(cfg, subject)[0] - len(prompt)))
        drawn = generated(folder.plain(model), prompt, ends, sampling, inputs=inputs)[0].tolist()
    return list(takewhile(lambda i: i not in ends, drawn))


def why_uncached(cfg: Config) -> str:
    """Return why a model is sampled without a KV cache; empty if transformers has the model, and so a cache."""
    if isinstance(cfg.model, FolderConfig):
        return ""
    if not isinstance(cfg.model, ModelConfig):
        return "model: is a module of your own"
    try:
        form_of(cfg.model)
        folder.library()
    except UserError as error:
        return str(error)
    return ""


def check_prompt(cfg: Config, subject: Subject, prompt: list[int]) -> None:
    """Raise UserError if a prompt has tokens outside the vocabulary, or leaves no room for another token."""
    if subject.vocab_size is not None and max(prompt) >= subject.vocab_size:
        problem = f"turns the prompt into token {max(prompt):,}, but the model's vocabulary has {subject.vocab_size:,}"
        raise UserError("data.tokenizer", f"{problem}; name the model's own")
    most, option = positions(cfg, subject)
    if not why_uncached(cfg) and len(prompt) >= most:
        problem = f"has {len(prompt):,} tokens, but the model has {most:,} positions ({option})"
        raise UserError("prompt", f"{problem}; shorten it")


def positions(cfg: Config, subject: Subject) -> tuple[int, str]:
    """Return the number of positions of a model, and the option that sets it; some models have no bound."""
    if not isinstance(cfg.model, FolderConfig):
        return cfg.train.seq_len, "train.seq_len"
    config, name = folder.plain(subject.module).config.get_text_config(), "max_position_embeddings"
    return getattr(config, name, None) or 2**31, name


@torch.no_grad()
def generated(
    model: Any,
    prompt: list[int],
    ends: Set[int],
    sampling: Sampling,
    count: int = 1,
    processors: Sequence[Callable[[Tensor, Tensor], Tensor]] = (),
    inputs: Mapping[str, Tensor] = MappingProxyType({}),
) -> Tensor:
    """Return the tokens that transformers' `generate` adds to `count` copies of a prompt, int64 [count, new tokens].

    Tokens after the first end are any. Each of `processors` gets tokens and logits, fp32 [count, V], before each draw;
    the model gets `inputs`, too.
    """
    draws = (
        {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k or 0}
        if sampling.temperature
        else {}
    )
    settings = folder.library().GenerationConfig(
        max_new_tokens=sampling.tokens,
        do_sample=sampling.temperature > 0,
        eos_token_id=sorted(ends),
        pad_token_id=min(ends, default=0),
        **draws,
    )
    model.generation_config = settings  # generate takes what is not set from there, as a folder's repetition_penalty
    ids = torch.tensor([prompt] * count, device=model.device)
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(sampling.seed)
        of_model = {name: value.to(model.device) for name, value in inputs.items()}
        of_model |= {name: value.to(model.dtype) for name, value in of_model.items() if value.is_floating_point()}
        options = {"attention_mask": torch.ones_like(ids), **of_model, "logits_processor": [*processors]}
        return model.generate(ids, generation_config=settings, **options)[:, len(prompt) :]


class Drawn(NamedTuple):
    """The tokens of an answer up to its end, if it has `ended`, and their log-probabilities in nats, fp32.

    `entropy` is the mean entropy of their distributions, in nats.
    """

    ids: list[int]
    logs: NDArray[np.float32]
    entropy: float
    ended: bool


def group(model: Any, prompt: list[int], ends: Set[int], sampling: Sampling, count: int) -> list[Drawn]:
    """Return `count` answers of transformers' model to a prompt; the draw depends on `sampling.seed` alone.

    Log-probabilities are those of the distribution that tokens are drawn from, if that has no `top_p` or `top_k`.
    """
    record = DrawnLogs(sampling.temperature)
    tokens = generated(model, prompt, ends, sampling, count, [record])
    record.take(tokens[:, -1])
    logs, entropies = (torch.stack(values, 1).cpu() for values in (record.logs, record.entropies))
    drawn = []
    for ids, log, entropy in zip(tokens.tolist(), logs, entropies, strict=True):
        first_end = next((i for i, token in enumerate(ids) if token in ends), None)
        size = len(ids) if first_end is None else first_end + 1
        drawn.append(Drawn(ids[:size], log[:size].numpy(), float(entropy[:size].mean()), first_end is not None))
    return drawn


class DrawnLogs:
    """A processor of logits that changes nothing and keeps numbers of each step, fp32 [count] each.

    `logs` are log-probabilities of the tokens that were drawn, known one call later, and `entropies` of distributions.
    """

    def __init__(self, temperature: float):
        self.temperature = temperature
        self.logs, self.entropies, self.last = list[Tensor](), list[Tensor](), torch.empty(0)

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Take the last drawn tokens, and keep the distributions of the next ones."""
        if self.entropies:
            self.take(ids[:, -1])
        self.last = (scores / self.temperature).log_softmax(-1)
        self.entropies.append(-(self.last.exp() * self.last).sum(-1))
        return scores

    def take(self, tokens: Tensor) -> None:
        """Keep the log-probabilities of drawn tokens, int64 [count]."""
        self.logs.append(self.last.gather(-1, tokens.unsqueeze(-1)).squeeze(-1))


@torch.no_grad()
def one_by_one(subject: Subject, model: nn.Module, prompt: list[int], window: int, sampling: Sampling) -> Iterator[int]:
    """Yield tokens without end, each from a forward of the last `window` tokens."""
    ids, device = list(prompt), next(model.parameters()).device
    generator = torch.Generator().manual_seed(sampling.seed)
    while True:
        logits = subject.logits(model, row(ids[-window:], device))[0, -1].float().cpu()
        ids.append(int(torch.multinomial(chances(logits, sampling), 1, generator=generator)))
        yield ids[-1]


def chances(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the probability of each token of a vocabulary, [V]."""
    if not sampling.temperature:
        return nn.functional.one_hot(logits.argmax(), len(logits)).float()
    scores = logits / sampling.temperature
    if sampling.top_k is not None:
        scores[scores < scores.topk(min(sampling.top_k, len(scores))).values[-1]] = -torch.inf
    likely, order = scores.softmax(0).sort(descending=True)
    if sampling.top_p < 1:
        likely[likely.cumsum(0) - likely >= sampling.top_p] = 0  # the likelier tokens before them suffice
    return torch.zeros_like(likely).scatter(0, order, likely)


def row(ids: list[int], device: torch.device) -> dict[str, Tensor]:
    """Return a batch of one sequence that is one document."""
    tokens = torch.tensor([ids], device=device)
    positions = torch.arange(len(ids), device=device)[None]
    return {"tokens": tokens, "positions": positions, "documents": torch.zeros_like(tokens)}


def in_use(cfg: Config, model: nn.Module, device: torch.device) -> nn.Module:
    """Return the model on a device; if it can have a cache, as transformers' model in the run's compute dtype.

    Raises UserError if its head has no next tokens.
    """
    if cfg.head != "lm":
        raise UserError("model.head", f"is {cfg.head}, so the model writes nothing; export it for transformers")
    cached = not why_uncached(cfg)
    if cached and isinstance(cfg.model, ModelConfig):
        model = as_transformers(cfg.model, model)
    if cached:
        cast_parameters(model, computed_dtype(cfg))  # not buffers: rotary frequencies stay in float32
    return model.to(device).eval()


def computed_dtype(cfg: Config) -> torch.dtype | None:
    """Return the dtype in which a run computes; None for that of its parameters."""
    dtype = cfg.passes.cast.param_dtype
    return getattr(torch, str(dtype)) if dtype in ("float32", "bfloat16") else None
