"""A folder's vision-language model on rows of conversations: transformers' own loss, positions, and refusals."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from vision_folders import picture, vision_folder

from compiler_trainer import UserError
from compiler_trainer.config.schema import Config, DataConfig, FolderConfig, MeshConfig, OptimConfig, TrainConfig
from compiler_trainer.data.datasets import build_datasets
from compiler_trainer.models.grids import fill_table, turning_positions
from compiler_trainer.models.probes import way_of
from compiler_trainer.models.processor import Processor, processor_of
from compiler_trainer.models.skeleton import fill
from compiler_trainer.models.subject import subject
from compiler_trainer.models.vision import view_of
from compiler_trainer.parity.of_config import check

CHATS = [[0, 1], [2], [], [3, 0]]  # the images of each conversation; a row has up to two
SIZES = [(20, 18), (40, 22), (13, 30), (20, 18)]


def config(folder, tmp_path, **data):
    records = []
    for number, images in enumerate(CHATS):
        for image in images:
            (tmp_path / f"{image}.png").write_bytes(picture(image, SIZES[image]))
        parts = [{"type": "image", "path": f"{image}.png"} for image in images]
        parts.append({"type": "text", "text": f"what is {number}?"})
        records.append({"messages": [{"role": "user", "content": parts},
                                     {"role": "assistant", "content": f"{number} is {number * number}"}]})
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, records)))
    data = DataConfig(name="text", files=(str(tmp_path / "chats.jsonl"),), chat=True, images_per_row=2, eval_fraction=0.0,
                      tokenizer=str(folder / "tokenizer.json"), cache=str(tmp_path / "cache"), **data)
    return Config(model=FolderConfig(path=str(folder)), data=data)


def theirs(folder, tokens, labels, images, size=None, dtype=torch.float64):
    """Return transformers' summed loss and gradients of one conversation, with the pixels of its own processor."""
    model = tf.AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).train()
    inputs = {}
    if images:
        processor, types = processor_of(str(folder), size), (tokens == model.config.image_token_id).long()[None]
        made = processor.inputs(processor.token * len(images), [picture(image, SIZES[image]) for image in images])
        inputs = {name: value for name, value in made.items() if name.startswith(("pixel", "image"))}
        names = inspect.signature(model.forward).parameters
        inputs |= {name: types for name in ("token_type_ids", "mm_token_type_ids") if name in names}
    logits = model(input_ids=tokens[None], use_cache=False, **inputs).logits[0]
    loss = F.cross_entropy(logits, labels, reduction="sum")
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


KINDS = ["gemma3", "gemma4", "llava", "llava_next", "idefics3", "qwen2_vl", "qwen3_5"]
ONE_SIZE = {"llava_next": (16, 30)}  # to which images are resized
ANY_SIZE = {"qwen2_vl": 30, "qwen3_5": 30}  # image tokens of a row


@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_transformers_loss_of_each_conversation_alone(kind, tmp_path):
    folder = vision_folder(kind)
    cfg = config(folder, tmp_path, image_tokens_per_row=ANY_SIZE.get(kind), image_size=ONE_SIZE.get(kind))
    batch = build_datasets(cfg.data, 256, 4).train.rows
    batch = {name: torch.from_numpy(value) for name, value in batch.batch(np.arange(len(batch))).items()}
    assert len(batch["tokens"]) < len(CHATS), "a row has several conversations"
    trained = subject(cfg)
    model = fill(trained.module, ((name, value[()]) for name, value in trained.initial())).double().train()
    loss = trained.loss(model, batch)
    loss.backward()
    expected, gradients, count = torch.zeros((), dtype=torch.float64), {}, 0
    numbers = numbers_of(batch, cfg)
    for row in range(len(batch["tokens"])):
        for document in range(int(batch["documents"][row].max()) + 1):
            mine = batch["documents"][row] == document
            labels = batch["labels"][row][mine]
            part, grads = theirs(folder, batch["tokens"][row][mine], labels, CHATS[numbers.pop(0)], ONE_SIZE.get(kind))
            expected += part
            count += int((labels >= 0).sum())
            gradients = {name: gradients.get(name, 0) + g for name, g in grads.items()}
    assert torch.allclose(loss.double(), expected / count, rtol=1e-6)
    for name, parameter in model.named_parameters():
        if name in gradients:
            assert torch.allclose(parameter.grad, gradients[name] / count, rtol=1e-4, atol=1e-6), name


