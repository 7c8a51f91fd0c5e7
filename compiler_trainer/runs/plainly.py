"""Log-probabilities computed by transformers and peft alone: run as a file, imports nothing of this trainer.

    python -P plainly.py FOLDER HEAD < texts.json
    python -P plainly.py FILE.gguf lm CONFIG < texts.json

CONFIG is a folder with the model's config.json, for options that transformers (5.23) does not read from GGUF.
For texts [[id, ...], ...] it prints the folder's dtype, and [[log-probability of each id but the first, ...], ...]; for
other heads than `lm`, the sums of the outputs of each token but the last.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

FILE_TYPES = {0: "float32", 1: "float16", 7: "q8_0", 32: "bfloat16"}  # of GGUF
CLASSES = {"lm": "AutoModelForCausalLM", "score": "AutoModelForSequenceClassification", "none": "AutoModel"}


@torch.inference_mode()
def values_of(place: str, head: str, texts: list[list[int]], config: str = "") -> dict[str, Any]:
    """Return the dtype of the weights and the values of the module's output."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, dtype = from_gguf(place, config) if config else loaded(place, head)
    model.to(device).eval()
    values = of_tokens if head == "lm" else of_outputs
    results = [values(model, torch.tensor([text], device=device)).tolist() for text in texts]
    return {"dtype": dtype, "values": results}


def of_tokens(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each of ids [1, T] but the first."""
    log_chances = model(ids).logits[0, :-1].float().log_softmax(-1)
    return log_chances.gather(-1, ids[0, 1:, None])[:, 0]


def of_outputs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the sum of scores or features of each of ids [1, T] but the last, each as the last of a text."""
    rows = [model(ids[:, :end])[0][0] for end in range(1, ids.shape[1])]
    return torch.stack([row.reshape(-1, row.shape[-1])[-1].float().sum() for row in rows])


def from_gguf(file: str, config: str) -> tuple[Any, str]:
    """Return the model of a GGUF file in float32, with the options that the file has, and the type of its weights."""
    folder, name = str(Path(file).parent), Path(file).name
    in_file = transformers.PreTrainedConfig.get_config_dict(folder, gguf_file=name)[0]
    options = transformers.AutoConfig.from_pretrained(config).to_dict()
    rope = options["rope_parameters"]
    rope.get("full_attention", rope)["rope_theta"] = in_file.pop("rope_theta")
    if in_file["model_type"] == "mistral":  # a llama in GGUF, for whose tensors transformers has no names
        in_file["model_type"] = "llama"
    merged = transformers.AutoConfig.for_model(**options | in_file)
    settings = {"gguf_file": name, "config": merged, "dtype": torch.float32, "output_loading_info": True}
    loading: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, **settings)
    model, info = loading
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"it reads no {missing[0]} from a GGUF file of this kind")
    fields = importlib.import_module("gguf").GGUFReader(file).fields
    return model, FILE_TYPES[fields["general.file_type"].contents()]


def loaded(folder: str, head: str) -> tuple[Any, str]:
    """Return the model of a folder, and the dtype of its weights."""
    model = of_folder(folder, head)
    return model, "float8" if hasattr(model.config, "quantization_config") else str(model.dtype).removeprefix("torch.")


def of_folder(folder: str, head: str) -> Any:
    """Return the model of a folder. peft loads adapters, because transformers (5.23) leaves out the lengths of DoRA."""
    file = Path(folder, "adapter_config.json")
    if not file.exists():
        return kind_of(folder, head).from_pretrained(folder, dtype="auto")
    base = json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"]
    adapters = importlib.import_module("peft").PeftModel  # which takes seconds to import
    score = load_file(file.with_name("adapter_model.safetensors")).get("base_model.model.score.weight")
    options = {} if score is None else {"num_labels": len(score)}
    return adapters.from_pretrained(kind_of(base, head).from_pretrained(base, dtype="auto", **options), folder)


def kind_of(folder: str, head: str) -> Any:
    """Return the class of transformers for the model of a folder: a vision-language model has no other head."""
    config = type(transformers.AutoConfig.from_pretrained(folder))
    sees = head == "lm" and config not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return getattr(transformers, "AutoModelForImageTextToText" if sees else CLASSES[head])


if __name__ == "__main__":
    place, head, *config = sys.argv[1:]
    json.dump(values_of(place, head, json.load(sys.stdin), *config), sys.stdout)
