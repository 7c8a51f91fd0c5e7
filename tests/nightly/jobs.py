"""Run whole jobs with random options through the user's commands: `python -m tests.nightly.jobs --cases 20`.

A job trains on 2 to 4 ranks and on one rank, whose losses must agree. It then resumes on one rank, evaluates, exports,
compares with transformers, and samples. Each command is reported as right, refused, or a crash.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

WORDS = "the cat sat on a mat and saw red birds fly over green hills while rain fell down slowly".split()
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SIZES = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 8,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 256,
         "eos_token_id": 256, "pad_token_id": 0}  # fmt: skip
ROUTED = {"num_local_experts": 4, "num_experts_per_tok": 2}
FOLDERS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"tie_word_embeddings": True},
    "Gemma3Text": {"sliding_window": 5},
    "Mixtral": ROUTED,
    "GptOss": ROUTED | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}
KINDS = ("dense", "experts", "latent", "folder", "lora")
TEXTS = {"text": 60, "chat": 20, "pairs": 10}  # kind of data -> maximum words of a text
FIXED = ["lower.backend=eager", "checkpoint.interval=3", "eval.interval=3", "eval.batches=2", "optim.lr=0.003"]
ALONE = [f"mesh.{axis}=1" for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")]
CLOSE = 0.02  # largest relative difference between losses of a mesh and of one rank, also in bfloat16


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the jobs, print one line per command and the counts; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.nightly.jobs", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    counts = Counter[str]()
    with tempfile.TemporaryDirectory() as scratch:
        library = Path(scratch, "library")
        write_library(library)
        for number in range(args.cases):
            options, ranks = draw_job(random.Random(f"{args.seed} {number}"), library)
            print(f"{number}: {ranks} ranks, {shlex.join(options)}", flush=True)
            for command, verdict in job(options, ranks, Path(scratch, str(number))):
                counts[verdict.split(":")[0]] += 1
                print(f"    {command}: {verdict}", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    return int(bool(counts["wrong"] or counts["crash"]))


def write_library(folder: Path) -> None:
    """Write texts, chats, pairs, a byte tokenizer with a chat template, and small models saved by transformers."""
    import torch
    import transformers

    rng = random.Random(0)
    folder.mkdir()

    def words(most: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(2, most)))

    records = {
        "text": lambda n: {"text": words(n)},
        "chat": lambda n: {"messages": [{"role": role, "content": words(n)} for role in ("user", "assistant")]},
        "pairs": lambda n: {name: words(n) for name in ("prompt", "chosen", "rejected")},
    }
    for kind, most in TEXTS.items():
        (folder / f"{kind}.jsonl").write_text("".join(json.dumps(records[kind](most)) + "\n" for _ in range(200)))
    write_tokenizer(folder)
    transformers.utils.logging.disable_progress_bar()
    for name, options in FOLDERS.items():
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**SIZES | options)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        write_tokenizer(folder / name)


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one token per byte, an end-of-document token and the ChatML template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": CHATML, "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def draw_job(rng: random.Random, library: Path) -> tuple[list[str], int]:
    """Draw the options of a job and its number of ranks."""
    kind, data, ranks = rng.choice(KINDS), rng.choice([*TEXTS, "synthetic"]), rng.choice((2, 3, 4))
    microbatches = rng.choice((1, 2, 4))
    options = [*model_of(rng, kind, library), *data_of(rng, data, library, kind in ("folder", "lora"))]
    mesh = mesh_of(rng, ranks, experts=kind == "experts")
    options += [*mesh, f"train.microbatches={microbatches}", f"train.global_batch_size={rng.choice((4, 8))}"]
    options += [f"train.seq_len={256 if data == 'pairs' else rng.choice((64, 65, 96))}"]
    options += [f"optim={rng.choice(('adamw', 'adamw', 'sgd', 'muon', 'adamw8bit'))}", "optim.block=16"]
    options += [f"passes.remat.policy={rng.choice(('selective', 'none', 'full', 'offload', 'attention'))}"]
    seldom = {
        "train.ema=0.9": 0.3,
        "passes.cast.param_dtype=bfloat16": 0.2,
        "passes.accumulate.gather=microbatch": 0.2,
        "passes.communication.async_tp=all": 0.2,
        "train.nonfinite=skip": 0.2,
        "eval.prompts=[the cat]": 0.3,
        "eval.sample_tokens=4": 1.0,
    }
    return [*options, *(option for option, chance in seldom.items() if rng.random() < chance), *FIXED], ranks


def model_of(rng: random.Random, kind: str, library: Path) -> list[str]:
    """Draw the options of a model."""
    if kind in ("folder", "lora"):
        lora = ["+model.lora.rank=4", "model.lora.targets=[all-linear]"]
        return ["model=hf", f"model.path={library / rng.choice([*FOLDERS])}", *(lora if kind == "lora" else [])]
    options = ["model=moe_debug"] if kind == "experts" else []
    options += ["model.dim=32", "model.n_heads=4", f"model.n_kv_heads={4 if kind == 'latent' else rng.choice((2, 4))}"]
    options += ["model.ffn_dim=40", f"model.n_layers={rng.choice((2, 3))}", "model.vocab_size=300"]
    options += ["model.tied=true"] * (rng.random() < 0.3) + ["model.qk_norm=learned"] * (kind != "latent")
    if kind == "experts":
        options += ["model.experts.count=4", "model.experts.top_k=2", "model.experts.width=24"]
        options += ["model.experts.balance_loss=0.0", f"model.experts.shared={rng.choice((0, 0, 1))}"]
    if kind == "latent":
        sizes = {"kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "v_dim": 8}
        options += ["model.norm_eps=1e-6", *(f"+model.latent.{name}={size}" for name, size in sizes.items())]
    return options


def data_of(rng: random.Random, data: str, library: Path, folder: bool) -> list[str]:
    """Draw the options of the data; our own decoder needs a tokenizer, a model folder brings one."""
    if data == "synthetic":
        return ["data=synthetic", "data.documents=200", *(["data.tokenizer=bytes"] if folder else [])]
    options = ["data=text", f"data.files=[{library / data}.jsonl]"]
    options += [] if folder else [f"data.tokenizer={library / 'tokenizer.json'}"]
    options += ["model.attention=documents"] if data == "pairs" or rng.random() < 0.4 else []
    packing = ["data.packing=fit"] if rng.random() < 0.4 else []
    further = {"text": packing, "chat": ["data.chat=true"], "pairs": ["data.chat=true", "data.pairs=true"]}
    further["pairs"] += [f"loss={rng.choice(('dpo', 'ipo', 'simpo', 'orpo', 'cpo'))}"] if data == "pairs" else []
    return options + further[data]


def mesh_of(rng: random.Random, ranks: int, experts: bool) -> list[str]:
    """Draw one axis, or two axes of two ranks each; shard experts over the data axes if their size is even."""
    axes = rng.sample(("dp_shard", "dp_replicate", "cp", "tp", "pp"), 2)
    sizes = dict.fromkeys(axes, 2) if ranks == 4 and rng.random() < 0.6 else {axes[0]: ranks}
    options = [f"mesh.{axis}={size}" for axis, size in ({"dp_shard": 1} | sizes).items()]
    if "pp" in sizes:
        options += [f"passes.pipeline.schedule={rng.choice(('1f1b', 'interleaved', 'zero_bubble', 'zbv'))}"]
    fits = sizes.get("dp_shard", 1) * sizes.get("cp", 1) % 2 == 0
    return options + ["mesh.ep=2"] * (experts and fits and rng.random() < 0.6)


def job(options: list[str], ranks: int, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield each command of a job with its verdict."""
    folder.mkdir()
    run, out = folder / "mesh", folder / "export"
    verdict = run_command("launch", "-n", str(ranks), *options, "train.steps=6", f"run.dir={run}")
    yield "train", verdict
    if verdict != "right":
        return
    alone = [o for o in options if not o.startswith(("mesh.", "passes.pipeline"))]
    verdict = run_command(*alone, *ALONE, "train.steps=6", f"run.dir={folder / 'one'}")
    yield "train on one rank", compare_losses(run, folder / "one") if verdict == "right" else verdict
    allowed = "checkpoint.allow=[train.steps,mesh,passes]"
    yield "continue on one rank", run_command("resume", run, "train.steps=8", allowed, *ALONE)
    yield "eval", run_command("eval", run)
    verdict = run_command("export", run, out)
    yield "export", verdict
    if verdict == "right":
        yield "check-export", run_command("check-export", run, out)
    yield "generate", run_command("generate", run, "--prompt", "the cat", "--tokens", "8")


def run_command(*arguments: str | Path) -> str:
    """Run a command and return its verdict: right, refused or crash, with the reason."""
    command = [sys.executable, "-m", "compiler_trainer", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    output = (done.stdout + done.stderr).strip().splitlines()
    if done.returncode == 0:
        return "right"
    if "Traceback" in done.stdout + done.stderr:
        return f"crash: {output[-1]}"
    return next((f"refused: {line}" for line in reversed(output) if "error:" in line), f"crash: {output[-1:]}")


def compare_losses(run: Path, other: Path) -> str:
    """Return "right" if the losses of two runs agree to `CLOSE`, otherwise "wrong" with the difference."""
    ours, theirs = losses(run), losses(other)
    if ours.keys() != theirs.keys():
        return f"wrong: {len(ours)} and {len(theirs)} steps"
    off = max(abs(ours[step] - loss) / abs(loss) for step, loss in theirs.items())
    return "right" if off < CLOSE else f"wrong: losses differ by {off:.1e}"


def losses(run: Path) -> dict[int, float]:
    """Return the loss of each step."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


if __name__ == "__main__":
    sys.exit(main())
