"""A training step of stock PyTorch: FSDP2, tensor parallelism and context parallelism over a device mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from compiler_trainer import models
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import Config, ModelConfig, OptimConfig
from compiler_trainer.models.attention import Attention, rotary_tables
from compiler_trainer.models.llama import Block, Llama
from compiler_trainer.models.loss import PADDING_DOCUMENT, TrainingOutputs
from compiler_trainer.pipeline import DTYPES
from compiler_trainer.training.trainer import local_device
from passes.torch_private import context_parallel_internals

Batch = dict[str, Tensor]
CPU_KERNELS = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
DATA = ("dp_replicate", "dp_shard")


class StockLlama(Llama):
    """The same model with a called last layer, because the hooks of `parallelize_module` act on calls."""

    def forward(
        self, tokens: Tensor, positions: Tensor, documents: Tensor | None = None
    ) -> Tensor | TrainingOutputs:
        x = self.tok_embeddings(tokens)
        cos, sin = rotary_tables(self.cfg, positions)
        mask, balances = self.mask(documents), []
        is_real = None if documents is None or self.cfg.experts is None else documents != PADDING_DOCUMENT
        for layer in self.layers:
            x, balance = layer(x, cos, sin, mask, is_real)
            balances += [] if balance is None else [balance]
        x = self.norm(x)
        logits = F.linear(x, self.tok_embeddings.weight) if self.output is None else self.output(x)
        return TrainingOutputs(logits, torch.stack(balances).sum(), ()) if balances else logits


def stock_step(contender: str, cfg: Config, batch: Batch) -> tuple[Callable[[], float], Callable[[], list[Tensor]]]:
    """Return a step of stock PyTorch, with `how` eager or compiled, and its persistent tensors."""
    sizes = {axis: size for axis, size in dataclasses.asdict(cfg.mesh).items() if size > 1 and axis != "ep"}
    mesh = init_device_mesh(local_device().type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)) if sizes else None
    model = parallel(built(cfg), mesh, contender, cfg)
    optim = cfg.optim
    optimizer = torch.optim.AdamW(
        groups_of(model, optim), optim.lr, optim.betas, optim.eps, optim.weight_decay, fused=True
    )
    local_batch = {name: rows_of(tensor, mesh) for name, tensor in batch.items()}
    if contender == "whole":
        model.compile()  # in place: callers inspect the names of its arguments

    in_bf16 = cfg.passes.cast.param_dtype == "bfloat16"

    def step() -> float:
        inputs = {name: tensor.clone() for name, tensor in local_batch.items()}  # context_parallel shards them in place
        with context(mesh, inputs), torch.autocast(local_device().type, torch.bfloat16, enabled=in_bf16):
            loss = models.loss_fn(model, inputs)
            loss.backward()
        if cfg.optim.max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), cfg.optim.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return mean_over_ranks(loss.detach())

    return step, lambda: [local(t) for t in (*model.parameters(), *moments(optimizer))]


def groups_of(model: nn.Module, optim: OptimConfig) -> list[dict[str, Any]]:
    """Return the parameters in the job's groups: vectors, if they do not decay, and all others."""
    assert set(optim.groups) <= {"no_decay"}, "stock PyTorch is compared on groups of the default job alone"
    vectors = [p for p in model.parameters() if optim.groups and p.dim() < 2]
    others = [p for p in model.parameters() if not optim.groups or p.dim() >= 2]
    return [{"params": others}, {"params": vectors, "weight_decay": 0.0}]


def built(cfg: Config) -> StockLlama:
    """Return the model with the same weights as every other contender's."""
    with torch.device("meta"):
        model = StockLlama(decoder_of(cfg))
    initial = models.initial_parameters(model, 0, torch.float32)
    weights = {name: torch.as_tensor(value[()], device=local_device()) for name, value in initial}
    model.to_empty(device=local_device()).load_state_dict(weights)
    return model


def decoder_of(cfg: Config) -> ModelConfig:
    """Return the decoder to measure; raise UserError if `cfg` names another kind of model."""
    if not isinstance(cfg.model, ModelConfig):
        raise UserError("model", "is no decoder of conf/model, and the contenders are made of one's sizes")
    return cfg.model


