"""Runs of models with another head, from a file to a folder that transformers loads and that gives the same outputs."""

from __future__ import annotations

import json
import re

import peft
import pytest
import torch
from commands import call
from doc_places import TEMPLATE, tokenizer
from folders import model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer, pipeline

from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.validate import validate
from compiler_trainer.data.records import BadRecord, class_of
from compiler_trainer.models.heads import embedding
from compiler_trainer.runs.saved import options_of, trained_model

SMALL = (
    "train.seq_len=64", "train.global_batch_size=4", "train.steps=6", "eval.interval=3", "checkpoint.interval=3",
    "data.eval_fraction=0.2", "optim.lr=3e-3", "lower.backend=eager", "run.dump_graphs=false", "data.cache=cache", "data=text",
)  # fmt: skip
LORA = "model.lora={rank:2,targets:[all-linear]}"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Return a folder, the current one, with a model whose padding token ends documents, as in many of the hub."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model("qwen3").save_pretrained("qwen")
    tokenizer().save("qwen/tokenizer.json")
    (tmp_path / "qwen/tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}')
    (tmp_path / "qwen/chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


def write(name, rows):
    with open(name, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def pairs(count=30):
    return [{"prompt": f"{i}?", "chosen": "Sea." + "!" * (i % 3), "rejected": "No."} for i in range(count)]


def chat(prompt, answer):
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


# ---- rewards -------------------------------------------------------------------------------------------

REWARD = ("recipe=reward", "model.path=qwen", "data.files=[pairs.jsonl]", *SMALL)


@pytest.mark.full
@pytest.mark.parametrize("options", [(), (LORA,), (LORA, "model.quantize=int8", "checkpoint.frozen=false")], ids=str)
def test_a_reward_model_ranks_answers_and_transformers_scores_them_alike(options, place):
    write("pairs.jsonl", pairs())
    assert call(*REWARD, *options, "run.dir=run") == 0
    first, *_, last = read(place / "run")
    assert first["loss"] > last["loss"] and last["eval_reward_accuracy"] == 1
    assert last["eval_reward_margin"] > first["reward_margin"]
    assert call("export", "run", "out", *["--merge"] * bool(options)) == 0
    scorer = AutoModelForSequenceClassification.from_pretrained("out").eval()
    assert scorer.num_labels == 1 and type(scorer).__name__ == "Qwen3ForSequenceClassification"
    ids = [AutoTokenizer.from_pretrained("out").apply_chat_template(chat("7?", answer), return_tensors="pt")["input_ids"] for answer in ("Sea.!", "No.")]
    (chosen,), (rejected,) = (scorer(input_ids=row).logits[0].tolist() for row in ids)
    assert chosen > rejected
    trained, module = trained_model(options_of(place / "run", []))
    batches = [{"tokens": row, "positions": torch.arange(row.shape[1])[None], "documents": torch.zeros_like(row)} for row in ids]
    ours = [trained.logits(module, batch)[0, -1, 0].item() for batch in batches]
    assert [chosen, rejected] == pytest.approx(ours, abs=1e-2 if "model.quantize=int8" in options else 1e-5)


@pytest.mark.full
def test_a_head_is_resumed_and_is_part_of_an_adapter(place):
    write("pairs.jsonl", pairs())
    job = [*REWARD, LORA, "checkpoint.frozen=false", "lr_schedule=constant", "lr_schedule.warmup_ratio=0"]
    assert call(*job, "run.dir=whole") == 0
    assert call(*job, "train.steps=3", "run.dir=parts") == 0
    assert call(*job, "checkpoint.resume=latest", "run.dir=parts") == 0
    assert [r["loss"] for r in read(place / "whole")] == [r["loss"] for r in read(place / "parts")]
    assert call("export", "parts", "adapter") == 0 and call("export", "whole", "merged", "--merge") == 0
    assert load_file("adapter/adapter_model.safetensors")["base_model.model.score.weight"].shape == (1, 24)
    base = AutoModelForSequenceClassification.from_pretrained("qwen", num_labels=1)
    ids = torch.randint(4, 260, (1, 9))
    adapted, merged = peft.PeftModel.from_pretrained(base, "adapter"), AutoModelForSequenceClassification.from_pretrained("merged")
    torch.testing.assert_close(adapted.eval()(input_ids=ids).logits, merged.eval()(input_ids=ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.full
def test_a_model_that_scores_writes_nothing(place, capsys):
    write("pairs.jsonl", pairs(8))
    assert call(*REWARD, "train.steps=1", "eval.interval=null", "checkpoint.keep_best=0", "run.dir=run") == 0
    assert "compiler-trainer generate" not in capsys.readouterr().out
    assert call("generate", "run", "--prompt", "a") == 2
    assert "model.head: is score, so the model writes nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, message",
    [
        (["model.head=lm"], "model.head: lm with loss=reward, which needs model.head=score, as recipe=reward has"),
        (["loss=dpo"], "model.head: score has no next tokens to learn; set loss=reward"),
        (["data.pairs=false"], "loss.name: reward compares two answers; set data.pairs=true"),
        (["eval.prompts=[a]"], "eval.prompts: are continued, and a model with model.head=score writes nothing"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_options_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        validate(to_config(compose(["recipe=reward", "model.path=qwen", "data=text", "data.files=[pairs.jsonl]", *options])), 1)


def test_our_own_decoders_have_no_such_head():
    data = ("data=text", "data.files=[pairs.jsonl]", "data.chat=true", "data.pairs=true", "data.tokenizer=TOK", "model.attention=documents")
    with pytest.raises(UserError, match="loss.name: reward puts a head on a model of transformers; set model=hf"):
        validate(to_config(compose(["loss=reward", *data])), 1)


@pytest.mark.full
def test_margins_are_read_and_each_pair_needs_one(place, capsys):
    write("pairs.jsonl", [pair | {"margin": 0.5} for pair in pairs()])
    assert call(*REWARD, "data.margins=true", "train.steps=3", "run.dir=run") == 0
    assert "fields not used" not in capsys.readouterr().out
    first = read(place / "run")[0]
    assert first["loss"] > 0.8 and abs(first["reward_margin"]) < 0.2  # log(1 + exp(0.5)) = 0.97
    assert call(*REWARD, "train.steps=1", "run.dir=without") == 0
    assert "fields not used: margin" in capsys.readouterr().out
    write("pairs.jsonl", [*pairs(8), pairs(1)[0] | {"margin": "much"}])
    assert call(*REWARD, "data.margins=true", "run.dir=lacking") == 2
    assert 'pairs.jsonl:1: has no field "margin"' in capsys.readouterr().err


# ---- classes -------------------------------------------------------------------------------------------

WORDS = {"bad": "negative", "fine": "positive", "odd": "mixed"}
CLASSIFY = ("recipe=classify", "model.path=qwen", "data.files=[reviews.jsonl]", "data.labels=[negative,positive,mixed]", *SMALL)


def reviews(count=60):
    return [{"text": f"{'so ' * (i % 4)}{word}", "label": label} for i in range(count // 3) for word, label in WORDS.items()]


@pytest.mark.full
@pytest.mark.parametrize("options", [(), (LORA,)], ids=str)
def test_a_classifier_learns_and_transformers_classifies_alike(options, place):
    write("reviews.jsonl", reviews())
    assert call(*CLASSIFY, *options, "train.steps=24", "eval.interval=12", "checkpoint.interval=12", "optim.lr=1e-2", "run.dir=run") == 0
    last = read(place / "run")[-1]
    assert last["loss"] < 0.5 and last["eval_accuracy"] == 1
    assert call("export", "run", "out", *["--merge"] * bool(options)) == 0
    classify = pipeline("text-classification", "out", device="cpu")
    assert [entry["label"] for entry in classify(list(WORDS), batch_size=3)] == list(WORDS.values())
    config = AutoConfig.from_pretrained("out")
    assert config.id2label == {0: "negative", 1: "positive", 2: "mixed"} and config.problem_type == "single_label_classification"


@pytest.mark.full
def test_a_classifier_that_transformers_wrote_goes_on_with_its_own_head(place, capsys):
    write("reviews.jsonl", reviews())
    assert call(*CLASSIFY, "run.dir=run") == 0 and call("export", "run", "out") == 0
    assert call(*CLASSIFY, "model.path=out", "run.dir=further") == 0
    ended, began = read(place / "run")[-1]["eval_loss"], capsys.readouterr().out.rpartition("eval loss ")[2].split()[0]
    lines = [line for line in (place / "further/metrics.jsonl").read_text().splitlines()]
    assert float(began) <= ended + 1e-2 and len(lines) == 6
    trained, module = trained_model(options_of(place / "run", []))
    torch.testing.assert_close(load_file("out/model.safetensors")["score.weight"], dict(module.named_parameters())["score.weight"].detach())
    assert call(*CLASSIFY, "model.path=out", "data.labels=[negative,positive]", "run.dir=other") == 2
    assert "but the head of out has 3 labels, negative,positive,mixed" in capsys.readouterr().err
    assert call("check-export", "run", "out") == 0


LABELS = ("a", "b", "3")
CASES = [("a", 0), ("3", 2), (3, 2), (0, None), ("4", None), (None, None), (True, None)]


@pytest.mark.parametrize("label, number", CASES, ids=str)
def test_labels_are_names_or_numbers_of_classes(label, number):
    if number is None:
        with pytest.raises(BadRecord, match="data.labels are a, b, 3"):
            class_of(label, LABELS)
    else:
        assert class_of(label, LABELS) == number
    assert [class_of(value, ("no", "yes")) for value in (0, 1, "1", "no")] == [0, 1, 1, 0]


@pytest.mark.parametrize("where", ["data.files=[bad.jsonl]", "data.validation=[{files:[bad.jsonl]}]"])
def test_an_unknown_label_is_one_line(where, place, capsys):
    write("reviews.jsonl", reviews())
    write("bad.jsonl", [*reviews(6), {"text": "a", "label": "neutral"}])
    assert call(*CLASSIFY, where, "run.dir=run") == 2
    error = capsys.readouterr().err
    assert "bad.jsonl:7: field \"label\" is 'neutral'; data.labels are negative, positive, mixed" in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "options, message",
    [
        (["data.labels=[]"], "data.labels: .* classes need names"),
        (["data.labels=[a,a]"], "data.labels: .* are not several different names"),
        (["data.records=documents", "data.labels=[]"], "data.records: documents with loss=classify, which needs classes"),
        (["data.chat=true"], "data.records: classes are texts, not conversations; set data.chat=false"),
        (["data.packing=fit"], "data.packing: fit with data.records=classes"),
        (["model.attention=causal"], "model.attention: causal with data.records=classes, several of which share a sequence"),
        (["data.margins=true"], "data.margins: true with loss=classify, which takes no margin"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_options_of_classes_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        validate(to_config(compose([*CLASSIFY, *options])), 1)


def test_texts_longer_than_a_row_are_refused_or_left_out(place, capsys):
    write("reviews.jsonl", [*reviews(), {"text": "x" * 80, "label": 0}])
    assert call(*CLASSIFY, "run.dir=run") == 2
    assert re.search(r"data.records: 1 of \d+ texts are longer than rows of 64 tokens, the longest has 81", capsys.readouterr().err)
    assert call(*CLASSIFY, "data.bad_records=skip", "train.steps=1", "eval.interval=null", "checkpoint.keep_best=0", "run.dir=run") == 0
    assert "texts left out" in capsys.readouterr().out


def test_check_data_shows_the_class_of_a_text(place, capsys):
    write("reviews.jsonl", reviews())
    assert call("check-data", "reviews.jsonl", "model.path=qwen", "recipe=classify", "data.labels=[negative,positive,mixed]") == 0
    output = capsys.readouterr().out
    assert "class 0, negative" in output and "data.records=classes 'data.labels=[negative,positive,mixed]'" in output


# ---- embeddings ----------------------------------------------------------------------------------------

THINGS = ("fjord", "whale", "glacier", "harbour", "lighthouse")
EMBED = ("recipe=embed", "model.path=qwen", "data.files=[queries.jsonl]", *SMALL)


def queries(count=40, query="query"):
    things = [f"{THINGS[i % 5]} {i // 5}" for i in range(count)]
    return [{query: f"{thing}?", "positive": f"A {thing}.", "negative": "Nothing."} for thing in things]


def embedded(folder, texts, pooling):
    """Return the embeddings that transformers computes, text by text."""
    module, encode = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    hidden = [module(**encode(text, return_tensors="pt")).last_hidden_state[0] for text in texts]
    pooled = torch.stack([states.mean(0) if pooling == "mean" else states[-1] for states in hidden])
    return (pooled / pooled.norm(dim=1, keepdim=True)).detach()


@pytest.mark.full
@pytest.mark.parametrize("records, pooling, options", [("passages", "mean", ()), ("triplets", "last", (LORA,))], ids=str)
def test_embeddings_find_their_passages_and_transformers_embeds_alike(records, pooling, options, place):
    write("queries.jsonl", queries(query="anchor" if records == "triplets" else "query"))
    job = [*EMBED, f"data.records={records}", f"loss.pooling={pooling}", *options]
    assert call(*job, "train.steps=12", "eval.interval=6", "checkpoint.interval=6", "run.dir=run") == 0
    first, *_, last = read(place / "run")
    assert last["loss"] < first["loss"] and 0 < last["eval_accuracy"] <= 1
    assert call("export", "run", "out", *["--merge"] * bool(options)) == 0
    pooled = json.loads((place / "out/1_Pooling/config.json").read_text())
    assert pooled["word_embedding_dimension"] == 24 and pooled.get("pooling_mode_lasttoken", False) == (pooling == "last")
    trained, module = trained_model(options_of(place / "run", []))
    texts, encode = ["whale 3?", "A whale 3."], AutoTokenizer.from_pretrained("out")
    for text, expected in zip(texts, embedded("out", texts, pooling)):
        ids = encode(text, return_tensors="pt")["input_ids"]
        batch = {"tokens": ids, "positions": torch.arange(ids.shape[1])[None], "documents": torch.zeros_like(ids), "labels": ids}
        torch.testing.assert_close(embedding(trained.logits(module, batch), batch, pooling, 0)[0], expected, atol=1e-5, rtol=1e-5)
    assert call("check-export", "run", "out") == 0


@pytest.mark.parametrize(
    "options, message",
    [
        (["train.microbatches=2"], "train.microbatches: 2 with loss=embed: passages of other microbatches would be no negatives"),
        (["train.microbatches=auto"], "train.microbatches: auto with loss=embed"),
        (["passes.communication.batch_overlap=2"], "passes.communication.batch_overlap: 2 with loss=embed"),
        (["data.records=documents"], "data.records: documents with loss=embed, which needs passages"),
        (["model.head=score"], "model.head: score with loss=embed, which needs model.head=none"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_options_of_embeddings_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        validate(to_config(compose([*EMBED, *options])), 1)


@pytest.mark.parametrize(
    "row, message",
    [
        ({"positive": "a"}, 'has no "query" or "anchor"; its fields are positive'),
        ({"query": "a", "anchor": "b", "positive": "c"}, 'has both "query" and "anchor"; remove one of them'),
        ({"query": "a"}, 'has no field "positive"; its fields are query'),
        ({"query": " ", "positive": "c"}, 'field "query" is empty'),
    ],
)
def test_a_record_without_a_query_or_a_passage_is_one_line(row, message, place, capsys):
    write("queries.jsonl", [*queries(5), row])
    assert call(*EMBED, "run.dir=run") == 2
    assert f"queries.jsonl:6: {message}" in capsys.readouterr().err
