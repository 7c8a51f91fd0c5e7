"""Runs on streams: stopped ones go on with the rows that an undisturbed run has."""

from __future__ import annotations

import json

import pytest
from short_runs import metrics, options, resuming, timeless

from compiler_trainer.config.schema import DataConfig, EvalConfig
from compiler_trainer.training.trainer import train


def streamed(folder, text, cache, **changes):
    data = DataConfig(name="text", files=(str(text),), stream=True, stream_window=200, eval_fraction=0.0, cache=str(cache))
    return options(folder, 8, data=data, eval=EvalConfig(interval=None), **changes)


@pytest.fixture
def text(tmp_path):
    records = (json.dumps({"text": f"record {i} " + "xyz" * (i % 7)}) for i in range(40))
    (tmp_path / "a.jsonl").write_text("\n".join(records))
    return tmp_path / "a.jsonl"


def test_a_resumed_run_is_the_undisturbed_one(text, tmp_path):
    undisturbed = streamed(tmp_path / "undisturbed", text, tmp_path / "cache")
    train(undisturbed)
    expected = timeless(metrics(tmp_path / "undisturbed"))
    assert [record["step"] for record in expected] == [*range(1, 9)]
    windows = set()
    for step in (2, 4, 6):
        folder, checkpoint = tmp_path / f"resumed{step}", tmp_path / f"undisturbed/checkpoints/step_{step:08}"
        state = json.loads((checkpoint / "index.json").read_text())["checkpoint"]["data"]
        assert len(json.dumps(state)) < 300
        windows.add(state["windows"][0][0])
        train(resuming(streamed(folder, text, tmp_path / f"cache{step}"), checkpoint))
        assert timeless(metrics(folder)) == expected[step:]
    assert len(windows) > 1