def parallel(model: StockLlama, mesh: DeviceMesh | None, contender: str, cfg: Config) -> StockLlama:
    """Return the model split over `tp`, with compiled blocks if requested, and sharded over the other axes."""
    axes = mesh.mesh_dim_names or () if mesh is not None else ()
    if mesh is not None and "tp" in axes:
        split(model, mesh["tp"])
    if contender == "block":
        for layer in model.layers:
            layer.compile()
    if mesh is not None and (data := tuple(axis for axis in axes if axis != "tp")):
        cast = cfg.passes.cast
        precision = MixedPrecisionPolicy(DTYPES[cast.param_dtype], DTYPES[cast.reduce_dtype])
        mesh_to_shard = sharding_mesh(mesh, data)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh_to_shard, mp_policy=precision)
        fully_shard(model, mesh=mesh_to_shard, mp_policy=precision)
    return model


def sharding_mesh(mesh: DeviceMesh, data: tuple[str, ...]) -> DeviceMesh:
    """Return the mesh to shard parameters over: `dp_shard` and `cp` as one axis, replicated over `dp_replicate`."""
    sharded = tuple(axis for axis in data if axis != "dp_replicate")
    if len(sharded) == 2:
        mesh[sharded]._flatten("dp_shard_cp")
        sharded = ("dp_shard_cp",)
    return mesh[(*(axis for axis in data if axis == "dp_replicate"), *sharded)]


def split(model: StockLlama, tp: DeviceMesh) -> None:
    """Apply tensor and sequence parallelism by the plan of PyTorch's own tutorial for Llama."""
    replicated, over_sequence = Replicate(), Shard(1)
    entering = PrepareModuleInput(
        input_layouts=(over_sequence, None, None, None), desired_input_layouts=(replicated, None, None, None)
    )
    plan: dict[str, Any] = {
        "tok_embeddings": RowwiseParallel(input_layouts=replicated, output_layouts=over_sequence),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=over_sequence, output_layouts=replicated),
    }
    for i, layer in enumerate(model.layers):
        assert isinstance(layer, Block) and isinstance(layer.attention, Attention)
        plan |= {
            f"layers.{i}.attention_norm": SequenceParallel(),
            f"layers.{i}.attention": entering,
            f"layers.{i}.attention.wo": RowwiseParallel(output_layouts=over_sequence),
            f"layers.{i}.ffn_norm": SequenceParallel(),
            f"layers.{i}.feed_forward": PrepareModuleInput(
                input_layouts=(over_sequence,), desired_input_layouts=(replicated,)
            ),
            f"layers.{i}.feed_forward.w2": RowwiseParallel(output_layouts=over_sequence),
        }
        columns = ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3")
        plan |= {f"layers.{i}.{name}": ColwiseParallel() for name in columns}
        layer.attention.n_heads //= tp.size()
        layer.attention.n_kv_heads //= tp.size()
    parallelize_module(model, tp, plan)


def rows_of(tensor: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Return the sequences of a global batch for this rank's data-parallel group."""
    axes = mesh.mesh_dim_names or () if mesh is not None else ()
    for axis in DATA:
        if mesh is not None and axis in axes:
            tensor = tensor.chunk(mesh[axis].size())[mesh[axis].get_local_rank()]
    return tensor


def context(mesh: DeviceMesh | None, inputs: Batch) -> AbstractContextManager:
    """Return the context of context parallelism, if the mesh has it."""
    if mesh is None or "cp" not in (mesh.mesh_dim_names or ()):
        return nullcontext()
    context_parallel_internals().custom_ops.update(dict.fromkeys(CPU_KERNELS, ring_on_cpu))  # only for GPUs
    tensors = list(inputs.values())
    return context_parallel(mesh["cp"], buffers=tensors, buffer_seq_dims=[1] * len(tensors))


def ring_on_cpu(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    """Run PyTorch's own ring over the attention kernel of the CPU."""
    names = [argument.name for argument in op._schema.arguments]
    arguments: dict[str, Any] = {name: local(value) for name, value in {**dict(zip(names, args)), **kwargs}.items()}
    mesh, ring = args[0].device_mesh, context_parallel_internals()
    if op is CPU_KERNELS[0]:
        outputs = ring._templated_ring_attention(mesh.get_group(), 2, op, **arguments)
    else:
        outputs = ring._templated_ring_attention_backward(
            mesh.get_group(), 2, op, grad_out_name="grad_out", **arguments
        )
    return tuple(DTensor.from_local(tensor, mesh, [Shard(2)], run_check=False) for tensor in outputs)


def mean_over_ranks(loss: Tensor) -> float:
    """Return the loss of the global batch; every rank has equally many labels."""
    loss = local(loss)
    dist.all_reduce(loss)
    return float(loss) / dist.get_world_size()


def moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all tensors of an optimizer's state."""
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
