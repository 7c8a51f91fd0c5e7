"""Tables that are too short for their look-ups are refused before compilation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracle import SEQ_LEN, VOCAB, batches, compile_lockstep
from torch import nn

from compiler_trainer import UserError


class Learned(nn.Module):
    """Looked-up tokens and positions; positions are counted, shifted, or those of the batch."""

    def __init__(self, rows: int, how: str):
        super().__init__()
        torch.manual_seed(0)
        self.how, self.tokens, self.places = how, nn.Embedding(VOCAB, 8), nn.Embedding(rows, 8)
        self.head = nn.Linear(8, VOCAB)

    def at(self, tokens, positions):
        counted = torch.arange(tokens.shape[1], device=tokens.device)
        return {"counted": counted, "shifted": counted + 2, "given": positions, "indexed": counted}[self.how]

    def forward(self, tokens, positions):
        at = self.at(tokens, positions)
        return self.head(self.tokens(tokens) + (self.places.weight[at] if self.how == "indexed" else self.places(at)))


def loss(model, batch):
    return F.cross_entropy(model(batch["tokens"], batch["positions"]).flatten(0, 1), batch["labels"].flatten())


BELOW = {"tokens": VOCAB, "positions": SEQ_LEN}


@pytest.mark.parametrize(("how", "rows", "most"), [("counted", 5, 5), ("given", 5, 5), ("shifted", 8, 6), ("indexed", 5, 5)])
@pytest.mark.sample(2)
def test_a_row_longer_than_learned_positions_is_refused(how, rows, most):
    message = rf"^train.seq_len: rows of 7 tokens reach position \d, but test_look_ups.py:\d+ looks up in {rows}; set train.seq_len={most} or less"
    with pytest.raises(UserError, match=message):
        compile_lockstep(Learned(rows, how), loss, batches()[0], {}, below=BELOW)


@pytest.mark.parametrize(("how", "rows"), [("counted", 7), ("given", 7), ("shifted", 9), ("indexed", 7)])
@pytest.mark.sample(2)
def test_one_as_long_is_not(how, rows):
    batch = batches()[0]
    assert compile_lockstep(Learned(rows, how), loss, batch, {}, below=BELOW)(batch)["loss"] > 0
