"""`chat`: talk to a trained model, or to one of a folder or the hub, in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from compiler_trainer.cli.table import run_parser
from compiler_trainer.cli.verbs.generate import add_flags, sampling_of
from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.device import resolve_auto
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import Config
from compiler_trainer.console import say
from compiler_trainer.data.chat import prompt_of_chat
from compiler_trainer.data.records import ASSISTANT, Message
from compiler_trainer.data.tokenizers import tokenizer_of
from compiler_trainer.models.sampling import continued, in_use
from compiler_trainer.runs.saved import at_checkpoint, options_of, trained_model, untrained_model
from compiler_trainer.step.ranks import local_device

NEW = "/new"  # what a user types to begin a new conversation


def main(arguments: Sequence[str]) -> None:
    """Answer lines of standard input until it ends; the model sees the whole conversation."""
    arg_parser = run_parser("chat")
    arg_parser.add_argument("--system", default="", help="a system message before the conversation")
    add_flags(arg_parser)
    args = arg_parser.parse_args(arguments)
    sampling = sampling_of(args, "chat")
    is_run = Path(args.run, "config.yaml").exists()
    if not is_run and (args.checkpoint or args.ema):
        flag = "--checkpoint" if args.checkpoint else "--ema"
        raise UserError(flag, f"{args.run} is no run folder, and models have no checkpoints; leave it out")
    cfg = at_checkpoint(options_of(args.run, []), args.checkpoint) if is_run else options_of_model(str(args.run))
    cfg = resolve_auto(cfg, torch.cuda.is_available())
    subject, model = trained_model(cfg, args.ema) if is_run else untrained_model(cfg)
    tokenizer = tokenizer_of(cfg.data)
    model = in_use(cfg, model, local_device())

    def answer(messages: list[Message]) -> str:
        prompt = prompt_of_chat(messages, tokenizer)
        return tokenizer.decode(continued(cfg, subject, model, prompt.ids, prompt.ends, sampling))

    say(f"{subject.name}; {NEW} begins a new conversation, Ctrl-D ends", sys.stderr)
    converse(answer, [{"role": "system", "content": args.system}] if args.system else [])


def options_of_model(path: str) -> Config:
    """Return the options of a model that transformers wrote; raise UserError if there is none."""
    return to_config(compose(["model=hf", f"model.path={path}"]))


def converse(answer: Callable[[list[Message]], str], beginning: list[Message]) -> None:
    """Print the answer to each line; a message that cannot be answered is not part of the conversation."""
    messages = list(beginning)
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if text == NEW:
            messages = list(beginning)
        elif text:
            question = [*messages, {"role": "user", "content": text}]
            try:
                reply = answer(question)
            except UserError as error:
                say(f"error: {error}; or begin a new conversation with {NEW}", sys.stderr)
                continue
            print(reply, flush=True)
            messages = [*question, {"role": ASSISTANT, "content": reply}]
