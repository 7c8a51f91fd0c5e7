"""Log-probabilities computed by transformers and peft alone: run as a file, imports nothing of this trainer.

    python -P plainly.py FOLDER < texts.json

For texts [[id, ...], ...] it prints the folder's dtype, and [[log-probability of each id but the first, ...], ...].
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText


@torch.inference_mode()
def log_probabilities(folder: str, texts: list[list[int]]) -> dict[str, Any]:
    """Return the dtype and the log-probabilities of the module's output."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = loaded(folder).to(device).eval()
    results = []
    for text in texts:
        ids = torch.tensor([text], device=device)
        log_chances = model(ids).logits[0, :-1].float().log_softmax(-1)
        results.append(log_chances.gather(-1, ids[0, 1:, None])[:, 0].tolist())
    return {"dtype": str(model.dtype).removeprefix("torch."), "log_probabilities": results}


def loaded(folder: str) -> Any:
    """Return the model of a folder. peft loads adapters, because transformers (5.23) leaves out the lengths of DoRA."""
    file = Path(folder, "adapter_config.json")
    if not file.exists():
        is_text = type(AutoConfig.from_pretrained(folder)) in MODEL_FOR_CAUSAL_LM_MAPPING
        kind = AutoModelForCausalLM if is_text else AutoModelForImageTextToText
        return kind.from_pretrained(folder, dtype="auto")
    base = json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"]
    adapters = importlib.import_module("peft").PeftModel  # which takes seconds to import
    return adapters.from_pretrained(loaded(base), folder)


if __name__ == "__main__":
    json.dump(log_probabilities(sys.argv[1], json.load(sys.stdin)), sys.stdout)
