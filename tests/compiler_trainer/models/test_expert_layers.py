"""Routers agree with formulas for single tokens, experts with loops; loss and correction even out the load."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from products import sliced_products

from compiler_trainer import models
from compiler_trainer.capture.capture import capture
from compiler_trainer.config.options import build
from compiler_trainer.config.schema import ExpertsConfig, ModelConfig
from compiler_trainer.models.experts import Experts, MixtureOfExperts, rows_by_expert
from compiler_trainer.models.router import Router
from compiler_trainer.parity.one_device import LoopedExperts, looped
from compiler_trainer.step.exported import depends_on_mode, evaluating

F64 = torch.float64
N, D = 11, 16
ROUTERS = {
    "mixtral": ExpertsConfig(8, 2, 12),
    "qwen3, not normalized": ExpertsConfig(8, 3, 12, normalize=False),
    "deepseek v3": ExpertsConfig(12, 3, 12, shared=1, score="sigmoid", groups=4, top_groups=2, scale=2.5, bias_rate=0.1),
    "llama 4": ExpertsConfig(4, 1, 12, shared=1, score="sigmoid", normalize=False, weigh="input"),
}
each_router = pytest.mark.parametrize("cfg", ROUTERS.values(), ids=ROUTERS.keys())


@pytest.fixture
def any_dtype(monkeypatch):
    """Let `F.grouped_mm` take fp64 as well."""
    monkeypatch.setattr(F, "grouped_mm", sliced_products)


def randn(*shape, seed=1):
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def mixture(cfg, seed=0):
    """Return a mixture in fp64, with scores far from each other and from 1, and a correction that changes the choice.
    """
    torch.manual_seed(seed)
    layer = MixtureOfExperts(D, cfg).double()
    with torch.no_grad():
        layer.router.weight.copy_(randn(cfg.count, D, seed=2) / 3)
        if layer.router.correction is not None:
            layer.router.correction.copy_(randn(cfg.count, seed=3) / 3)
    return layer


def route_one(cfg, logits, correction):
    """Return (expert, weight) of one token, best first, by the papers' formulas."""
    exps = [z.exp() for z in logits]
    scores = [e / sum(exps) if cfg.score == "softmax" else 1 / (1 + 1 / e) for e in exps]
    corrected = [s.item() + c for s, c in zip(scores, correction)]
    size = cfg.count // cfg.groups
    groups = [range(g * size, (g + 1) * size) for g in range(cfg.groups)]
    groups.sort(key=lambda group: -sum(sorted(corrected[e] for e in group)[-2:]))
    candidates = [e for group in groups[: cfg.top_groups] for e in group]
    chosen = sorted(candidates, key=lambda e: -corrected[e])[: cfg.top_k]
    total = sum(scores[e] for e in chosen) if cfg.normalize else 1.0
    return [(e, cfg.scale * scores[e] / total) for e in chosen]


@each_router
def test_each_token_goes_where_the_formulas_send_it(cfg):
    router, x = mixture(cfg).router.eval(), randn(N, D)
    correction = [0.0] * cfg.count if router.correction is None else router.correction.tolist()
    routes = [route_one(cfg, token, correction) for token in x @ router.weight.T]
    ids, weights, _ = router(x)
    assert ids.tolist() == [[e for e, _ in slots] for slots in routes]
    expected_weights = torch.stack([torch.stack([w for _, w in slots]) for slots in routes])
    torch.testing.assert_close(weights, expected_weights, atol=1e-12, rtol=1e-12)
    ups = randn(N, cfg.top_k, seed=4)
    actual, expected = (torch.autograd.grad((w * ups).sum(), router.weight)[0] for w in (weights, expected_weights))
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)


