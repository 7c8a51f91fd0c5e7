"""`generate`: sample a continuation of a prompt from the model."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from compiler_trainer.cli.table import run_parser
from compiler_trainer.config.device import settled
from compiler_trainer.config.errors import UserError
from compiler_trainer.console import say
from compiler_trainer.data.prompts import prompt_of
from compiler_trainer.data.tokenizers import tokenizer_of
from compiler_trainer.models.sampling import Sampling, continued, in_use, positions, why_uncached
from compiler_trainer.runs.saved import at_checkpoint, options_of, trained_model
from compiler_trainer.step.ranks import local_device


def main(arguments: Sequence[str]) -> None:
    """Print the prompt and its continuation; with `--chat`, the answer alone."""
    takes = run_parser("generate")
    takes.add_argument("--prompt", default="", help="where the text begins")
    takes.add_argument("--chat", action="store_true", help="say the prompt as a user, and print the answer alone")
    takes.add_argument("--tokens", type=int, default=200, help="most tokens to add (default 200)")
    takes.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)")
    takes.add_argument("--top-k", type=int, help="sample among the K likeliest tokens only")
    takes.add_argument("--top-p", type=float, default=1.0, help="and among those that together have P (default 1)")
    takes.add_argument("--seed", type=int, default=0, help="random seed of the sampling (default 0)")
    takes.add_argument("--ema", action="store_true", help="with the averages of weights (train.ema)")
    given = takes.parse_args(arguments)
    how = Sampling(given.tokens, given.temperature, given.top_p, given.top_k, given.seed)
    check(how)
    cfg = settled(at_checkpoint(options_of(given.run, []), given.checkpoint), torch.cuda.is_available())
    tokenizer = tokenizer_of(cfg.data)
    prompt = prompt_of(given.prompt, given.chat, tokenizer)
    found, model = trained_model(cfg, given.ema)
    most, option = positions(cfg, found)
    if why := why_uncached(cfg):
        say(f"without a KV cache, each token from the whole text: {why}", sys.stderr)
    elif 0 < (room := most - len(prompt.ids)) < how.tokens:
        say(f"at most {room} tokens: the model has {most:,} positions ({option})", sys.stderr)
    ids = continued(cfg, found, in_use(cfg, model, local_device()), prompt.ids, prompt.ends, how)
    print(("" if given.chat else given.prompt) + tokenizer.decode(ids))


def check(how: Sampling) -> None:
    """Raise UserError if a flag is out of its range."""
    if how.tokens < 1 or how.temperature < 0 or (how.top_k is not None and how.top_k < 1):
        raise UserError("generate", "--tokens and --top-k must be at least 1, --temperature 0 or more")
    if not 0 < how.top_p <= 1:
        raise UserError("generate", f"--top-p is {how.top_p:g}; it must be above 0, at most 1")
