"""Text that a model goes on with: one token after the other, each from a forward of all before it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compiler_trainer.config.errors import UserError
from compiler_trainer.data.chat import rendered, template_beside
from compiler_trainer.data.records import BadRecord

Logits = Callable[[nn.Module, Mapping[str, Tensor]], Tensor]


@torch.no_grad()
def tokens_after(
    model: nn.Module,
    logits: Logits,
    prompt: list[int],
    window: int,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator,
) -> Iterator[int]:
    """Token ids that follow a prompt of at least one, without end, each drawn of the `top_k` likeliest.

    The model sees the last `window` tokens. At a temperature of 0 the likeliest one is taken.
    """
    ids = list(prompt)
    while True:
        found = logits(model, row(ids[-window:]))[0, -1].float()
        if top_k is not None:
            found[found < found.topk(min(top_k, len(found))).values[-1]] = -torch.inf
        if temperature:
            chosen = torch.multinomial((found / temperature).softmax(0), 1, generator=generator)
        else:
            chosen = found.argmax()
        ids.append(int(chosen))
        yield ids[-1]


def chat_turn(said: str, tokenizer: str) -> tuple[str, str]:
    """What a user says as the chat template beside a tokenizer writes it, up to the answer, and the token to end that.

    Raises UserError where there is no template, or it refuses.
    """
    template = template_beside(tokenizer)
    try:
        text = rendered(template, [{"role": "user", "content": said}], add_generation_prompt=True)
    except BadRecord as refusal:
        raise UserError("--chat", str(refusal)) from refusal
    return text, template.tokens.get("eos_token", "")


def ends_answers(folder: str) -> set[int]:
    """Tokens that end an answer of a folder's model, as its generation_config.json or config.json says."""
    for name in ("generation_config.json", "config.json"):
        path = Path(folder, name)
        found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        if found is not None:
            return set(found) if isinstance(found, list) else {found}
    return set()


def row(ids: list[int]) -> dict[str, Any]:
    """A batch of one row that is one document."""
    tokens = torch.tensor([ids])
    return {"tokens": tokens, "positions": torch.arange(len(ids))[None], "documents": torch.zeros_like(tokens)}
