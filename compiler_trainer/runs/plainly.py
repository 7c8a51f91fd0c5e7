"""Log-probabilities computed by transformers alone: run as a file, imports nothing of this trainer.

    python -P plainly.py FOLDER < texts.json

For texts [[id, ...], ...] it prints the folder's dtype, and [[log-probability of each id but the first, ...], ...].
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM


@torch.inference_mode()
def log_probabilities(folder: str, texts: list[list[int]]) -> dict[str, Any]:
    """Return the dtype and the log-probabilities of the module's output."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    model = loaded.to(device).eval()
    results = []
    for text in texts:
        ids = torch.tensor([text], device=device)
        log_chances = model(ids).logits[0, :-1].float().log_softmax(-1)
        results.append(log_chances.gather(-1, ids[0, 1:, None])[:, 0].tolist())
    return {"dtype": str(model.dtype).removeprefix("torch."), "log_probabilities": results}


if __name__ == "__main__":
    json.dump(log_probabilities(sys.argv[1], json.load(sys.stdin)), sys.stdout)
