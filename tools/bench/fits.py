"""Predict what fits on one GPU: `python -m tools.bench.fits --write docs/measured/fits.md`.

Ten models, each trained in full, by LoRA and by QLoRA, on one row of tokens whose layers are recomputed. Dry runs
predict the memory at three lengths. The peak of a short row may be in the update, which no token adds to; that of long
rows grows by the same bytes for each token. The models' sizes are those of the config.json on the hub.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.device import for_predicting
from compiler_trainer.config.schema import Config
from compiler_trainer.config.validate import validate
from compiler_trainer.planning.dry import compile_dry, predict_step
from tools.pages import renew

GIB = 2**30
LENGTHS = 2048, 16384, 32768  # tokens of a row
MEMORY = 24, 48, 80  # GiB of a GPU
STEP = 1024  # lengths are rounded down to multiples
METHODS = {"full": "recipe=finetune", "LoRA": "recipe=lora", "QLoRA": "recipe=qlora"}


def decoder(kind: str, size: int, ffn: int, layers: int, heads: int, **others: Any) -> Any:
    """Return the config of a model with 8 heads of keys."""
    others |= {"hidden_size": size, "intermediate_size": ffn, "num_hidden_layers": layers, "num_key_value_heads": 8}
    return getattr(transformers, f"{kind}Config")(num_attention_heads=heads, **others)


def qwen3(size: int, ffn: int, layers: int, heads: int, tied: bool = False) -> Any:
    """Return the config of a Qwen3."""
    others = {"head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960, "tie_word_embeddings": tied}
    return decoder("Qwen3", size, ffn, layers, heads, **others)


def llama3(size: int, ffn: int, layers: int, heads: int, tied: bool = False) -> Any:
    """Return the config of a Llama 3."""
    others = {"vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": tied}
    return decoder("Llama", size, ffn, layers, heads, **others)


def mistral_large() -> Any:
    """Return the config of Mistral Large 2."""
    others = {"head_dim": 128, "vocab_size": 32768, "max_position_embeddings": 131072, "sliding_window": None}
    return decoder("Mistral", 12288, 28672, 88, 96, **others)


def qwen3_moe(size: int, width: int, layers: int, heads: int, keys: int, experts: int) -> Any:
    """Return the config of a Qwen3 mixture, 8 of whose experts compute each token."""
    others: dict[str, Any] = {"head_dim": 128}
    return transformers.Qwen3MoeConfig(
        hidden_size=size,
        moe_intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        num_experts=experts,
        num_experts_per_tok=8,
        vocab_size=151936,
        max_position_embeddings=40960,
        norm_topk_prob=True,
        **others,
    )


def gpt_oss(layers: int, experts: int) -> Any:
    """Return the config of a gpt-oss."""
    return transformers.GptOssConfig(num_hidden_layers=layers, num_local_experts=experts)


MODELS = {
    "Qwen3-0.6B": lambda: qwen3(1024, 3072, 28, 16, tied=True),
    "Llama-3.2-1B": lambda: llama3(2048, 8192, 16, 32, tied=True),
    "Llama-3.2-3B": lambda: llama3(3072, 8192, 28, 24, tied=True),
    "Qwen3-4B": lambda: qwen3(2560, 9728, 36, 32, tied=True),
    "Llama-3.1-8B": lambda: llama3(4096, 14336, 32, 32),
    "Qwen3-8B": lambda: qwen3(4096, 12288, 36, 32),
    "Qwen3-14B": lambda: qwen3(5120, 17408, 40, 40),
    "Qwen3-32B": lambda: qwen3(5120, 25600, 64, 64),
    "Llama-3.3-70B": lambda: llama3(8192, 28672, 80, 64),
    "Mistral-Large-2 (123B)": mistral_large,
    "Qwen3-30B-A3B": lambda: qwen3_moe(2048, 768, 48, 32, 4, 128),
    "gpt-oss-20b": lambda: gpt_oss(24, 32),
    "gpt-oss-120b": lambda: gpt_oss(36, 128),
}


@dataclass(frozen=True)
class Line:
    """Predicted bytes of a GPU: of parameters, for a short row, and `fixed` + `per_token` a token for a long one."""

    weights: int
    short: int
    fixed: float
    per_token: float

    def longest(self, gib: int) -> int:
        """Return the most tokens, in steps of 1,024, that fit; 0 if a short row does not."""
        tokens = int((gib * GIB - self.fixed) / self.per_token) // STEP * STEP
        return tokens if self.short <= gib * GIB and tokens >= LENGTHS[0] else 0


def config(folder: Path, method: str, length: int) -> Config:
    """Return the job of a model and a method on one GPU."""
    where = ["run.dry=true", "cluster=h100", "cluster.gpus=1", "mesh.dp_shard=1"]
    data = ["data=synthetic", "data.tokenizer=bytes"]
    job = ["train.global_batch_size=1", "train.microbatches=1", f"train.seq_len={length}", "passes.remat.policy=full"]
    weights = [] if method == "full" else ["train.dtype=bfloat16"]
    options = [METHODS[method], f"model.path={folder}", "model.init=random", *where, *data, *job, *weights]
    return validate(for_predicting(to_config(compose(options))), 1)


def memory(cfg: Config) -> Mapping[str, Any]:
    """Return the predicted memory of a job."""
    return predict_step(cfg, compile_dry(cfg, None))["prediction"]["memory"]


def line(folder: Path, method: str) -> Line:
    """Return the memory of a model and a method."""
    results = [memory(config(folder, method, length)) for length in LENGTHS]
    short, middle, long = (result["device_bytes"] for result in results)
    per_token = (long - middle) / (LENGTHS[2] - LENGTHS[1])
    return Line(results[0]["kinds"]["parameters"], short, long - per_token * LENGTHS[2], per_token)


def rows(names: list[str]) -> Iterator[str]:
    """Yield a row of the table for each model and method."""
    lengths = " | ".join(f"{gib} GiB" for gib in MEMORY)
    yield f"| model | method | weights, GiB | {LENGTHS[0]:,} tokens, GiB | longest row on {lengths} |"
    yield "|---" * (4 + len(MEMORY)) + "|"
    for name in names:
        with tempfile.TemporaryDirectory() as scratch:
            MODELS[name]().save_pretrained(scratch)
            written = json.loads(Path(scratch, "config.json").read_text()) | {"architectures": None}
            Path(scratch, "config.json").write_text(json.dumps(written))
            for method in METHODS:
                memory_line = line(Path(scratch), method)
                longest = [memory_line.longest(gib) for gib in MEMORY]
                fits = " | ".join(f"{tokens:,}" if tokens else "-" for tokens in longest)
                sizes = f"{memory_line.weights / GIB:.1f} | {memory_line.short / GIB:.1f}"
                yield f"| {name} | {method} | {sizes} | {fits} |"


def main() -> None:
    """Print the table, or write it between its markers in a page."""
    parser = argparse.ArgumentParser("python -m tools.bench.fits", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--write", type=Path, help="replace the table between its markers in a file")
    args = parser.parse_args()
    table = []
    for row in rows(args.models):
        print(row, flush=True)
        table.append(row)
    if args.write:
        renew(args.write, "bench fits", "\n".join(table))


if __name__ == "__main__":
    main()