def test_the_correction_changes_the_choice_and_not_the_weight():
    cfg = dataclasses.replace(ROUTERS["deepseek v3"], normalize=False, groups=1, top_groups=1)
    router, x = mixture(cfg).router.eval(), randn(N, D)
    ids, weights, _ = router(x)
    torch.testing.assert_close(weights, cfg.scale * (x @ router.weight.T).sigmoid().gather(1, ids))
    router.correction.zero_()
    assert not torch.equal(router(x)[0], ids)


def test_routing_is_in_fp32_where_the_model_is_in_less():
    cfg = ROUTERS["mixtral"]
    router, x = mixture(cfg).router.eval().bfloat16(), randn(200, D).bfloat16()
    same, same_weights, _ = copy.deepcopy(router).float()(x.float())
    ids, weights, _ = router(x)
    assert weights.dtype == torch.bfloat16 and torch.equal(ids, same)
    assert torch.equal(weights, same_weights.bfloat16())


CHOICES = {
    "as it comes": torch.tensor([[0, 1], [1, 4], [4, 0], [3, 1], [1, 0], [2, 4]]),
    "one has none": torch.tensor([[0, 1], [1, 4], [4, 0], [0, 1], [1, 0], [0, 4]]),
    "one has all": torch.full((6, 1), 3),
    "the last has all": torch.full((6, 1), 4),
}


@pytest.mark.parametrize("weigh", ["output", "input"])
@pytest.mark.parametrize("ids", CHOICES.values(), ids=CHOICES.keys())
def test_grouped_products_equal_a_loop_over_experts(any_dtype, ids, weigh):
    experts = Experts(D, ExpertsConfig(5, 2, 12, weigh=weigh)).double()
    loop = LoopedExperts(experts)
    x, weights, ups = randn(6, D), randn(*ids.shape, seed=2).abs(), randn(6, D, seed=3)
    outs, grads = [], []
    for module in (experts, loop):
        inputs = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
        out = module(inputs[0], ids, inputs[1])
        outs.append(out)
        grads.append(torch.autograd.grad((out * ups).sum(), (*inputs, module.w1, module.w2, module.w3)))
    torch.testing.assert_close(*outs, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(*grads, atol=1e-12, rtol=1e-12)
    idle = [e for e in range(5) if e not in ids]
    assert all(grad[idle].eq(0).all() for grad in grads[0][2:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pytorchs_grouped_products_give_the_same(dtype):
    cfg = ExpertsConfig(5, 2, 16)
    experts, ids = Experts(D, cfg).to(dtype), CHOICES["one has none"]
    x, weights = randn(6, D).to(dtype), randn(6, 2, seed=2).to(dtype)
    out = experts(x, ids, weights)
    expected = LoopedExperts(experts.double())(x.double(), ids, weights.double())
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def test_rows_are_counted_for_experts_without_any():
    assert rows_by_expert(torch.tensor([0, 0, 2, 2, 2, 5]), 7).tolist() == [2, 0, 3, 0, 0, 1, 0]


@each_router
def test_a_layer_is_the_sum_of_its_experts_and_the_shared_one(any_dtype, cfg):
    grouped = mixture(cfg).eval()
    loop = looped(grouped)
    x, ups = randn(2, 5, D), randn(2, 5, D, seed=2)
    (out, none), (loop_out, _) = grouped(x), loop(x)
    assert out.shape == x.shape and none is None
    torch.testing.assert_close(out, loop_out, atol=1e-12, rtol=1e-12)
    actual, expected = (
        torch.autograd.grad((value * ups).sum(), list(module.parameters()))
        for value, module in ((out, grouped), (loop_out, loop))
    )
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)
    if cfg.shared:
        torch.testing.assert_close(out - grouped.shared(x), mixture(dataclasses.replace(cfg, shared=0)).eval()(x)[0])


# ---- balance ----------------------------------------------------------------------------------------


def test_the_auxiliary_loss_is_that_of_the_paper():
    cfg = ExpertsConfig(3, 2, 8, balance_loss=0.5, score="sigmoid")
    router = Router(2, cfg).double()
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]]))
    x = torch.tensor([[2.0, 1.0], [3.0, -4.0]], dtype=F64, requires_grad=True)
    scores = torch.sigmoid(torch.stack([x[:, 0], x[:, 1], -x.sum(-1)], -1))  # choices {0, 1} and {0, 2}
    probability = (scores / scores.sum(-1, keepdim=True)).mean(0)
    expected = 0.5 * 3 * (0.5 * probability[0] + 0.25 * probability[1] + 0.25 * probability[2])
    _, _, actual = router(x)
    torch.testing.assert_close(actual, expected, atol=1e-14, rtol=1e-14)
    torch.testing.assert_close(torch.autograd.grad(actual, x), torch.autograd.grad(expected, x), atol=1e-14, rtol=1e-14)
    assert router.load.tolist() == [0.5, 0.25, 0.25]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_auxiliary_loss_is_its_coefficient_where_shares_are_even(score):
    router = Router(4, ExpertsConfig(4, 2, 8, score=score, balance_loss=0.25)).double()
    with torch.no_grad():
        router.weight.copy_(torch.eye(4))
    x = torch.tensor([[2.0, 1, 0, 0], [0, 2, 1, 0], [0, 0, 2, 1], [1, 0, 0, 2]], dtype=F64)
    assert router(x)[2].item() == pytest.approx(0.25, rel=1e-12)


