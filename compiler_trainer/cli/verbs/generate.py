"""`generate`: a prompt, and what the model continues it with."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from compiler_trainer.cli.table import run_parser
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import FolderConfig
from compiler_trainer.data.tokenizers import Tokenizer, build_tokenizer, tokenizer_here
from compiler_trainer.models.place import folder_of
from compiler_trainer.runs.generate import chat_turn, ends_answers, tokens_after
from compiler_trainer.runs.saved import at_checkpoint, options_of, trained_model


def main(arguments: Sequence[str]) -> None:
    """Print the text."""
    takes = run_parser("generate")
    takes.add_argument("--prompt", default="", help="where the text begins")
    takes.add_argument("--chat", action="store_true", help="say the prompt as a user, and print the answer alone")
    takes.add_argument("--tokens", type=int, default=200, help="most tokens to add (default 200)")
    takes.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)")
    takes.add_argument("--top-k", type=int, help="sample among the K likeliest tokens only")
    takes.add_argument("--seed", type=int, default=0, help="random seed of the sampling (default 0)")
    takes.add_argument("--ema", action="store_true", help="with the averages of weights (train.ema)")
    given = takes.parse_args(arguments)
    if given.tokens < 1 or given.temperature < 0 or (given.top_k is not None and given.top_k < 1):
        raise UserError("generate", "--tokens and --top-k must be at least 1, --temperature 0 or more")
    cfg = at_checkpoint(options_of(given.run, []), given.checkpoint)
    named = tokenizer_here(cfg.data)
    tokenizer = build_tokenizer(named)
    found, model = trained_model(cfg, given.ema)
    text, end = chat_turn(given.prompt, named) if given.chat else (given.prompt, "")
    prompt = ids_of(text, tokenizer) or [tokenizer.end_of_document]
    draws = torch.Generator().manual_seed(given.seed)
    how = (cfg.train.seq_len, given.temperature, given.top_k, draws)
    drawn = itertools.islice(tokens_after(model, found.logits, prompt, *how), given.tokens)
    ends = {tokenizer.end_of_document, *ids_of(end, tokenizer)}
    if isinstance(cfg.model, FolderConfig):
        ends |= ends_answers(folder_of(cfg).path)
    ids = list(itertools.takewhile(lambda i: i not in ends, drawn))
    print(("" if given.chat else given.prompt) + tokenizer.decode(ids))


def ids_of(text: str, tokenizer: Tokenizer) -> list[int]:
    """The token ids of a text."""
    return [int(i) for i in tokenizer.encode([text])[0]]
