"""`chat`: talk to a trained model, or to one of a folder or the hub, in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from compiler_trainer.cli.table import run_parser
from compiler_trainer.cli.verbs.generate import add_flags, asking, images_of, sampling_of
from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.device import resolve_auto
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.jobs import as_override
from compiler_trainer.config.schema import Config
from compiler_trainer.console import say
from compiler_trainer.data.chat import prompt_of_chat, prompt_with_images
from compiler_trainer.data.pictures import images_in
from compiler_trainer.data.records import ASSISTANT, Message
from compiler_trainer.data.tokenizers import tokenizer_of
from compiler_trainer.models.sampling import continued, in_use
from compiler_trainer.runs.saved import at_checkpoint, options_of, trained_model, untrained_model
from compiler_trainer.step.ranks import local_device

NEW = "/new"  # what a user types to begin a new conversation
IMAGE = "/image "  # what a user types before a file or url, which the next message begins with


def main(arguments: Sequence[str]) -> None:
    """Answer lines of standard input until it ends; the model sees the whole conversation."""
    arg_parser = run_parser("chat", of=str)
    arg_parser.add_argument("--system", default="", help="a system message before the conversation")
    arg_parser.add_argument("--images", action="store_true", help="of a folder: load the vision-language model")
    add_flags(arg_parser)
    args = arg_parser.parse_args(arguments)
    sampling = sampling_of(args, "chat")
    is_run = Path(args.run, "config.yaml").exists()
    if not is_run and (args.checkpoint or args.ema):
        flag = "--checkpoint" if args.checkpoint else "--ema"
        raise UserError(flag, f"{args.run} is no run folder, and models have no checkpoints; leave it out")
    if is_run and args.images:
        raise UserError("--images", "is for folders of models; a run trained on images sees them, so leave it out")
    options = options_of(Path(args.run), []) if is_run else options_of_model(args.run, args.images)
    cfg = at_checkpoint(options, args.checkpoint)
    cfg = resolve_auto(cfg, torch.cuda.is_available())
    subject, model = trained_model(cfg, args.ema) if is_run else untrained_model(cfg)
    tokenizer = tokenizer_of(cfg.data)
    model = in_use(cfg, model, local_device())

    def answer(messages: list[Message]) -> str:
        if images_in(messages):
            prompt = prompt_with_images(messages, tokenizer, images_of(cfg, tokenizer))
        else:
            prompt = prompt_of_chat(messages, tokenizer)
        return tokenizer.decode(continued(cfg, subject, model, prompt.ids, prompt.ends, sampling, prompt.inputs))

    show = f"{IMAGE}FILE shows an image, " if cfg.sees else ""
    say(f"{subject.name}; {show}{NEW} begins a new conversation, Ctrl-D ends", sys.stderr)
    converse(answer, [{"role": "system", "content": args.system}] if args.system else [])


def options_of_model(path: str, sees: bool) -> Config:
    """Return the options of a model that transformers wrote, with its vision tower if it `sees`; raise UserError."""
    images = ["data.images_per_row=1"] if sees else []
    return to_config(compose(["model=hf", f"model.path={as_override(path)}", *images]))


def converse(answer: Callable[[list[Message]], str], beginning: list[Message]) -> None:
    """Print the answer to each line; a message that cannot be answered is not part of the conversation."""
    messages, images = list(beginning), list[str]()
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if text == NEW:
            messages, images = list(beginning), []
        elif text.startswith(IMAGE):
            images.append(text.removeprefix(IMAGE).strip())
        elif text:
            question = [*messages, asking(text, images) if images else {"role": "user", "content": text}]
            images = []
            try:
                reply = answer(question)
            except UserError as error:
                say(f"error: {error}; or begin a new conversation with {NEW}", sys.stderr)
                continue
            print(reply, flush=True)
            messages = [*question, {"role": ASSISTANT, "content": reply}]
