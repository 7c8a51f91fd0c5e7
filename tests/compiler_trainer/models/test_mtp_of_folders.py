"""Multi-token prediction of folders: the layers of their files are trained as transformers has them, and exported."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.device import resolve_auto
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.jobs import made_where_missing
from compiler_trainer.config.validate import ranks_of, validate
from compiler_trainer.models.further import further_logits
from compiler_trainer.models.shrunk import shrunk
from compiler_trainer.models.skeleton import fill
from compiler_trainer.models.subject import subject
from compiler_trainer.models.transformers_private import add_further_layers, without_further_layers
from compiler_trainer.models.weights import stored_in
from compiler_trainer.parity.of_config import SMALL, check
from compiler_trainer.parity.one_device import on_one_device
from compiler_trainer.runs.export import add_tensors, write_folder

KINDS = ["deepseek_v3", "glm4_moe"]
WEIGHT, LENGTH = 0.3, 11


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return folders of models by type, each with two further layers in its files."""
    made = {}

    def folder(kind):
        if kind in made:
            return made[kind]
        config = shrunk(transformers.AutoConfig.for_model(kind))
        config.num_mtp_layers = 2
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        add_further_layers(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(0.2 * torch.randn_like(parameter) + (parameter.dim() == 1))
        further = without_further_layers(model)
        assert not hasattr(model, "mtp")
        made[kind] = tmp_path_factory.mktemp(kind)
        model.save_pretrained(made[kind])
        add_tensors(made[kind], further)
        return made[kind]

    return folder


def config(path, *options):
    """Return a job of the folder."""
    overrides = made_where_missing([*SMALL, "model=hf", f"model.path={path}", *options])
    cfg = resolve_auto(to_config(compose(overrides)), on_gpu=False)
    return validate(cfg, ranks_of(cfg.mesh))


def trained_and_module(path, *options):
    """Return the subject of a job that trains the further layers, and its module with the folder's weights."""
    trained = subject(config(path, f"model.mtp.weight={WEIGHT}", *options))
    return trained, fill(trained.module, ((name, value[()]) for name, value in trained.initial())).train()


def batch_of(*lengths):
    """Return a batch of one row with documents of these lengths, whose last tokens have no label."""
    tokens = torch.randint(2, 60, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    labels = tokens.roll(-1, 1).masked_fill(positions.roll(-1, 1) == 0, -100)
    return {"tokens": tokens, "labels": labels, "positions": positions, "documents": documents}


def theirs_of(path, monkeypatch):
    """Return transformers' model of a folder, and its further layers."""
    kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(transformers.AutoConfig.from_pretrained(path))]
    layers = transformers.AutoConfig.from_pretrained(path).num_hidden_layers
    ours = {rf"model\.layers\.{layers}\.", rf"model\.layers\.{layers + 1}\."}  # only those of published sizes are known
    monkeypatch.setattr(kind, "_keys_to_ignore_on_load_unexpected", ours)
    main = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    return main, MtpModel.from_pretrained(main).train()


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_that_of_transformers_layers(folders, kind, monkeypatch):
    trained, module = trained_and_module(folders(kind))
    main, further = theirs_of(folders(kind), monkeypatch)
    batch = batch_of(LENGTH)
    tokens, labels, expected = batch["tokens"], batch["labels"], []
    with torch.no_grad():
        loss, metrics = trained.loss(module, batch)
        out = main(input_ids=tokens, output_hidden_states=True, use_cache=False)
        states = out.hidden_states[-1]
        for k in (1, 2):
            states = further.forward_layer(k - 1, states[:, :-1], torch.arange(k, LENGTH)[None], None, input_ids=tokens[:, k:])
            expected.append(F.cross_entropy(main.lm_head(states)[0], labels[0, k:]))
        torch.testing.assert_close(metrics["mtp_loss"], sum(expected) / 2)
        torch.testing.assert_close(loss, F.cross_entropy(out.logits[0], labels[0]) + WEIGHT * sum(expected) / 2)
        evaluated = trained.loss(module.eval(), batch)
    torch.testing.assert_close(evaluated, F.cross_entropy(out.logits[0], labels[0]))


@pytest.mark.parametrize("kind", KINDS)
def test_documents_of_a_row_are_those_alone(folders, kind):
    _, module = trained_and_module(folders(kind))
    module, lengths = on_one_device(module), (5, 2, 7)
    whole = batch_of(*lengths)

    def logits(batch):
        states = module(input_ids=batch["tokens"], position_ids=batch["positions"], use_cache=False, output_hidden_states=True)
        return further_logits("positions", module, batch, states.hidden_states[-1])

    with torch.no_grad():
        for k, together in enumerate(logits(whole)):
            parts = zip(whole["tokens"].split(lengths, 1), together.split(lengths, 1), lengths)
            for tokens, packed, length in parts:
                alone = {"tokens": tokens, "positions": torch.arange(length)[None]}
                known = max(length - k - 1, 0)  # later places have no further token in their document
                torch.testing.assert_close(packed[:, :known], logits(alone)[k][:, :known], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mesh", [
    ["mesh.dp_shard=2", "mesh.tp=2"], ["mesh.cp=2"], ["mesh.pp=2"], ["mesh.dp_shard=2", "mesh.ep=2"],
], ids=" ".join)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.full
def test_training_is_that_of_one_device(folders, kind, mesh):
    outcome = check(config(folders(kind), f"model.mtp.weight={WEIGHT}", *mesh))
    assert outcome.verdict == "right", str(outcome)


@pytest.mark.parametrize("options", [["model.mtp.weight=0.1"], ["model.mtp=null"]], ids=" ".join)
@pytest.mark.parametrize("kind", KINDS)
def test_exports_hold_the_layers_by_the_names_of_the_folder(folders, kind, options, tmp_path):
    path = folders(kind)
    cfg = config(path, *options)
    module = fill(subject(cfg).module, ((name, value[()]) for name, value in subject(cfg).initial()))
    trained = next(p for name, p in module.named_parameters() if ("mtp" in name) == (cfg.model.mtp is not None))
    with torch.no_grad():
        trained.add_(1.0)
    write_folder(cfg, module, tmp_path, None, merge=False)
    before, after = stored_in(path), stored_in(tmp_path)
    assert {*before} == {*after} and json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 2
    changed = [name for name in before if not torch.equal(before[name][()], after[name][()])]
    assert len(changed) == 1 and changed[0].startswith("model.layers.") == (cfg.model.mtp is not None)


@pytest.mark.parametrize(("options", "message"), [
    (["model.lora.rank=4"], "model.mtp: trains all weights of further layers, and model.lora adapters alone; leave out either"),
    (["loss._target_=a.b"], "model.mtp: predicts further tokens, which only the default loss does"),
])  # fmt: skip
def test_what_it_cannot_be_trained_with_is_refused(folders, options, message):
    with pytest.raises(UserError, match=message):
        config(folders("glm4_moe"), "model.mtp.weight=0.3", *options)


def test_a_folder_without_such_layers_is_refused(folders, tmp_path):
    settings = json.loads((folders("glm4_moe") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"num_nextn_predict_layers": 0}))
    with pytest.raises(UserError, match="model.mtp: trains layers of multi-token prediction, but the glm4_moe in .* has none"):
        subject(config(tmp_path, "model.mtp.weight=0.3", "model.init=random"))
