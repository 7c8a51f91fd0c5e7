"""Models whose indexers select keys: values on meshes, ties, memory, recomputation, documents and untrained parameters."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import indexers
import pytest
import torch
import torch.nn.functional as F
from oracle import ADAMW, compile_lockstep, train_step, trained_alike
from torch import Tensor, nn

from compiler_trainer.capture.capture import capture
from compiler_trainer.config.errors import UserError
from compiler_trainer.indexers import blocks_of, indexers_of_fixed_shapes
from compiler_trainer.models import folder
from compiler_trainer.models.probes import way_of
from passes.check.placements import check_placements
from passes.ir import ir
from passes.ir.mesh import Mesh
from passes.ir.operators import name_of
from passes.ir.spec import Factor
from passes.sharding.normalize import Normalize
from passes.sharding.place import Place
from passes.sharding.shard import Shard

DOCUMENTS = [[4, 9, 6], [12, 1, 6]]  # some have fewer tokens than an indexer selects
APART = {name: "positions" for name in ("deepseek_v32", "glm_moe_dsa", "hy_v4", "axk2", "dots3_note", "qwen4_exp")}
# blocks of these begin at multiples of their size in a sequence, whatever documents they lie in
IN_NO_WAY = ("deepseek_v4", "minimax_m3_vl", "glm5_next")
MESHES = [{"cp": 2}, {"cp": 3}, {"dp_shard": 2, "tp": 2}, {"cp": 2, "tp": 2}]
QUICK = [("deepseek_v32", 0)]


def cases():
    for name in indexers.MODELS:
        for i, mesh in enumerate(MESHES):
            yield pytest.param(name, mesh, marks=() if (name, i) in QUICK else pytest.mark.full, id=f"{name} {mesh}")


@pytest.mark.sweep(8)
@pytest.mark.parametrize(("name", "mesh"), list(cases()))
def test_models_train_as_on_one_device(name, mesh):
    """Weights without a gradient are the same after steps with weight decay, as in eager PyTorch."""
    way = APART.get(name, "causal")
    data = indexers.rows(DOCUMENTS if way != "causal" else [[19], [19]])
    trained_alike(indexers.model_of(name), partial(indexers.loss_of, way), data, mesh)


# ---- ties ----------------------------------------------------------------------------------------------------


class Selecting(nn.Module):
    """One layer of attention to the 3 keys of the highest scores, which are rounded, so that many are equal."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv, self.head = nn.Embedding(64, 8), nn.Linear(8, 24, bias=False), nn.Linear(8, 64)
        self.double()

    def scores(self, tokens: Tensor) -> Tensor:
        q, k, _ = self.qkv(self.embed(tokens)).chunk(3, -1)
        scores = (q @ k.transpose(1, 2)).relu().round()
        return scores.masked_fill(~self.sees(tokens), float("-inf"))

    def sees(self, tokens: Tensor) -> Tensor:
        at = torch.arange(tokens.shape[1], device=tokens.device)
        return at[:, None] >= at

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(tokens)).chunk(3, -1)
        chosen = self.scores(tokens).topk(3, -1).indices
        mask = torch.zeros(len(tokens), *self.sees(tokens).shape, dtype=torch.bool).scatter(-1, chosen, True)
        y = F.scaled_dot_product_attention(*(x[:, None] for x in (q, k, v)), (mask & self.sees(tokens))[:, None])
        return self.head(y[:, 0])


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


@pytest.mark.parametrize("method", ["all_gather", "ring"])
@pytest.mark.parametrize("balance", ["none", "head_tail"])
@pytest.mark.parametrize("mesh", [{"cp": 2}, {"cp": 3}], ids=str)
@pytest.mark.sample(3)
def test_ties_fall_as_on_one_rank(mesh, balance, method):
    model, data = Selecting(), indexers.rows([[19], [19]])
    best = model.scores(data[0]["tokens"]).topk(4, -1).values
    assert (best[..., 2] == best[..., 3])[best[..., 2].isfinite()].float().mean() > 0.2, "there are no ties"
    step = trained_alike(model, loss_of, data, mesh, passes={"context": {"load_balance": balance, "method": method}})
    assert any(f": {method} over cp" in note for record in step.report["passes"] for note in record["report"].get("notes", ()))


