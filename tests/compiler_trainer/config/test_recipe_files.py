"""A file of options works as a recipe, and help knows the options of every choice."""

from __future__ import annotations

import pytest
from commands import call

from compiler_trainer.config.compose import compose, name_recipes, to_config
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import save


@pytest.mark.parametrize("head", ["", "# @package _global_\n"])
@pytest.mark.parametrize("name", ["job.yaml", "job.yml"])
def test_a_plain_file_of_options_is_a_recipe(head, name, tmp_path, capfd):
    """A run's own config.yaml is one; without its package line, hydra looks for an option called recipe."""
    path = tmp_path / name
    path.write_text(f"{head}train:\n  steps: 7\n")
    assert not call(f"recipe={path}", "--cfg", "job")
    assert "steps: 7" in capfd.readouterr().out


@pytest.mark.parametrize(("saved", "arguments", "cluster"), [
    ([], [], "auto"),  # a device that no cluster describes
    (["cluster=cpu"], [], "cpu"),
    (["cluster=cpu"], ["cluster=h200", "optim=sgd"], "h200"),
])  # fmt: skip
def test_the_config_of_a_run_is_a_recipe_on_every_machine(saved, arguments, cluster, tmp_path):
    save(to_config(compose(saved)), path := tmp_path / "config.yaml")
    cfg = to_config(compose(name_recipes([f"recipe={path}", *arguments], tmp_path)))
    assert cfg.cluster == to_config(compose([f"cluster={cluster}"])).cluster
    assert cfg.optim.name == ("sgd" if arguments else "adamw")


def test_a_recipe_that_is_no_file_is_named(tmp_path):
    with pytest.raises(UserError, match="recipe: nowhere.yaml is not a file"):
        name_recipes(["recipe=nowhere.yaml"], tmp_path)


@pytest.mark.parametrize("option", ["model.path", "model.lora.rank", "model.init"])
def test_help_knows_the_options_of_a_folder(option, capfd):
    assert not call("--help", option)
    assert option in capfd.readouterr().out


def test_an_option_of_another_choice_says_which(capfd):
    assert call("model.path=qwen") == 2
    assert "model.path: goes with model=hf" in capfd.readouterr().err