def test_each_forward_in_training_moves_the_correction_against_the_shares():
    cfg = ExpertsConfig(4, 1, 8, score="sigmoid", normalize=False, bias_rate=0.25)
    router = Router(4, cfg).double()
    with torch.no_grad():
        router.weight.copy_(torch.eye(4))
    x = torch.eye(4, dtype=F64)[[0, 0, 0, 1]]  # counts 3, 1, 0, 0; the mean is 1
    steps = torch.tensor([-1.0, 0.0, 1.0, 1.0], dtype=F64)
    router(x)
    torch.testing.assert_close(router.correction, 0.25 * (steps - 0.25), atol=1e-15, rtol=0)
    before = router.correction.clone()
    ids, *_ = router(x)  # scores are 0.73 and 0.5 elsewhere: by now the correction puts 2 before 0
    assert ids.flatten().tolist() == [2, 2, 2, 2]
    torch.testing.assert_close(router.correction, before + 0.25 * (torch.tensor([1, 1, -1, 1.0]) - 0.5).double())


def test_an_expert_with_the_mean_share_keeps_its_correction():
    router = Router(10, ExpertsConfig(10, 1, 8, normalize=False, bias_rate=0.1))
    with torch.no_grad():
        router.weight.copy_(torch.eye(10))
    tokens = torch.eye(10).repeat(7, 1)
    tokens[0] = tokens[1]  # 6, 8 and eight times 7: in floats, the mean of ten tenths is not a tenth
    router(tokens)
    torch.testing.assert_close(router.correction, torch.tensor([0.1, -0.1, *[0.0] * 8]), atol=0, rtol=0)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_padding_counts_in_nothing_that_keeps_shares_even(score):
    """Loads, the correction and the auxiliary loss, with its gradient, are those of the real tokens alone."""
    routers = [Router(D, ExpertsConfig(8, 2, 12, score=score, bias_rate=0.25, balance_loss=0.5)).double() for _ in range(2)]
    routers[1].load_state_dict(routers[0].state_dict())
    x, gradients = randn(N, D), []
    padded, is_real = torch.cat([x[:4], torch.ones(9, D, dtype=F64), x[4:]]), torch.ones(N + 9, dtype=torch.bool)
    is_real[4:13] = False
    for router, arguments in zip(routers, ((x,), (padded, is_real))):
        ids, _, balance = router(*arguments)
        gradients.append(torch.autograd.grad(balance, router.weight)[0])
    assert len(ids) == N + 9  # padding is routed, too
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-14, rtol=1e-14)
    for name, value in routers[0].state_dict().items():
        torch.testing.assert_close(routers[1].state_dict()[name], value, atol=1e-14, rtol=1e-14)
    router(padded, torch.zeros_like(is_real))
    assert not router.load.any() and not router.auxiliary and torch.equal(router.correction, routers[0].correction)


