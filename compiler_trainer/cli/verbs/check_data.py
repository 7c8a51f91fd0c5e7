"""`check-data`: print a record as the model will see it, next to transformers' own text, and list unused fields.

    compiler-trainer check-data chats.jsonl model.path=qwen
    compiler-trainer check-data notes.jsonl model.path=qwen --record 3 data.text_column=body
    compiler-trainer check-data data=hf_dataset data.path=FOLDER model.path=qwen

Exit codes: 0 text and tokens are those of transformers, 1 they differ, or a record is bad; 2 the input is refused.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from compiler_trainer.cli.table import parser
from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.jobs import as_override, of_records, pasted, with_files
from compiler_trainer.config.schema import DataConfig
from compiler_trainer.config.validate import validate_data
from compiler_trainer.data.preview import KINDS, Reader, Shown, table
from compiler_trainer.data.records import BadRecord


def main(arguments: Sequence[str]) -> int:
    """Print a record, and counts of the first records; return the exit code."""
    arg_parser = parser("check-data")
    arg_parser.add_argument(
        "overrides", nargs="*", metavar="FILE | OPTION=VALUE", help="the data, and its model or tokenizer"
    )
    arg_parser.add_argument(
        "--record", type=int, default=1, metavar="N", help="the record to print, from 1 (default 1)"
    )
    arg_parser.add_argument(
        "--tokens", type=int, default=400, metavar="COUNT", help="most tokens of it to print (default 400)"
    )
    arg_parser.add_argument(
        "--records", type=int, default=1000, metavar="COUNT", help="records to read (default 1,000)"
    )
    flags = arg_parser.parse_intermixed_args(arguments)
    for flag in ("record", "tokens", "records"):
        if getattr(flags, flag) < 1:
            raise UserError(f"--{flag}", f"{getattr(flags, flag)} must be at least 1")
    names = {override.partition("=")[0] for override in flags.overrides if "=" in override}
    cfg = config_of(flags.overrides, names)
    sets_kind = names & {"data.chat", "data.pairs"}
    reader = Reader(cfg, [{"chat": cfg.chat, "pairs": cfg.pairs}] if sets_kind else KINDS)
    is_same = show(reader, flags.record, flags.tokens)
    counts = reader.scan(flags.records)
    print("\n".join(counts.lines()))
    options = of_records(dataclasses.replace(cfg, chat=reader.chat, pairs=reader.pairs))
    print(f"train on it with: {pasted({'data': cfg.name, **options})}")
    return 0 if is_same and not counts.bad else 1


def config_of(overrides: Sequence[str], names: set[str]) -> DataConfig:
    """Return the data options that the arguments name; raise UserError."""
    overrides = with_files(overrides)
    options, files = [item for item in overrides if "=" in item], [item for item in overrides if "=" not in item]
    if files and "data.files" in names:
        raise UserError("data.files", f"is set, and {files[0]} is given, too; leave one of them out")
    if files:
        options = [
            *([] if "data" in names else ["data=text"]),
            *options,
            f"data.files={as_override(files)}",
        ]
    if "model.path" in names and not names & {"model", "recipe"}:
        options = ["model=hf", *options]
    if "data.pairs" in names and not names & {"loss", "recipe"}:
        options.append("loss=dpo")
    cfg = validate_data(to_config(compose(options)))
    if cfg.sources or cfg.name not in ("text", "hf_dataset"):
        raise UserError("data", f"is {cfg.name}; name a file, data=text or data=hf_dataset, one source at a time")
    return cfg


def show(reader: Reader, number: int, most: int) -> bool:
    """Print a record; return True if its text and tokens are those of transformers."""
    record = next(itertools.islice(reader.records(), number - 1, None), None)
    if record is None:
        raise UserError("--record", f"{number} is beyond the last record; name a lower one")
    notes: list[str] = []
    print(record.where())
    try:
        documents = reader.documents(record.read(), notes)
    except BadRecord as error:
        print(f"bad: {error}")
        return False
    for place, shown in enumerate(documents, 1):
        print(f"\nsample {place} of {len(documents)}: {len(shown.tokens):,} tokens, {sum(shown.labels):,} labels")
        print("\n".join(table(shown, reader.tokenizer, most)))
        print(comparison(shown))
    print("\n".join(["", *(f"note: {note}" for note in dict.fromkeys(notes)), ""]).rstrip("\n") + "\n")
    return all(shown.is_same for shown in documents)


def comparison(shown: Shown) -> str:
    """Return transformers' text of a sample, and whether text and tokens are the same."""
    if shown.theirs is None:
        return "as the tokenizer writes it by itself" if shown.is_same else "the tokenizer itself gives other tokens"
    same = "the same tokens" if shown.is_same else "OTHER tokens"
    return f"apply_chat_template gives {same}, of this text:\n{shown.theirs}"
