"""Draw odd commands: an option with an unintended value, a hostile file, or several of both."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

from compiler_trainer.config.descriptions import Option, groups

SMALL = (
    "data=synthetic", "train.steps=2", "train.seq_len=16", "train.global_batch_size=2", "lower.backend=eager",
    "eval.batches=1", "run.dir=run",
)  # fmt: skip
DECODER = ("model.dim=16", "model.n_layers=1", "model.n_heads=2", "model.n_kv_heads=1", "model.ffn_dim=16")
POOLS = {
    "int": ("0", "-1", "1", "2", "3", "7", "31", "1000", "1000000", "1000000000", "1000000000000",
            "9223372036854775807", "9223372036854775808", "9" * 400, "9" * 5000, "1e12", "0x10", "1_0"),
    "float": ("0", "-1", "1", "0.5", "1e-300", "1e-30", "1e30", "1e300", "-1e300", "nan", "inf", "-inf", "9" * 400),
    "bool": ("true", "false", "yes", "0"),
}  # fmt: skip
GROUPS = {  # fields that a group needs in order to exist
    "model.experts": "count:4,top_k:2,width:8",
    "model.rope_scaling": "factor:2,low_freq_factor:1,high_freq_factor:4,original_max_position:16",
    "model.latent": "kv_rank:4,nope_dim:4,rope_dim:4,v_dim:4",
}
OTHERS = ("null", "true", "x", "''", "[]", "{}", "[1,2]", "{a:1}", "???", "${nothing}", "${train.steps}", "é", "a b",
          "<script>alert(1)</script>", "../..", "/", "\\", "'$(touch RAN)'", "x" * 5000)  # fmt: skip
SKIPPED = (  # valid values of these take long, or forever
    "run.dry", "run.profile", "lower.backend", "train.steps", "eval.batches", "data.documents", "mesh",
)  # fmt: skip


def cases(count: int, files: Mapping[str, Sequence[str]], draw: random.Random) -> Iterator[tuple[str, ...]]:
    """Yield the arguments of `count` commands: every file once, then options in turn, some two or three at once."""
    drawn = [*with_files(files)]
    options = [option for group in groups() for option in group.options if not option.name.startswith(SKIPPED)]
    draw.shuffle(drawn)
    while len(drawn) < count:
        draw.shuffle(options)
        drawn += [tuple(odd(option, draw) for option in some(options, at, draw)) for at in range(len(options))]
    for changes in drawn[:count]:
        yield (*SMALL, *(DECODER if "model=hf" not in changes else ()), *changes)


def with_files(files: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, ...]]:
    """Yield every hostile file with each option that takes it."""
    for path in files["text"]:
        yield "data=text", f"data.files=[{path}]"
    for path in files["tokenizer"]:
        yield (f"data.tokenizer={path}",)
    for path in files["folder"]:
        yield "model=hf", f"model.path={path}", "data.tokenizer=bytes"
    for path in files["yaml"]:
        yield f"--config-dir={path}", "+odd=odd"
    for path in files["place"]:
        for option in ("run.dir", "checkpoint.dir", "checkpoint.resume", "hydra.run.dir"):
            yield (f"{option}={path}",)


def some(options: Sequence[Option], at: int, draw: random.Random) -> list[Option]:
    """Return the option at an index, and sometimes one or two more."""
    more = draw.choice((0, 0, 0, 1, 2))
    return [options[at], *draw.sample(options, more)]


def odd(option: Option, draw: random.Random) -> str:
    """Return an option with an unintended value of its type, or sometimes of another type."""
    kind = next((kind for kind in POOLS if option.takes.startswith(kind)), "")
    pool = POOLS[kind] if kind and draw.random() < 0.8 else OTHERS
    sign = draw.choice(("", "", "", "", "", "", "", "+", "++"))
    group, _, name = option.name.rpartition(".")
    if group in GROUPS:
        return f"{sign}{group}={{{GROUPS[group]},{name}:{draw.choice(pool)}}}"
    return f"{sign}{option.name}={draw.choice(pool)}"