@each_router
def test_evaluation_changes_nothing_and_has_no_auxiliary_loss(any_dtype, cfg):
    layer, x = mixture(dataclasses.replace(cfg, balance_loss=0.1)), randn(2, 5, D)
    training = {name: value.clone() for name, value in layer.state_dict().items()}
    out, none = layer.eval()(x)
    assert none is None
    assert all(torch.equal(value, training[name]) for name, value in layer.state_dict().items())
    same, balance = layer.train()(x)
    torch.testing.assert_close(same, out, atol=0, rtol=0)
    assert balance > 0 and not torch.equal(layer.router.load, training["router.load"])


# ---- in a model -------------------------------------------------------------------------------------

TINY = ModelConfig(dim=16, n_layers=4, n_heads=2, n_kv_heads=1, ffn_dim=24, vocab_size=61,
                   experts=ExpertsConfig(4, 2, 8, shared=1, dense_layers=1, every=2, balance_loss=0.5))


def batch(rows=2, seq_len=7, vocab=61):
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(vocab, (rows, seq_len), generator=generator) for _ in range(2))
    return {"tokens": tokens, "labels": labels, "positions": torch.arange(seq_len).expand(rows, -1).contiguous()}


def test_experts_are_in_every_nth_layer_after_the_dense_ones():
    def layers(**changes):
        cfg = dataclasses.replace(TINY, experts=dataclasses.replace(TINY.experts, **changes))
        return [i for i, b in enumerate(models.build(cfg).layers) if isinstance(b.feed_forward, MixtureOfExperts)]

    assert layers() == [2]
    assert layers(every=1) == [1, 2, 3]
    assert layers(dense_layers=0) == [1, 3]


def test_the_loss_includes_the_layers_auxiliary_losses_in_training_only(any_dtype):
    cfg = dataclasses.replace(TINY, experts=dataclasses.replace(TINY.experts, dense_layers=0))
    torch.manual_seed(0)
    model, data, noted = models.Llama(cfg).double(), batch(), []
    for layer in model.layers[1::2]:
        layer.feed_forward.router.register_forward_hook(lambda router, args, out: noted.append(out[2]))
    loss = models.loss_fn(model, data)
    auxiliary = sum(noted)
    assert len(noted) == 2 and all(balance > 0.1 for balance in noted)
    with torch.no_grad(), evaluating(model):
        logits = model(data["tokens"], data["positions"])
        plain = F.cross_entropy(logits.flatten(0, 1), data["labels"].flatten())
        assert models.loss_fn(model, data) == plain
    torch.testing.assert_close(loss, plain + auxiliary)
    loss.backward()
    assert all(p.grad.abs().sum() > 0 for p in model.parameters())


def test_a_model_learns_as_its_looped_copy_does(any_dtype):
    cfg = dataclasses.replace(TINY, experts=dataclasses.replace(TINY.experts, bias_rate=0.01, score="sigmoid"))
    torch.manual_seed(0)
    grouped, data = models.Llama(cfg).double(), batch()
    loop = looped(grouped)
    for model in (grouped, loop):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        for _ in range(3):
            optimizer.zero_grad()
            models.loss_fn(model, data).backward()
            optimizer.step()
    assert grouped.layers[2].feed_forward.router.correction.abs().max() > 0
    torch.testing.assert_close(grouped.state_dict(), loop.state_dict(), atol=1e-10, rtol=1e-10)


ONE_LAYER = dataclasses.replace(TINY, n_layers=1, experts=ExpertsConfig(4, 2, 8, balance_loss=0.5))


@pytest.fixture(scope="module")
def training():
    """Return one layer, captured as it trains, in a dtype that PyTorch's fake kernel takes."""
    model = models.build(ONE_LAYER, torch.bfloat16)
    return capture(model, models.loss_fn, batch(), torch.device("cpu"))[0]


