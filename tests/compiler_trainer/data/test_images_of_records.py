"""Conversations with images: where records have them, their tokens and labels, packing, and refusals in one line."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from vision_folders import IMAGE_TOKEN, picture, vision_folder

from compiler_trainer import UserError
from compiler_trainer.config.schema import DataConfig
from compiler_trainer.data import tokenized
from compiler_trainer.data.corpus import split
from compiler_trainer.data.datasets import build_datasets
from compiler_trainer.data.preview import Reader
from compiler_trainer.data.stored import ALL
from compiler_trainer.data.tokenizers import tokenizer_of
from compiler_trainer.models import IGNORED_LABEL
from compiler_trainer.models.processor import processor_of

PER_IMAGE = 16


def chat(text="what is it?", answer="a picture", images=1, **source):
    parts = [{"type": "image", **source} for _ in range(images)] + [{"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]}


def as_parts(record):
    """Return a record whose contents are all lists, as a table needs them."""
    contents = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in record["messages"][1:]]
    return {**record, "messages": [record["messages"][0], *contents]}


@pytest.fixture
def made(tmp_path):
    """Return a function that writes records, and PNGs 0.png to 3.png next to them, and builds their datasets."""
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(picture(number))

    def build(records, name="chats.jsonl", seq_len=128, images=2, kind="llava", eval_fraction=0.0, **options):
        path = tmp_path / name
        if name.endswith(".parquet"):
            pq.write_table(pa.Table.from_pylist(records), path)
        else:
            path.write_text("\n".join(map(json.dumps, records)))
        cfg = DataConfig(name="text", files=(str(path),), chat=True, images_per_row=images, eval_fraction=eval_fraction,
                         tokenizer=str(vision_folder(kind) / "tokenizer.json"), cache=str(tmp_path / "cache"), **options)
        return build_datasets(cfg, seq_len, 1), cfg

    return build


def rows_of(datasets):
    rows = datasets.train.rows
    return rows.batch(np.arange(len(rows)))


def test_a_row_has_tokens_labels_and_pixels(made):
    datasets, cfg = made([chat(path="0.png")])
    batch, tokenizer = rows_of(datasets), tokenizer_of(cfg)
    token = int(tokenizer.encode([IMAGE_TOKEN])[0][0])
    assert (batch["tokens"] == token).sum() == PER_IMAGE
    labels = batch["labels"][batch["labels"] != IGNORED_LABEL]
    assert tokenizer.decode(labels.tolist()) == "a picture\n"
    assert batch["pixel_values"].shape == (1, 2, 1, 3, 16, 16) and batch["pixel_values"].dtype == np.float32
    assert (batch["pixel_values"][0, 1] == 1).all(), "a row with one image ends with an image of ones"
    assert "images of 16 tokens each" in datasets.describe(1)


def test_pixels_are_those_of_the_folders_processor(made):
    import io

    from PIL import Image
    from transformers import AutoProcessor

    datasets, _ = made([chat(path="1.png")])
    processor = AutoProcessor.from_pretrained(vision_folder(), backend="pil")
    theirs = processor(text=[IMAGE_TOKEN], images=[Image.open(io.BytesIO(picture(1)))], return_tensors="np")
    assert np.array_equal(rows_of(datasets)["pixel_values"][0, 0], theirs["pixel_values"])


def test_every_way_to_give_an_image_is_the_same(made, tmp_path):
    content = picture(2)
    ways = [
        ([chat(path="2.png")], "a.jsonl"),
        ([chat(image=str(tmp_path / "2.png"))], "b.jsonl"),
        ([chat(url=(tmp_path / "2.png").as_uri())], "c.jsonl"),
        ([{**chat(), "images": ["2.png"]}], "d.jsonl"),
        ([as_parts({**chat(), "images": [{"bytes": content, "path": "elsewhere.png"}]})], "e.parquet"),
        ([as_parts(chat(bytes=content))], "f.parquet"),
    ]
    batches = [rows_of(made(records, name)[0]) for records, name in ways]
    for batch in batches[1:]:
        assert batch.keys() == batches[0].keys()
        assert all(np.array_equal(batch[name], batches[0][name]) for name in batch)


def test_a_dataset_of_the_hub_has_the_images_of_its_files(made, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hub"))
    records = [as_parts(chat(images=2)) | {"images": [{"bytes": picture(n), "path": None} for n in (0, 1)]} for _ in range(3)]
    expected = rows_of(made(records, "chats.parquet")[0])
    features = datasets.Features({"images": datasets.List(datasets.Image()), "messages": datasets.List(
        {"role": datasets.Value("string"), "content": datasets.List(
            {"type": datasets.Value("string"), "text": datasets.Value("string")})})})
    for path in (tmp_path / "saved", tmp_path / "named"):
        written = datasets.Dataset.from_list(records, features=features)
        path.mkdir()
        written.save_to_disk(path) if path.name == "saved" else written.to_parquet(path / "train.parquet")
        cfg = DataConfig(name="hf_dataset", path=str(path), chat=True, images_per_row=2, eval_fraction=0.0,
                         tokenizer=str(vision_folder() / "tokenizer.json"), cache=str(tmp_path / "cache"))
        found = rows_of(build_datasets(cfg, 128, 1))
        assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_documents_keep_their_images_in_order(made):
    records = [chat(f"number {n}", path=f"{n % 4}.png") for n in range(4)] + [chat("none", images=0)]
    datasets, _ = made(records, seq_len=160, images=2)
    rows = datasets.train.rows.parts[0]
    for row, batch in enumerate(np.split(rows_of(datasets)["pixel_values"], len(rows))):
        documents = rows.rows.documents(row)
        numbers = [n for start, end in documents for n in rows.files.between(start, end)]
        assert len(numbers) <= 2
        for image, number in enumerate(numbers):
            assert np.array_equal(batch[0, image], rows.options.processor.see(rows.files.file(number)).arrays["pixel_values"])
    assert rows.facts.documents == 5 and rows.facts.cut_documents == 0
    firsts = rows.files.at
    tokens = rows.rows.corpus.tokens
    assert all((tokens[at : at + PER_IMAGE] == tokens[firsts[0]]).all() and tokens[at - 1] != tokens[at] for at in firsts)


def test_padding_of_pixels_comes_with_them(made):
    datasets, _ = made([chat(path="0.png")], kind="idefics3")
    batch = rows_of(datasets)
    assert batch["pixel_values"].shape == (1, 2, 1, 1, 3, 16, 16)
    assert batch["pixel_attention_mask"].shape == (1, 2, 1, 1, 16, 16)


@pytest.mark.parametrize(("record", "problem"), [
    (chat(path="9.png"), "image {folder}/9.png cannot be read: No such file or directory"),
    (chat(path="chats.jsonl"), "image {folder}/chats.jsonl is not a readable image"),
    (chat(), 'a part of type image has none of path, url, image, bytes, image_url, and "images" no entry for it'),
    ({**chat(path="0.png"), "images": ["1.png"]}, 'field "images" has 1 more than messages have parts of type image'),
    (chat(f"see {IMAGE_TOKEN}", path="0.png"), "the chat template writes <image> 2 times for 1 images"),
    (chat(path=7), "an image is a int; give a path, a url, or the bytes of a file"),
])  # fmt: skip
def test_a_bad_image_is_one_line_that_names_the_row(made, tmp_path, record, problem):
    with pytest.raises(UserError) as refusal:
        made([chat(path="0.png"), record])
    line = str(refusal.value)
    assert line.startswith(f"{tmp_path}/chats.jsonl:2: {problem.format(folder=tmp_path)}") and "\n" not in line


def test_bad_images_may_be_skipped(made):
    datasets, _ = made([chat(path="9.png"), chat(path="0.png")], bad_records="skip")
    assert "1 bad records are skipped" in datasets.describe(1)


def test_more_images_than_a_row_has_are_refused(made):
    with pytest.raises(UserError, match=r"data.images_per_row: is 2, and a conversation has 3; increase it"):
        made([chat(path="0.png", images=3)])
    with pytest.raises(UserError, match=r"train.seq_len: is 40, and a conversation has \d+ tokens with its images"):
        made([chat(path="0.png", images=2)], "long.jsonl", seq_len=40)


def test_without_the_option_images_are_refused(made):
    with pytest.raises(UserError, match=r"is of type image; only parts of type text are trained on, unless data.images_per_row"):
        made([chat(path="0.png")], images=0)


def test_a_preview_has_the_text_of_transformers(made):
    _, cfg = made([chat(path="0.png"), chat("and this?", path="9.png")], bad_records="skip")
    reader = Reader(cfg, [{"chat": True, "pairs": False}])
    (shown,) = reader.documents(next(reader.records()).read(), [])
    assert shown.is_same and shown.theirs.count(IMAGE_TOKEN) == PER_IMAGE
    counts = reader.scan(9)
    assert counts.samples == 1 and ["9.png" in problem for problem in counts.bad] == [True]


def test_tokens_are_not_stored_for_other_runs(made, tmp_path):
    _, cfg = made([chat(path="0.png")])
    with pytest.raises(UserError, match="data.images_per_row: is for runs"):
        tokenized.write(cfg, tmp_path / "out", ALL)


@pytest.mark.parametrize("change", [lambda file: file.write_bytes(picture(3)), lambda file: file.unlink()])
def test_an_image_that_changed_since_it_was_stored_is_named(made, tmp_path, change):
    """The cache has the content of images, but its key is of the records alone."""
    _, cfg = made([chat(path="0.png"), chat(path="1.png")])
    build_datasets(cfg, 128, 1)
    change(tmp_path / "1.png")
    with pytest.raises(UserError, match=f"^image {tmp_path}/1.png: has changed, or is gone, since .*; remove {tmp_path}/cache") as error:
        build_datasets(cfg, 128, 1)
    shutil.rmtree(error.value.message.rpartition("remove ")[2].partition(" to ")[0])
    if (tmp_path / "1.png").exists():
        assert len(build_datasets(cfg, 128, 1).train.rows) == 1


# ---- images of any size ----------------------------------------------------------------------------------------------


def of_any_size(made, records, image_tokens=16, **options):
    """Return the rows of records, whose images have 4 tokens each."""
    return made(records, kind="qwen2_vl", image_tokens_per_row=image_tokens, **options)


def test_a_row_has_patches_and_a_table_of_grids(made):
    datasets, _ = of_any_size(made, [chat(images=2, path="1.png"), chat(images=0)])
    batch = rows_of(datasets)
    assert batch["pixel_values"].shape == (1, 64, 96)
    assert batch["image_grid_thw"].tolist() == [[[1, 4, 4], [1, 4, 4], [8, 2, 2]]]
    processor = processor_of(str(vision_folder("qwen2_vl")), None)
    seen = processor.see(picture(1)).arrays["pixel_values"]
    assert np.array_equal(batch["pixel_values"][0], np.concatenate([seen, seen, np.ones_like(batch["pixel_values"][0, 32:])]))
    assert (batch["tokens"] == processor.token_id).sum() == 8


def test_a_row_has_no_more_image_tokens_than_it_may(made):
    datasets, _ = of_any_size(made, [chat(path="1.png")] * 6, image_tokens=8, images=6, seq_len=512)
    assert [(grids[:, 0] == 1).sum() for grids in rows_of(datasets)["image_grid_thw"]] == [2, 2, 2]
    (described,) = (line for line in datasets.parts[0].describe("") if "images" in line)
    assert "6 images of 4 tokens each in the mean, at most 6 with 8 tokens a row" in described


def test_options_of_images_of_any_size_are_refused_in_one_line(made):
    with pytest.raises(UserError, match=r"data.image_tokens_per_row: is 3, and the images of a conversation have 4 tokens; "
                                        "increase it, or resize images"):
        of_any_size(made, [chat(path="1.png")], image_tokens=3)
    with pytest.raises(UserError, match=r"data.image_tokens_per_row: is null, and images have any sizes"):
        of_any_size(made, [chat(path="1.png")], image_tokens=None)
    with pytest.raises(UserError, match=r"data.image_tokens_per_row: is 9, but all images of a run have the same size"):
        made([chat(path="1.png")], image_tokens_per_row=9)


def test_a_size_gives_the_number_of_image_tokens(made):
    datasets, _ = of_any_size(made, [chat(path="1.png")], image_tokens=None, image_size=(24, 16))
    assert rows_of(datasets)["image_grid_thw"].tolist() == [[[1, 6, 4], [6, 2, 2], [0, 2, 2]]]


def test_inputs_are_those_of_a_prompt_with_the_tokens_of_its_images():
    processor = processor_of(str(vision_folder("qwen2_vl")), None)
    inputs = processor.inputs(f"a{IMAGE_TOKEN}b{IMAGE_TOKEN}", [picture(0), picture(1, (40, 30))])
    counts = [4, 20]
    assert inputs["mm_token_type_ids"][0].tolist() == [0, *[1] * counts[0], 0, *[1] * counts[1]]
    assert inputs["image_grid_thw"].tolist() == [[1, 4, 4], [1, 8, 10]] and len(inputs["pixel_values"]) == 4 * sum(counts)
    assert "pixel_values" not in processor.inputs("no image", [])


def test_options_of_images_are_part_of_the_fingerprint(made):
    first, *others = (
        made([chat(path="0.png")], **options)[0].train.rows.fingerprint
        for options in ({}, {"images": 3}, {"image_size": (16, 16)})
    )
    assert first not in others and len(set(others)) == 2
    assert made([chat(path="0.png")])[0].train.rows.fingerprint == first
    assert made([chat(path="1.png")], "other.jsonl")[0].train.rows.fingerprint != first


def test_validation_data_are_whole_records_and_not_all_of_them(made):
    with pytest.raises(UserError, match="^data.eval_fraction: there is only one record, too few for validation; set it to 0"):
        made([chat(path="0.png")], eval_fraction=0.05)
    datasets, _ = made([chat(path=f"{n}.png") for n in range(2)], eval_fraction=0.05)
    assert len(datasets.train.rows) == len(datasets.eval.rows) == 1


def test_samples_of_a_record_with_images_stay_together(made):
    datasets, _ = made([chat(path="0.png")] * 3)
    corpus = datasets.train.rows.parts[0].rows.corpus
    corpus = replace(corpus, offsets=np.linspace(0, len(corpus.tokens), 4, dtype=np.int64))
    several = replace(corpus, continues=np.array([False, False, True]))
    assert [half.tolist() for half in split(several, 1e-9)[1:]] == [[0], [1, 2]]
    several = replace(corpus, continues=np.array([False, True, True]))
    with pytest.raises(UserError, match="only one record"):
        split(several, 1e-9)
    assert [half.tolist() for half in split(several, 1e-9, documents_before=5)[1:]] == [[0, 1, 2], []]
