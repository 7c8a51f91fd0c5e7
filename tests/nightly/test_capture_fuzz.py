"""Random models are captured as eager PyTorch runs them; a planted fault of capture is found and shrunk."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from compiler_trainer.capture import grad_modes
from tests.nightly.capture_fuzz.__main__ import main, outcomes
from tests.nightly.capture_fuzz.draw import case
from tests.nightly.capture_fuzz.run import run, shrink_case

CASES = 25


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.full
def test_random_models_have_the_gradients_of_eager_pytorch():
    for drawn, outcome in islice(outcomes(seed=7), CASES):
        assert outcome.verdict in ("right", "refused"), f"{outcome}\n{drawn.source()}"


def test_a_cast_taken_for_a_new_value_is_heard(monkeypatch):
    monkeypatch.setattr(grad_modes, "same_value", lambda node: None)
    drawn, outcome = next(pair for pair in outcomes(seed=7) if pair[1].verdict == "wrong")
    smaller = shrink_case(drawn, outcome)
    assert run(smaller).verdict == "wrong" and len(smaller.source()) <= len(drawn.source())


def test_a_case_can_be_run_again(capsys):
    assert case(7, 3) == case(7, 3)
    assert main(["--case", "7:3"]) == 0
    assert "def forward(self, v0):" in capsys.readouterr().out