# ---- the program ---------------------------------------------------------------------------------------------


def sharded(mesh: dict[str, int]) -> tuple[ir.Program, ir.Program]:
    """Return the programs of `Selecting` before and after `shard`."""
    program, ctx = capture(Selecting(), loss_of, indexers.rows([[18], [18]])[0], torch.device("cpu"))
    program = replace(program, mesh=Mesh.of(mesh))
    for step in (Normalize(), Place({})):
        program, _ = step(program, ctx)
    return program, Shard()(program, ctx)[0]


def programs_of(step) -> list[ir.Program]:
    return [compiled.program for compiled in step.train.values()]


@pytest.mark.parametrize("name", ["deepseek_v32", pytest.param("qwen4_exp", marks=pytest.mark.full),
                                  pytest.param("minimax_m3_vl", marks=pytest.mark.full)])  # fmt: skip
def test_no_rank_holds_values_of_all_pairs_of_tokens(name):
    tokens = 131  # no other dim has this size
    data = indexers.rows([[tokens], [tokens]], 1)
    step = compile_lockstep(indexers.model_of(name), partial(indexers.loss_of, "causal"), data[0], {"cp": 2})
    for program in programs_of(step):
        for node in program.calls():
            assert not is_of_pairs(node, tokens), f"%{node.name} {ir.source(node)}"


def is_of_pairs(node, tokens: int) -> bool:
    """Return True if a value in memory, with repeated entries counted once, has two dims of all tokens."""
    values = ir.value(node) if isinstance(ir.value(node), (tuple, list)) else [ir.value(node)]
    shapes = ([n for n, step in zip(v.shape, v.stride()) if step] for v in values if isinstance(v, Tensor))
    return any(sum(n in (tokens, 2 * tokens) for n in shape) > 1 for shape in shapes)


@pytest.mark.full
@pytest.mark.parametrize("policy", ["full", "selective", "none"])
def test_recomputation_reuses_the_selection(policy):
    data = indexers.rows([[19], [19]])
    options = {"passes": {"remat": {"policy": policy}}}
    step = trained_alike(indexers.model_of("deepseek_v32"), partial(indexers.loss_of, "causal"), data, {"cp": 2}, **options)
    (program,) = programs_of(step)
    phases = [ir.phase(node) for node in program.calls() if name_of(node) == "topk"]
    repeated = {name_of(n) for n in program.calls() if ir.record(n).recomputed and "indexer" in ir.module_path(n)}
    assert phases == ["forward", "forward"] and repeated <= {"_to_copy"}  # of the indices


def selection(program: ir.Program):
    """Return the top-k over keys, and its operand."""
    (node,) = (n for n in program.calls() if name_of(n) == "topk")
    return node, node.all_input_nodes[0]


def messages(before: ir.Program, after: ir.Program) -> str:
    return "\n".join(message for _, message in check_placements(before, after))


def test_the_selection_reads_whole_rows_of_scores():
    before, after = sharded({"cp": 2})
    _, scores = selection(after)
    assert not messages(before, after) and str(ir.spec(scores)) == "[2, 18@cp, 18]"


def test_a_selection_among_the_keys_of_one_rank_is_an_error():
    before, after = sharded({"cp": 2})
    _, scores = selection(after)
    rows, columns = (Factor(18),), (Factor(18, ("cp",)),)
    ir.set_spec(scores, replace(ir.spec(scores), dims=(ir.spec(scores).dims[0], rows, columns)))
    assert "d2 is sharded over cp, but cannot be sharded" in messages(before, after)


def test_keys_that_are_not_gathered_before_they_are_scored_are_an_error():
    before, after = sharded({"cp": 2})
    gather = next(n for n in after.calls() if name_of(n) == "ct::all_gather" and ir.example(n).shape == (2, 8, 18))
    source = gather.all_input_nodes[0]
    gather.replace_all_uses_with(source)
    assert "cp shards both" in messages(before, after)


