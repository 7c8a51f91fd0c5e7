"""Questions about a transformers model, answered by values of a small model of the same kind.

- Does a token see later tokens? Then labels are no predictions. - With which way of passing documents
(`documents.WAYS`) does the second of two documents in a sequence have the
  logits that it has alone, whatever the first one is?
- Is transformers' loss the one that we compute, including auxiliary terms?
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from compiler_trainer.config.errors import UserError
from compiler_trainer.indexers import SELECT_ACROSS_DOCUMENTS
from compiler_trainer.models.documents import UNTRIED, WAYS
from compiler_trainer.models.folder import library, loss_of, outputs
from compiler_trainer.models.loss import IGNORED_LABEL
from compiler_trainer.models.shrunk import LARGEST, VOCAB, shrunk

LENGTH, FIRST = 24, 12  # tokens of the sequence that is tried, and of its first document
NEAR = 1e-3  # of the spread of logits, or of a loss: fp32 rounding is smaller, the effect of a visible token larger


def way_of(attention: str, config: Any, is_our_loss: bool = True) -> str:
    """Return the way in which a model learns of documents, or "causal".

    Raises UserError naming the model if there is none, if a token sees later ones and, with `is_our_loss`, if
    transformers adds terms to the loss that we do not have.
    """
    return tried(attention, is_our_loss, Described(config, config.to_json_string(use_diff=False)))


def remark_on(way: str, config: Any) -> str:
    """Return a line for the start of a run whose model could not be tried; empty for others."""
    if way != UNTRIED:
        return ""
    problem = f"no small {config.model_type} could be built to test if documents of a sequence see each other"
    return f"{problem}; it gets their positions. With model.attention=causal a sequence is one text"


class Described:
    """A config that equals any other config with the same text."""

    def __init__(self, config: Any, text: str):
        self.config, self.text = config, text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Described) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


@lru_cache(maxsize=64)
def tried(attention: str, is_our_loss: bool, described: Described) -> str:
    """Return the answer of `way_of`."""
    config = described.config
    try:
        trial = Trial(small_model(config))
        sees_later = trial.sees_later()
    except Exception:  # any kind: the library cannot make this model small
        if attention == "documents" and config.model_type in SELECT_ACROSS_DOCUMENTS:
            raise inseparable(config) from None
        return UNTRIED if attention == "documents" else "causal"
    if sees_later:
        problem = f"is of a {config.model_type} in which tokens see later tokens, so labels are no predictions"
        raise UserError("model.path", f"{problem}; use a decoder (is_decoder=true in its config.json)")
    if is_our_loss and trial.has_head and not trial.has_our_loss():
        problem = f"is of a {config.model_type}, to whose loss transformers adds terms that we do not have"
        raise UserError("model.path", f"{problem}; give a loss of your own (loss._target_)")
    if attention != "documents":
        return attention
    for way in WAYS:
        if trial.keeps_apart(way):
            return way
    raise inseparable(config)


def inseparable(config: Any) -> UserError:
    """Return the error for a model in which documents of a sequence see each other."""
    problem = f"documents, but neither positions nor masks separate documents of a sequence in a {config.model_type}"
    return UserError("model.attention", f"{problem}; set model.attention=causal, with which a sequence is one text")


def small_model(config: Any) -> Any:
    """Return a small model of the kind, with random weights."""
    transformers, small = library(), shrunk(config)
    has_head = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING  # not all text models of vision-language models
    kind = transformers.AutoModelForCausalLM if has_head else transformers.AutoModel
    with torch.device("meta"):
        size = sum(p.numel() for p in kind.from_config(small).parameters())
    if size > LARGEST:
        raise ValueError(f"has {size:,} parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind.from_config(small, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


class Trial:
    """A small model and a sequence of two documents."""

    def __init__(self, model: Any):
        self.model, self.has_head = model, model.get_output_embeddings() is not None
        generator = torch.Generator().manual_seed(0)
        self.tokens, self.others = (torch.randint(4, VOCAB - 4, (1, LENGTH), generator=generator) for _ in range(2))

    @torch.no_grad()
    def logits(self, way: str, tokens: Tensor) -> Tensor:
        """Return logits [T, V], or hidden states without a head, of tokens [1, T] in documents of FIRST tokens each."""
        at = torch.arange(tokens.shape[1])[None]
        batch = {"tokens": tokens, "positions": at % FIRST, "documents": at // FIRST}
        out = outputs(way, self.model, batch)
        return getattr(out, "logits", out[0])[0].float()

    def sees_later(self) -> bool:
        """Return True if logits of the first tokens depend on later tokens."""
        changed = torch.cat([self.tokens[:, :FIRST], self.others[:, FIRST:]], 1)
        return differ(self.logits("causal", self.tokens)[:FIRST], self.logits("causal", changed)[:FIRST])

    def keeps_apart(self, way: str) -> bool:
        """Return True if logits of the second document are those of that document alone, whatever the first is."""
        changed = torch.cat([self.others[:, :FIRST], self.tokens[:, FIRST:]], 1)
        logits_alone = self.logits("causal", self.tokens[:, FIRST:])
        try:
            return not any(differ(self.logits(way, tokens)[FIRST:], logits_alone) for tokens in (self.tokens, changed))
        except Exception:  # any kind: the model does not take such inputs
            return False

    @torch.no_grad()
    def has_our_loss(self) -> bool:
        """Return True if transformers' loss is ours, with labels that it shifts or, in a few models, does not."""
        theirs = self.model(input_ids=self.tokens, labels=self.tokens, use_cache=False).loss
        shifted = torch.cat([self.tokens[:, 1:], torch.full((1, 1), IGNORED_LABEL)], 1)
        batch = {"tokens": self.tokens, "documents": torch.zeros_like(self.tokens)}
        ours = [loss_of("causal", self.model, batch | {"labels": labels}) for labels in (shifted, self.tokens)]
        return any(torch.isclose(theirs.float(), loss, rtol=NEAR) for loss in ours)


def differ(ours: Tensor, theirs: Tensor) -> bool:
    """Return True if logits differ by more than rounding, or are not finite."""
    return not bool((ours - theirs).abs().max() < NEAR * theirs.std())
