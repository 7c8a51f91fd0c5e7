"""`generate`: sample a continuation of a prompt from the model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from compiler_trainer.cli.table import run_parser
from compiler_trainer.config.device import resolve_auto
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import Config
from compiler_trainer.console import say
from compiler_trainer.data.chat import prompt_of, prompt_with_images
from compiler_trainer.data.pictures import ImageOptions, image_options
from compiler_trainer.data.records import Message
from compiler_trainer.data.tokenizers import Tokenizer, tokenizer_of
from compiler_trainer.models.sampling import Sampling, continued, in_use, positions, why_uncached
from compiler_trainer.runs.saved import at_checkpoint, options_of, trained_model
from compiler_trainer.step.ranks import local_device


def main(arguments: Sequence[str]) -> None:
    """Print the prompt and its continuation; with `--chat`, the answer alone."""
    arg_parser = run_parser("generate")
    arg_parser.add_argument("--prompt", default="", help="beginning of the text")
    arg_parser.add_argument(
        "--chat", action="store_true", help="send the prompt as a user's message, and print the answer alone"
    )
    arg_parser.add_argument(
        "--image", action="append", default=[], help="with --chat: a file or url of an image before the text; once each"
    )
    add_flags(arg_parser)
    args = arg_parser.parse_args(arguments)
    sampling = sampling_of(args, "generate")
    if args.image and not args.chat:
        raise UserError("--image", "is a part of a message; add --chat")
    cfg = resolve_auto(at_checkpoint(options_of(args.run, []), args.checkpoint), torch.cuda.is_available())
    tokenizer = tokenizer_of(cfg.data)
    if args.image:
        prompt = prompt_with_images([asking(args.prompt, args.image)], tokenizer, images_of(cfg, tokenizer))
    else:
        prompt = prompt_of(args.prompt, args.chat, tokenizer)
    subject, model = trained_model(cfg, args.ema)
    most, option = positions(cfg, subject)
    if reason := why_uncached(cfg):
        say(f"without a KV cache, each token from the whole text: {reason}", sys.stderr)
    elif 0 < (room := most - len(prompt.ids)) < sampling.tokens:
        say(f"at most {room} tokens: the model has {most:,} positions ({option})", sys.stderr)
    ids = continued(cfg, subject, in_use(cfg, model, local_device()), prompt.ids, prompt.ends, sampling, prompt.inputs)
    print(("" if args.chat else args.prompt) + tokenizer.decode(ids))


def asking(text: str, images: Sequence[str]) -> Message:
    """Return a user's message with images before its text."""
    parts = [{"type": "image", "path": image} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def images_of(cfg: Config, tokenizer: Tokenizer) -> ImageOptions:
    """Return the options of images; raise UserError if the model does not see any."""
    options = image_options(cfg.data, tokenizer)
    if options is None:
        raise UserError("--image", "the model was trained without images (data.images_per_row), and sees none")
    return options


def add_flags(arg_parser: argparse.ArgumentParser) -> None:
    """Add the flags of sampling."""
    arg_parser.add_argument("--tokens", type=int, default=200, help="most tokens to add (default 200)")
    arg_parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 always takes the likeliest token (default 0.8)"
    )
    arg_parser.add_argument("--top-k", type=int, help="sample among the K likeliest tokens only")
    arg_parser.add_argument(
        "--top-p", type=float, default=1.0, help="then among those with a total probability of P (default 1)"
    )
    arg_parser.add_argument("--seed", type=int, default=0, help="random seed of the sampling (default 0)")
    arg_parser.add_argument("--ema", action="store_true", help="use the averages of weights (train.ema)")


def sampling_of(args: argparse.Namespace, verb: str) -> Sampling:
    """Return the settings of sampling; raise UserError if a flag is out of its range."""
    if args.tokens < 1 or args.temperature < 0 or (args.top_k is not None and args.top_k < 1):
        raise UserError(verb, "--tokens and --top-k must be at least 1, --temperature 0 or more")
    if not 0 < args.top_p <= 1:
        raise UserError(verb, f"--top-p is {args.top_p:g}; it must be above 0, at most 1")
    return Sampling(args.tokens, args.temperature, args.top_p, args.top_k, args.seed)