def test_what_follows_from_the_sort_leaves_through_the_sum_over_slots(training):
    (sort,) = (node for node in training.calls() if node.target is torch.ops.aten.sort.default)
    inside, ends, frontier = [], set(), [sort]
    while frontier:
        node = frontier.pop()
        is_end = node.target is torch.ops.aten.sum.dim_IntList and node.args[1] == [1]
        ends.update([node] if is_end else [])
        inside.append(node)
        frontier += [] if is_end else [user for user in node.users if user not in inside]
    assert len(ends) == 1 and not any(node.op == "output" for node in inside)
    assert sum("grouped_mm" in str(node.target) for node in set(inside)) == 3


def test_evaluation_is_captured_in_eval_mode_with_an_auxiliary_loss_alone(training):
    assert depends_on_mode(training)
    assert [o.name for o in training.outputs if o.kind == "buffer"] == [f"layers.0.feed_forward.router.{name}" for name in ("load", "auxiliary")]
    model = models.build(ONE_LAYER, torch.bfloat16)
    with evaluating(model):
        evaluation, _ = capture(model, models.loss_fn, batch(), torch.device("cpu"))
    assert [o.kind for o in evaluation.outputs] == ["loss"]


# ---- sizes and weights ------------------------------------------------------------------------------

MODELS = Path(__file__).parents[3] / "conf" / "model"
SIZES = {  # parameters of the checkpoint, and the paper's billions of parameters that a token uses
    "mixtral_8x7b": (46_702_792_704, 12.9),
    "qwen3_30b_a3b": (30_532_122_624, 3.35),
    "deepseek_v3_16b": (15_706_484_224, 2.66),  # the paper's 2.4 leaves out the embedding, 0.21
    "llama4_scout": (107_769_861_120, 17.2),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_published_model_has_its_published_size(name):
    options = yaml.safe_load((MODELS / f"{name}.yaml").read_text())
    del options["defaults"]  # hydra's
    model = models.build(build(ModelConfig, options))
    total, active = SIZES[name]
    assert sum(p.numel() for p in model.parameters()) == total
    assert sum(model.active_parameters().values()) / 1e9 == pytest.approx(active, abs=0.05)


def test_a_cast_leaves_buffers_as_they_are():
    model = models.build(dataclasses.replace(TINY, experts=ExpertsConfig(4, 2, 8, bias_rate=0.1)), torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in model.buffers()} == {torch.float32} and len(list(model.buffers())) == 8


def test_experts_start_as_linear_layers_of_their_own_size():
    experts = Experts(64, ExpertsConfig(8, 2, 256))
    for weight, fan_in in ((experts.w1, 64), (experts.w2, 256), (experts.w3, 64)):
        assert weight.abs().max() <= fan_in**-0.5
        assert (weight.std((1, 2)) * fan_in**0.5 * 3**0.5 - 1).abs().max() < 0.05


def test_initial_values_are_there_for_experts_and_buffers():
    cfg = dataclasses.replace(TINY, dim=64, n_layers=8, experts=ExpertsConfig(4, 2, 128, shared=1, bias_rate=0.1))
    model = models.build(cfg, torch.bfloat16)
    values = {name: value[()] for name, value in models.initial_parameters(model, 3, torch.bfloat16)}
    assert values.keys() == model.state_dict().keys()
    assert all(values[name].dtype == value.dtype for name, value in model.state_dict().items())
    assert all(values[name].eq(0).all() for name, _ in model.named_buffers())
    for part, std in (("experts.w1", 0.02), ("experts.w2", 0.02 / 4), ("experts.w3", 0.02), ("router.weight", 0.02)):
        value = values[f"layers.3.feed_forward.{part}"].float()
        assert (value.std((-2, -1)) / std - 1).abs().max() < 0.1, part
