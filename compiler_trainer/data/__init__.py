"""Text to batches: sources -> tokenizer -> corpus -> packed rows -> loader."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import DataConfig
from compiler_trainer.data.corpus import Corpus, build_corpus, split
from compiler_trainer.data.loader import Loader
from compiler_trainer.data.packing import PackedRows
from compiler_trainer.data.sources import documents
from compiler_trainer.data.tokenizers import build_tokenizer

__all__ = ["Datasets", "Loader", "build", "check_vocabulary"]


@dataclass(frozen=True)
class Datasets:
    """What a run trains and evaluates on; `eval` is None where nothing is held out."""

    cfg: DataConfig
    corpus: Corpus
    vocab_size: int
    train: Loader
    eval: Loader | None

    def describe(self) -> str:
        """One line: documents, tokens and rows of each part."""
        corpus = self.corpus
        empty = f" ({corpus.empty_documents:,} empty)" if corpus.empty_documents else ""
        parts = [f"{corpus.documents:,} documents{empty}, {len(corpus.tokens):,} tokens ({self.cfg.tokenizer})"]
        parts.append(f"train {describe_rows(self.train.rows)}")
        if self.eval is None:
            parts.append("nothing held out")
        else:
            is_cut = len(corpus) > corpus.documents - corpus.empty_documents
            origin = "end of the longest document, " if is_cut else ""
            parts.append(f"held out {origin}{describe_rows(self.eval.rows)}")
        return f"{self.cfg.name}: {'; '.join(parts)}"


def build(cfg: DataConfig, seq_len: int, global_batch_size: int) -> Datasets:
    """Read, tokenize and pack the corpus; `global_batch_size` counts rows of `seq_len` (at least 2) over all ranks.

    Every rank builds the same datasets from the same config. Raises UserError on bad input.
    """
    tokenizer = build_tokenizer(cfg.tokenizer)
    where = ", ".join(cfg.files) or f"data={cfg.name}"
    corpus, trained, held_out = split(build_corpus(documents(cfg), tokenizer, where), cfg.eval_fraction)
    shuffled = np.random.default_rng(cfg.seed).permutation(trained)
    train = Loader(PackedRows(corpus, shuffled, seq_len), global_batch_size, cfg.seed)
    if not len(held_out):
        return Datasets(cfg, corpus, tokenizer.vocab_size, train, None)
    evaluation = Loader(PackedRows(corpus, held_out, seq_len), global_batch_size, seed=None)
    return Datasets(cfg, corpus, tokenizer.vocab_size, train, evaluation)


def check_vocabulary(datasets: Datasets, vocab_size: int | None) -> None:
    """Raise UserError where the tokenizer has ids that the model has no embedding for."""
    if vocab_size is not None and datasets.vocab_size > vocab_size:
        tokens = f"data.tokenizer={datasets.cfg.tokenizer} has {datasets.vocab_size} tokens"
        raise UserError("model.vocab_size", f"is {vocab_size}, but {tokens}; it needs at least as many")


def describe_rows(rows: PackedRows) -> str:
    """How much a packed part holds."""
    return f"{rows.tokens:,} tokens in {len(rows):,} rows of {rows.seq_len}"
