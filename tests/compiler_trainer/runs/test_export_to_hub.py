"""An export to the hub: a commit with a model card, or a refusal before any work."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import folders
import huggingface_hub
import pytest
from commands import call
from huggingface_hub import ModelCard
from open_hub import accepting
from safetensors.torch import load_file
from short_runs import options

from compiler_trainer.config.schema import FolderConfig, LoraConfig
from compiler_trainer.runs import export
from compiler_trainer.runs.destinations import model_card
from compiler_trainer.training import trainer


@pytest.fixture
def hub(monkeypatch):
    """Return the repositories of a hub that accepts everything."""
    return accepting(monkeypatch)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a short run of a decoder."""
    folder = tmp_path_factory.mktemp("hub") / "run"
    trainer.train(options(folder, steps=2))
    return folder


@pytest.fixture
def no_work(monkeypatch):
    """Fail if an export begins."""
    monkeypatch.setattr(export, "trained_model", lambda *_: pytest.fail("the export began"))


@pytest.mark.full
def test_a_repository_gets_the_files_of_a_folder_and_a_card(run, hub, tmp_path, capsys):
    assert call("export", run, tmp_path / "out") == 0
    assert call("export", run, "hub:me/tiny") == 0
    files = hub["me/tiny"]
    assert files.keys() - {f.name for f in (tmp_path / "out").iterdir()} == {".gitattributes", "README.md"}
    (tmp_path / "model.safetensors").write_bytes(files["model.safetensors"])
    ours, theirs = load_file(tmp_path / "out/model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert ours.keys() == theirs.keys() and all((ours[name] == theirs[name]).all() for name in ours)
    assert json.loads(files["config.json"]) == json.loads((tmp_path / "out/config.json").read_text())
    card = ModelCard(files["README.md"].decode())
    assert card.data.library_name == "transformers" and card.data.tags == ["compiler-trainer"]
    assert "Load it with transformers' AutoModelForCausalLM.from_pretrained('me/tiny')" in card.text
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("hub:me/tiny: https://huggingface.co/me/tiny/commit/1; load it with ") and "are equal" in said


def test_a_card_that_is_there_stays(run, hub):
    hub["me/tiny"] = {"README.md": b"mine"}
    assert call("export", run, "hub:me/tiny", "--no-check") == 0
    assert hub["me/tiny"]["README.md"] == b"mine" and "model.safetensors" in hub["me/tiny"]


@pytest.mark.parametrize(("lora", "merge", "library"), [(None, False, "transformers"), (LoraConfig(), False, "peft"), (LoraConfig(), True, "transformers")])
@pytest.mark.parametrize("init", ["weights", "random"])
def test_a_card_names_the_base_model_if_its_weights_were_used(lora, merge, library, init, tmp_path):
    cfg = options(tmp_path, model=FolderConfig("Qwen/Qwen3-0.6B@main", lora=lora, init=init))
    card = ModelCard(model_card(cfg, "me/tiny", merge, "load it"))
    assert card.data.library_name == library
    assert card.data.base_model == ("Qwen/Qwen3-0.6B" if init == "weights" else None)
    local = ModelCard(model_card(options(tmp_path, model=FolderConfig(str(folders.folder("qwen3")))), "me/tiny", merge, "load it"))
    assert local.data.base_model is None and str(folders.folder("qwen3")) not in local.content


# Refusals


def refused(capsys, run, name):
    assert call("export", run, name) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix(f"error: {name}: ")


def test_a_repository_with_a_model_is_refused(run, hub, no_work, capsys):
    hub["me/tiny"] = {"config.json": b""}
    assert refused(capsys, run, "hub:me/tiny") == "has config.json already; name a new repository"


@pytest.mark.parametrize("name", ["tiny", "me/", "a/b/c", "me/ti ny"])
def test_a_name_without_an_owner_is_refused(name, run, hub, no_work, capsys):
    assert refused(capsys, run, f"hub:{name}").startswith("is not a name of the hub; write hub:ORG/NAME")
    assert not hub


def test_a_name_that_the_library_refuses(run, no_work, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_of_tests")
    assert refused(capsys, run, "hub:me/a--b").startswith("is refused: Cannot have -- or .. in repo_id: 'me/a--b'")


def test_a_missing_token_is_refused(run, no_work, capsys, monkeypatch, tmp_path):
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    assert refused(capsys, run, "hub:me/tiny").startswith("cannot be written without a token; set HF_TOKEN")


def test_a_hub_that_does_not_answer(run, no_work, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_of_tests")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert refused(capsys, run, "hub:me/tiny").startswith("cannot be written: ConnectError: ")


@pytest.mark.parametrize("status", [401, 403])
def test_a_token_without_the_right(status, run, no_work, capsys, monkeypatch):
    class Answer(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("X-Error-Message", "You don't have the rights to create a model under this namespace")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_TOKEN", "hf_of_tests")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    line = refused(capsys, run, "hub:me/tiny")
    server.shutdown()
    assert line.startswith("the token has no right to write it: ") and "under this namespace" in line and str(status) in line
