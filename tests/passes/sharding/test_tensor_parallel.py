"""Tensor and sequence parallelism on uneven sizes, by value against one device in fp64."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch
import zoo
from oracle import ADAMW, LRS, VOCAB, batches, compile_lockstep, llama, llama_loss, train_plainly
from sweeps import quick
from torch import nn

import compiler_trainer as ct
from compiler_trainer.config.schema import ModelConfig
from compiler_trainer.models import Llama
from passes.check.runner import PassRecord
from passes.ir import ir
from passes.ops import reshard
from passes.ops.reshard import RESHARD_OPS

MESHES = ({"tp": 2}, {"tp": 3}, {"tp": 4}, {"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2, "tp": 2})


def assert_trains_like_one_device(model, loss_fn, data, mesh, tolerance=1e-10, **options) -> None:
    """Compare losses, norms and all parameters of three steps."""
    metrics, final = train_plainly(model, loss_fn, data)
    step = compile_lockstep(model, loss_fn, data[0], mesh, ADAMW, **options)
    for batch, lr, expected in zip(data, LRS, metrics):
        values = step(batch, lr)
        assert values["loss"] == pytest.approx(expected["loss"], abs=tolerance)
        assert values["grad_norm"] == pytest.approx(expected["grad_norm"], abs=tolerance)
    state = step.state_dict()
    for name, _ in model.named_parameters():
        assert (state[name] - final[name]).abs().max() < tolerance, name


@pytest.mark.parametrize(("mesh", "sequence_parallel"), quick(product(MESHES, [True, False]), 2, 7, 8), ids=str)
@pytest.mark.sample(1)
def test_our_llama(mesh: dict[str, int], sequence_parallel: bool) -> None:
    shard = {"shard": {"sequence_parallel": sequence_parallel}}
    assert_trains_like_one_device(llama(2), llama_loss, batches(), mesh, passes=shard)


@pytest.mark.parametrize(("heads", "kv_heads", "tp"), [(2, 2, 4), (2, 1, 3), (3, 1, 4), (4, 2, 5), (1, 1, 3)])
@pytest.mark.sample(1)
def test_with_fewer_heads_than_ranks_tokens_are_exchanged_for_heads(heads: int, kv_heads: int, tp: int) -> None:
    """The weights of such attention are whole on each rank, and ranks compute a part of the tokens."""
    model, attentions = llama(2, dim=4 * heads, n_heads=heads, n_kv_heads=kv_heads), []

    def observe(program: ir.Program, record: PassRecord) -> None:
        if record.name == "shard":
            attentions.extend(node for node in program.calls() if "dot_product_attention" in node.name)

    assert_trains_like_one_device(model, llama_loss, batches(), {"tp": tp}, observe=observe)
    splits = {ir.example(node).shape[1] < heads for node in attentions}
    assert splits == {heads > 1}


@pytest.mark.parametrize(("name", "mesh"), quick(product(zoo.MODELS, ({"tp": 4}, MESHES[-1])), 4, 8, 11), ids=str)
@pytest.mark.sample(1)
def test_models_of_others(name: str, mesh: dict[str, int]) -> None:
    # Gemma and Mixtral compute partly in fp32, whose rounding depends on the order of sums
    tolerance = 1e-7 if name in ("gemma", "mixtral") else 1e-10
    assert_trains_like_one_device(zoo.build(name), zoo.loss_fn, [zoo.batch()] * 3, mesh, tolerance)


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.sample(1)
def test_with_recomputation_and_microbatches(policy: str) -> None:
    data = batches(rows=6)
    metrics, _ = train_plainly(llama(2), llama_loss, data, microbatches=2)
    step = compile_lockstep(llama(2), llama_loss, data[0], {"dp_shard": 2, "tp": 2}, microbatches=2,
                            passes={"remat": {"policy": policy}})
    for batch, lr, expected in zip(data, LRS, metrics):
        assert step(batch, lr)["loss"] == pytest.approx(expected["loss"], abs=1e-10)


def communication(n_layers: int, sequence_parallel: bool, length: int = 8) -> tuple[Counter, Counter]:
    """Return the collectives of the joint graph by phase and kind, and their bytes by kind."""
    observed: list[tuple[ir.Program, PassRecord]] = []
    data = {k: torch.zeros(2, length, dtype=torch.long) for k in ("tokens", "labels", "positions")}
    cfg = ModelConfig(dim=16, n_layers=n_layers, n_heads=4, n_kv_heads=2, ffn_dim=32, vocab_size=VOCAB)
    torch.manual_seed(0)
    ct.compile_step(Llama(cfg), llama_loss, data, mesh={"tp": 2}, ranks="lockstep",
                    passes={"shard": {"sequence_parallel": sequence_parallel}},
                    observe=lambda program, record: observed.append((program, record)))
    program, record = next((p, r) for p, r in observed if r.name == "joint")
    calls = Counter((ir.phase(n), n.target._opname) for n in program.calls()
                    if n.target in RESHARD_OPS.keys() - {reshard.invariant_to_replicate, reshard.invariant_to_shard})
    return calls, Counter({t.kind: t.sent_bytes for t in record.accounting.traffic})


@pytest.mark.full
def test_one_layer_communicates_as_megatron_does() -> None:
    (one, one_bytes), (two, two_bytes) = communication(1, True), communication(2, True)
    two.subtract(one)
    assert +two == {("forward", "all_gather"): 2, ("forward", "reduce_scatter"): 2,
                    ("backward", "all_gather"): 2, ("backward", "reduce_scatter"): 2}
    activation_bytes = 2 * 8 * 16 * 4  # batch, sequence, dim, fp32
    assert two_bytes["all_gather"] - one_bytes["all_gather"] == 4 * activation_bytes // 2  # (tp - 1) / tp of each
    assert two_bytes["reduce_scatter"] - one_bytes["reduce_scatter"] == 4 * activation_bytes // 2


@pytest.mark.full
def test_without_sequence_parallelism_two_sums_a_layer_and_direction() -> None:
    (one, _), (two, _) = communication(1, False), communication(2, False)
    two.subtract(one)
    assert +two == {("forward", "psum"): 2, ("backward", "psum"): 2}


def test_rows_without_a_label_on_some_ranks() -> None:
    data = batches()
    for batch in data:
        batch["labels"][3:] = -100  # the second rank of dp_shard owns only these
    assert_trains_like_one_device(llama(), llama_loss, data, {"dp_shard": 2, "tp": 2})


@pytest.mark.full
@pytest.mark.parametrize(("length", "tp"), [(129, 2), (129, 4), (129, 8), (8193, 4)])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_long_uneven_sequences(length: int, tp: int, sequence_parallel: bool) -> None:
    torch.manual_seed(0)
    cfg = ModelConfig(dim=16, n_layers=1, n_heads=8, n_kv_heads=2, ffn_dim=20, vocab_size=31)
    model = Llama(cfg).double()
    tokens = torch.randint(0, 31, (1, length + 1))
    data = [{"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "positions": torch.arange(length)[None]}] * 3
    assert_trains_like_one_device(model, llama_loss, data, {"tp": tp},
                                  passes={"shard": {"sequence_parallel": sequence_parallel}})


@pytest.mark.full
def test_gpt2_vocabulary_over_eight() -> None:
    torch.manual_seed(0)
    cfg = ModelConfig(dim=12, n_layers=1, n_heads=6, n_kv_heads=6, ffn_dim=20, vocab_size=50257)
    tokens = torch.randint(0, 50257, (2, 10))
    data = [{"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "positions": torch.arange(9).expand(2, 9).contiguous()}] * 3
    assert_trains_like_one_device(Llama(cfg).double(), llama_loss, data, {"tp": 8})


class Alternating(nn.Module):
    """A feed-forward layer whose gates and values alternate in one weight, as GPT-OSS stores them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(VOCAB, 8), nn.Linear(8, 20), nn.Linear(10, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        both = self.up(self.embed(tokens))
        x = self.down(both[..., ::2].sigmoid() * both[..., 1::2])
        return x @ self.embed.weight.T


@pytest.mark.sample(1)
@pytest.mark.parametrize("tp", [2, 3])
def test_gates_and_values_that_alternate_are_sharded(tp: int) -> None:
    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())

    model = Alternating().double()
    assert_trains_like_one_device(model, loss, batches(), {"dp_shard": 2, "tp": tp})
    step = compile_lockstep(model, loss, batches()[0], {"tp": tp})
    shapes = {name: step.state[f"model.{name}"].local[0].shape for name in ("up.weight", "down.weight")}
    assert shapes == {"up.weight": (2 * -(-10 // tp), 8), "down.weight": (8, -(-10 // tp))}
