"""Operations that `torch.export` does not see train as on one device, or are refused with their line."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracle import NO_DECAY, compile_lockstep, perceptron, points, squared_error, trained_alike
from torch import nn
from transformers.utils import torch_compilable_check

from compiler_trainer import UserError

MESHES = [{}, {"dp_shard": 2, "tp": 2}]


class Between(nn.Module):
    """Operations between two linear layers, with a weight and a buffer."""

    def __init__(self, doing):
        super().__init__()
        self.doing, self.weight = doing, nn.Parameter(torch.linspace(0.5, 1.5, 7))
        self.register_buffer("seen", torch.ones(7))

    def forward(self, x):
        return self.doing(self, x)


def data_is_read(m, x):
    return x * m.seen.data + x.data.mean()


def data_is_written(m, x):
    m.seen.data = m.seen.data * 0.5 + x.data.mean(0)
    return x * m.seen


def data_is_written_in_place(m, x):
    m.seen.data.mul_(0.5).add_(1)
    return x * m.seen


def module_is_moved_to_where_it_is(m, x):
    return x * m.to(x.device).weight


def distribution(m, x):
    return torch.distributions.Normal(x, F.softplus(m.weight)).log_prob(x.detach() + 1)


def vmap(m, x):
    return torch.vmap(lambda row: torch.tanh(row) * m.weight)(x)


def grad(m, x):
    return torch.func.grad(lambda x: (torch.tanh(x) * m.weight).sum())(x)


def grad_in_vmap(m, x):
    return torch.func.vmap(torch.func.grad(lambda row: (torch.tanh(row) * m.weight).sum()))(x)


def grad_of_grad(m, x):
    inner = torch.func.grad(lambda x: (x**3 * m.weight).sum())
    return torch.func.grad(lambda x: inner(x).square().sum())(x)


def grad_and_value_in_jvp(m, x):
    function = torch.func.grad_and_value(lambda x: (torch.tanh(x) * m.weight).sum())
    return torch.func.jvp(lambda x: function(x)[0], (x,), (torch.ones_like(x),))[1]


def spectrum(m, x):
    window = torch.hann_window(4, dtype=x.dtype)
    spectra = torch.stft(x, 4, 2, window=window, return_complex=True) * m.weight[:3, None]
    return torch.istft(spectra, 4, 2, window=window, length=7)


def diagonal(m, x):
    return (x @ x.T * m.weight.mean()).fill_diagonal_(-torch.inf).softmax(-1) @ x


def diagonals_of_a_tall_matrix_and_of_a_cube(m, x):
    tall = (x * m.weight)[:3].T.clone().fill_diagonal_(0.5, wrap=True)
    cube = (x[:3, :3, None] * m.weight[:3]).fill_diagonal_(0.25)
    return x + tall.square().sum(1) + cube.square().sum()


RIGHT = [data_is_read, data_is_written, data_is_written_in_place, module_is_moved_to_where_it_is, distribution, vmap, grad,
         grad_in_vmap, grad_of_grad, grad_and_value_in_jvp, spectrum, diagonal, diagonals_of_a_tall_matrix_and_of_a_cube]  # fmt: skip


@pytest.mark.parametrize("doing", RIGHT, ids=lambda doing: doing.__name__)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.sample(4)
def test_it_is_recorded(doing, mesh):
    trained_alike(perceptron(Between(doing)), squared_error, points(), mesh, NO_DECAY)


def test_a_check_of_values_is_left_out_with_a_warning():
    def checked(m, x):
        torch_compilable_check((x < 100).all(), "too large")
        return x * m.weight

    with pytest.warns(UserWarning, match="checks a condition on values, which no step will check"):
        trained_alike(perceptron(Between(checked)), squared_error, points(), {}, NO_DECAY)


def parameter_is_written(m, x):
    m.weight.data.clamp_(-1, 1)
    return x * m.weight


def parameter_is_written_without_gradient(m, x):
    with torch.no_grad():
        m.weight.clamp_(-1, 1)
    return x * m.weight


def data_of_another_shape(m, x):
    m.seen.data = torch.ones(2, 7, dtype=x.dtype)
    return x * m.seen[0]


def module_is_converted(m, x):
    return x * m.float().weight


def gradient(m, x):
    leaf = x.detach().requires_grad_()
    (result,) = torch.autograd.grad((torch.tanh(leaf) * m.weight).sum(), leaf)
    return x * result


def vjp(m, x):
    return torch.func.vjp(lambda x: torch.tanh(x) * m.weight, x)[1](x)[0]


REFUSED = [
    (parameter_is_written, r"test_hidden.py:\d+ writes into the parameter 'between.weight'"),
    (parameter_is_written_without_gradient, r"writes into the parameter 'between.weight'"),
    (data_of_another_shape, r"test_hidden.py:\d+ puts torch.float64 \[2, 7\] on cpu into .data of torch.float64 \[7\]"),
    (module_is_converted, r"test_hidden.py:\d+ converts 'weight' of a Between from torch.float64 on cpu to torch.float32"),
    (gradient, r"test_hidden.py:\d+ reads a tensor that no captured operator creates.*use torch.func.grad"),
    (vjp, r"test_hidden.py:\d+ takes derivatives by torch.func.vjp; use torch.func.grad"),
]


def test_a_parameter_in_a_list_is_refused_by_its_line():
    def weight_in_list(m, x):
        return x * m.weights[0]

    between = Between(weight_in_list)
    between.weights = [between.weight]
    with pytest.raises(UserError, match=r"test_hidden.py:\d+ reads a tensor .* or, for a parameter in a list .*, register it"):
        compile_lockstep(perceptron(between), squared_error, points()[0], {}, NO_DECAY)


@pytest.mark.parametrize(("doing", "says"), REFUSED, ids=[doing.__name__ for doing, _ in REFUSED])
def test_it_is_refused_by_its_line(doing, says):
    with pytest.raises(UserError, match=says):
        compile_lockstep(perceptron(Between(doing)), squared_error, points()[0], {}, NO_DECAY)