def test_indices_that_claim_to_be_the_same_on_all_ranks_are_an_error():
    before, after = sharded({"cp": 2})
    node, _ = selection(after)
    (indices,) = node.users
    ir.set_spec(indices, replace(ir.spec(indices), dims=tuple((Factor(n),) for n in ir.spec(indices).shape)))
    assert messages(before, after)


# ---- documents -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", APART)
@pytest.mark.sample(2)
def test_a_document_selects_its_own_keys(name):
    assert way_of("documents", indexers.config_of(name), is_our_loss=False) == APART[name]
    more_heads = {key: 16 for key in ("index_n_heads", "indexer_n_heads") if key in indexers.MODELS[name][1]}  # no ties
    model, batch = indexers.model_of(name, **more_heads), indexers.rows([[1, 2, 7, 9], [12, 3, 4]], 1)[0]
    with torch.no_grad():
        packed = folder.logits(APART[name], model, batch)
        for row, lengths in enumerate(([1, 2, 7, 9], [12, 3, 4])):
            for part, together in zip(batch["tokens"][row].split(lengths), packed[row].split(lengths)):
                torch.testing.assert_close(together, model(input_ids=part[None], use_cache=False).logits[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", IN_NO_WAY)
def test_documents_are_refused_if_blocks_of_keys_cross_them(name):
    with pytest.raises(UserError, match=f"model.attention: documents.*{indexers.config_of(name).model_type}"):
        way_of("documents", indexers.config_of(name), is_our_loss=False)


# ---- fixed shapes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[[19]], [[1]], DOCUMENTS, [[1, 1, 3, 2], [2, 2, 2, 1]]], ids=str)
@pytest.mark.parametrize("name", ["qwen4_exp", "glm5_next"])
def test_indexers_of_fixed_shapes_select_the_same_keys(name, lengths):
    model, batch = indexers.model_of(name), indexers.rows(lengths, 1)[0]
    way = APART.get(name, "causal")
    with torch.no_grad():
        theirs = folder.logits(way, model, batch)
        with indexers_of_fixed_shapes():
            ours = folder.logits(way, model, batch)
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)


def test_blocks_begin_with_documents_and_leave_their_ends():
    first = torch.tensor([[0, 0, 0, 3, 3, 3, 3, 7], [8, 8, 2, 2, 2, 2, 2, 2]])  # 8: padding
    start, exists, of_key = blocks_of(first, 3)
    assert start[exists].tolist() == [0, 3, 2, 5] and exists.tolist() == [[True, True], [True, True]]
    assert of_key.tolist() == [[0, 0, 0, 1, 1, 1, 2, 2], [2, 2, 0, 0, 0, 1, 1, 1]]


# ---- parameters without a gradient ---------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("optim", [ADAMW, {"name": "muon", "weight_decay": 0.1}], ids=["adamw", "muon"])
@pytest.mark.parametrize("name", ["deepseek_v32", pytest.param("deepseek_v4", marks=pytest.mark.full)])
def test_an_indexer_is_in_the_state_and_not_trained(name, optim):
    """Neither decay nor Muon changes it, it has no moments, and the start of a run names its parameters."""
    model, data = indexers.model_of(name), indexers.rows([[19], [19]])
    step = compile_lockstep(model, partial(indexers.loss_of, "causal"), data[0], {"cp": 2}, optim)
    train_step(step, data)
    state, idle = step.state_dict(), {key for key, _ in model.named_parameters() if ".indexer." in key}
    assert idle and all(torch.equal(state[key], value) == (key in idle) for key, value in model.named_parameters())
    (remark,) = (line for line in step.report["remarks"] if line.startswith("parameters on which the loss does not depend stay unchanged"))
    named, _, more = remark.partition(": ")[2].partition(" and ")
    assert set(named.split(", ")) <= idle and len(named.split(", ")) + int((more or "0").split()[0]) == len(idle)
    moments = [key for key in step.state if key.startswith("optim.")]
    assert moments and not any("indexer" in key for key in moments)