def test_with_causal_attention_a_row_is_one_text_as_in_transformers(tmp_path):
    folder = vision_folder("gemma3")
    cfg = config(folder, tmp_path)
    cfg = replace(cfg, model=replace(cfg.model, attention="causal"))
    rows = build_datasets(cfg.data, 256, 4).train.rows
    batch = {name: torch.from_numpy(value) for name, value in rows.batch(np.arange(len(rows))).items()}
    trained = subject(cfg)
    model = fill(trained.module, ((name, value[()]) for name, value in trained.initial())).double().eval()
    theirs = tf.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64).eval()
    is_image = batch["tokens"] == theirs.config.image_token_id
    with torch.no_grad():
        logits = trained.logits(model, batch)
        for row, counts in enumerate(is_image.sum(1) // 4):
            pixels = {"pixel_values": batch["pixel_values"][row, :counts, 0]} if counts else {}
            alone = theirs(input_ids=batch["tokens"][row][None], token_type_ids=is_image[row][None].long(), **pixels)
            assert torch.allclose(logits[row], alone.logits[0], atol=1e-4)


def numbers_of(batch, cfg):
    """Return the number of each conversation in the rows, in their order, from its text `what is N?`."""
    from compiler_trainer.data.tokenizers import tokenizer_of

    texts = [tokenizer_of(cfg.data).decode(row.tolist()) for row in batch["tokens"]]
    return [int(part[0]) for text in texts for part in text.split("what is ")[1:]]


def test_positions_turn_as_in_qwen2_vl():
    image = 9
    cut = [[5, 6, *[image] * 6, 7, 8, 3], [*[image] * 4, 4, *[image] * 8, 2]]
    grids = [[(1, 4, 6)], [(1, 4, 4), (1, 4, 8)]]
    orders = ((0, 1), (1, 0))
    tokens = torch.tensor([cut[a] + cut[b] for a, b in orders])
    positions = torch.stack([torch.cat([torch.arange(len(cut[n])) for n in order]) for order in orders])
    vision = SimpleNamespace(spatial_merge_size=2)
    tables = [fill_table(grids[a] + grids[b], 4, patches, 2) for (a, b), patches in zip(orders, (72, 80))]
    ours = turning_positions(torch.from_numpy(np.stack(tables)), 2, tokens == image, positions)
    kind = tf.models.qwen3_vl.modeling_qwen3_vl.Qwen3VLModel
    model = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    model.get_vision_position_ids = kind.get_vision_position_ids.__get__(model)
    for row, order in enumerate(orders):
        start = 0
        for part, grid in ((cut[n], torch.tensor(grids[n])) for n in order):
            types = torch.tensor([[int(token == image) for token in part]])
            expected, _ = kind.get_rope_index(model, torch.tensor([part]), types, grid)
            assert torch.equal(ours[1:, row, start : start + len(part)], expected[:, 0])
            start += len(part)
    assert torch.equal(ours[0], positions)


@pytest.mark.full
@pytest.mark.parametrize("mesh", [{"dp_shard": 2, "tp": 2}, {"cp": 2}, {"pp": 2}], ids=str)
@pytest.mark.parametrize("kind, image_tokens", [("idefics3", None), ("qwen2_vl", 20)])
def test_a_job_with_images_is_compared_with_eager_pytorch(kind, image_tokens, mesh, tmp_path):
    cfg = config(vision_folder(kind), tmp_path, image_tokens_per_row=image_tokens)
    cfg = replace(cfg, mesh=MeshConfig(**{"dp_shard": 1, **mesh}), train=TrainConfig(seq_len=26, global_batch_size=2 + mesh.get("pp", 1), microbatches=mesh.get("pp", 1)),
                  optim=OptimConfig(lr=0.05, eps=1e-3))
    outcome = check(cfg)
    assert outcome.verdict == "right", outcome.why


def test_a_folder_without_processor_is_refused(tmp_path):
    from folders import folder

    with pytest.raises(UserError, match=r"data.images_per_row: .* has no processor of images"):
        Processor(str(folder("llama")), None)


@pytest.mark.parametrize("kind", ["llava", "idefics3"])
def test_without_images_the_text_model_is_trained_alone(kind):
    folder = vision_folder(kind)
    alone = subject(Config(model=FolderConfig(path=str(folder))))
    assert type(alone.module).__name__ == "LlamaForCausalLM" and "without" in " ".join(alone.remarks)
    module = fill(alone.module, ((name, value[()]) for name, value in alone.initial())).eval()
    tokens = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens, "positions": torch.arange(9).expand(2, 9), "documents": torch.zeros_like(tokens)}
    expected = tf.AutoModelForImageTextToText.from_pretrained(folder).eval()(input_ids=tokens).logits
    torch.testing.assert_close(alone.logits(module, batch), expected, rtol=1e-5, atol=1e-5)


def test_a_model_whose_images_are_no_features_at_tokens_is_refused():
    model = SimpleNamespace(config=SimpleNamespace(model_type="git"))
    with pytest.raises(UserError, match="model.path: is of a git, in which images are no features in place of tokens"):
        view_of(model, processor_of(str(vision_folder()), None))


def test_a_text_model_is_refused(tmp_path):
    from folders import folder

    with pytest.raises(UserError, match=r"is a llama, and transformers has no vision-language model of that type"):
        subject(Config(model=FolderConfig(path=str(folder("llama"))), data=DataConfig(chat=True, images_per_row=1)))


def test_images_of_other_sizes_are_refused():
    processor = processor_of(str(vision_folder("idefics3")), None)
    processor.see(picture(0, (64, 64)))
    assert processor_of(str(vision_folder("llava")), None).see(picture(0, (9, 31))).arrays["pixel_values"].shape == (1, 3, 16, 16)


def test_options_of_images_are_validated():
    from compiler_trainer.config.validate import validate

    with pytest.raises(UserError, match="data.images_per_row: 2 is for a folder's vision-language model"):
        validate(Config(data=DataConfig(images_per_row=2)), 1)
    with pytest.raises(UserError, match="data.image_tokens_per_row: goes with data.images_per_row"):
        validate(Config(data=DataConfig(image_tokens_per_row=8)), 1)
    with pytest.raises(UserError, match="data.image_size: goes with data.images_per_row"):
        validate(Config(data=DataConfig(image_size=(8, 8))), 1)


def test_text_models_without_a_causal_class_are_tried_too():
    config = tf.AutoConfig.from_pretrained(vision_folder("qwen2_vl")).get_text_config()
    assert config.model_type == "qwen2_vl_text" and way_of("documents", config) == "masks"
