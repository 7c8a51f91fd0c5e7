"""The tool that judges the architectures of transformers lists them, and tells right, wrong and refused apart."""

from __future__ import annotations

import pytest
import transformers

from compiler_trainer.parity import compare
from tests.nightly.architectures import __main__ as command
from tests.nightly.architectures import judge
from tests.nightly.architectures.page import page
from tests.nightly.architectures.tiny import architectures, tiny, year

MESH = "dp_shard 2 x tp 2"


def test_all_text_models_are_listed_and_the_newest_are_first():
    kinds = architectures()
    assert {"llama", "qwen3_moe", "gemma3_text", "deepseek_v4", "mamba2"} < {*kinds}
    assert not {"gemma3", "gemma4_assistant", "musicgen", "llama4"} & {*kinds}
    years = [year(kind) for kind in kinds]
    assert years == sorted(years, reverse=True) and years[0] >= 2026


@pytest.mark.parametrize("kind", ["deepseek_v4", "falcon_h1", "dbrx", "qwen4_exp_text", "zaya"])
def test_small_configs_have_a_model_without_dropout(kind):
    config = tiny(kind)
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) < 3e5
    assert not any(value for name, value in vars(config).items() if isinstance(value, float) and "drop" in name)


@pytest.mark.full
def test_a_model_without_a_way_to_separate_documents_is_trained_on_one_text_a_row():
    of_documents, of_experts = judge.judge("rwkv", [judge.DOCUMENTS, "ep 2"])
    assert of_documents["verdict"] == "refused" and "neither positions nor masks separate documents" in of_documents["why"]
    assert of_experts["verdict"] == "refused" and "there are no experts" in of_experts["why"]


def test_a_type_of_which_no_small_model_can_be_built_is_unbuilt():
    records = list(judge.judge("zamba", [judge.DOCUMENTS, MESH]))
    assert [(record["mesh"], record["verdict"]) for record in records] == [(judge.DOCUMENTS, "unbuilt"), (MESH, "unbuilt")]


@pytest.mark.full
@pytest.mark.parametrize("mesh", [MESH, judge.HALF])
@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "right"), (1.1, "wrong")])
def test_verdicts_are_by_value(monkeypatch, mesh, factor, verdict):
    train = compare.train

    def changed(subject, settings):
        states, parameters = train(subject, settings)
        return [state | {"loss": state["loss"] * factor} for state in states], parameters

    monkeypatch.setattr(compare, "train", changed)
    (record,) = judge.judge("llama", [mesh])
    assert record["verdict"] == verdict and ("loss" in record["why"]) == (verdict == "wrong")


def test_the_page_shows_each_verdict():
    known = {
        ("zaya", judge.DOCUMENTS): {"verdict": "refused", "why": "no|way"},
        ("zaya", MESH): {"verdict": "right", "why": "", "error": 1.4e-15, "seconds": 1800.0},
        ("zaya", "ep 2"): {"verdict": "refused", "why": "experts: mesh.ep: there are no experts to spread"},
        ("llama", judge.DOCUMENTS): {"verdict": "right", "why": "", "way": "positions", "seconds": 1800.0},
        ("llama", "cp 2"): {"verdict": "wrong", "why": "wrong, off by 1.0e-01 at step 1: loss"},
    }
    text = page(["zaya", "qwen3", "llama"], known)
    assert ": 2 architectures, 1.0 hours of one process." in text
    assert "| zaya | 2026 | refused | 1e-15 |  |  |  |  |" in text and "| llama | 2024 | positions |  | wrong |  |  |  |" in text
    assert "| refused | no\\|way | zaya |" in text and "no experts" not in text and "qwen3" not in text
    assert "| cp 2 | 0 | 0 | 1 | 0 | 0 | 0 |" in text


def test_a_pattern_without_a_type_is_refused(capsys):
    assert command.main(["--only", "nobody"]) == 2
    assert capsys.readouterr().err == "--only: no type matches 'nobody'\n"
