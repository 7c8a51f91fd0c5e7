"""An export has all files of the model's folder except weights; generation stops at the end of a turn."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import folders
import pytest
from byte_tokenizer import CHATML, write_tokenizer
from commands import call
from transformers import AutoTokenizer, GenerationConfig

from compiler_trainer.runs.export import end_of_turn, is_copied

GENERATION = {"bos_token_id": 256, "eos_token_id": [256, 12], "do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}
FILES = ["vocab.json", "merges.txt", "spiece.model", "added_tokens.json", "special_tokens_map.json", "preprocessor_config.json",
         "additional_chat_templates/tools.jinja", "LICENSE", "configuration_own.py", "qwen.tiktoken"]
LEFT_OUT = ["README.md", "pytorch_model.bin", "pytorch_model.bin.index.json", "original/params.json", ".gitattributes", "tf_model.h5"]


def written(folder, template):
    """Write a tokenizer with a chat template."""
    write_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "<|endoftext|>"}))


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Return a folder like published ones: several end tokens, sampling settings, a template, and other files."""
    folder = tmp_path_factory.mktemp("published") / "model"
    shutil.copytree(folders.folder("qwen3"), folder)
    written(folder, CHATML)
    (folder / "chat_template.jinja").write_text(CHATML)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    for name in (*FILES, *LEFT_OUT):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}" if name.endswith(".json") else "text")
    for name in ("vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json"):
        (folder / name).unlink()  # the tokenizer would read these
    return folder


def exported(published, tmp_path, *options):
    data = tmp_path / "chats.jsonl"
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    data.write_text("\n".join(json.dumps({"messages": chat, "text": "hi yo"}) for _ in range(8)))
    run = tmp_path / "run"
    job = ["model=hf", f"model.path={published}", f"data.tokenizer={published}/tokenizer.json", "data=text", f"data.files=[{data}]",
           "data.eval_fraction=0", "train.steps=2", "train.seq_len=64", "train.global_batch_size=2", "eval.interval=null",
           "lower.backend=eager", "run.dump_graphs=false", f"run.dir={run}", *options]
    assert call(*job) == 0
    assert call("export", run, tmp_path / "out") == 0
    return tmp_path / "out"


@pytest.mark.full
def test_all_files_but_weights_and_the_settings_of_generation_are_there(published, tmp_path):
    """Earlier, generation_config.json was made from config.json: one end token, no sampling."""
    out = exported(published, tmp_path)
    assert json.loads((out / "generation_config.json").read_text()) == GENERATION
    there = {file.relative_to(out).as_posix() for file in out.rglob("*") if file.is_file()}
    assert {name for name in FILES if (published / name).exists()} <= there and not there & set(LEFT_OUT)
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= there


@pytest.mark.parametrize("name", FILES)
def test_what_is_copied(name):
    assert is_copied(Path(name)) and not any(is_copied(Path(other)) for other in (*LEFT_OUT, "config.json", "model-00001-of-00002.safetensors"))


@pytest.mark.full
def test_a_model_tuned_on_chats_stops_at_their_end_of_turn_too(published, tmp_path):
    out = exported(published, tmp_path, "data.chat=true")
    end = AutoTokenizer.from_pretrained(out).convert_tokens_to_ids("<|im_end|>")
    found = GenerationConfig.from_pretrained(out)
    assert sorted(found.eos_token_id) == sorted([*GENERATION["eos_token_id"], end])
    assert (found.temperature, found.top_p, found.top_k, found.do_sample) == (0.6, 0.95, 20, True)


@pytest.mark.full
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("other", ["folder", "bytes"])
def test_an_export_has_the_tokenizer_of_the_run(published, tmp_path, other, lora):
    """Earlier, files of the model's folder took its place."""
    template = "MINE {{ messages[0].content }}"
    (tmp_path / "mine").mkdir()
    written(tmp_path / "mine", template)
    tokenizer = "bytes" if other == "bytes" else f"{tmp_path}/mine/tokenizer.json"
    out = exported(published, tmp_path, f"data.tokenizer={tokenizer}", *(["+model.lora.rank=2"] if lora else []))
    found = AutoTokenizer.from_pretrained(out)
    assert found.chat_template == (None if other == "bytes" else template)
    assert len(found) == (257 if other == "bytes" else 259) and not (out / "spiece.model").exists()
    assert (out / "LICENSE").exists()


@pytest.mark.parametrize(("template", "wanted"), [
    (CHATML, "<|im_end|>"),
    (CHATML.replace("'<|im_end|>' + ", ""), None),  # answers end with a newline
    (CHATML.replace("<|im_end|>", "</answer><|endoftext|>"), "<|endoftext|>"),
])
def test_the_end_of_a_turn_is_an_added_token_behind_the_answer(template, wanted, tmp_path):
    written(tmp_path, template)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    found = end_of_turn(tmp_path)
    assert (None if found is None else AutoTokenizer.from_pretrained(tmp_path).convert_ids_to_tokens(found)) == wanted
