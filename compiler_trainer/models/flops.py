"""FLOPs of a token, forward and backward, without recomputation: 6 N + 12 L H h T (PaLM, appendix B).

N leaves out embeddings, which are looked up and not multiplied (unless they are also the head), and experts that a
token does not go through. A frozen weight counts 4 times instead of 6, because it has no gradient. h is the mean size
of a head's key and value.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from compiler_trainer.config.schema import ModelConfig
from compiler_trainer.models.attention import head_dims
from compiler_trainer.models.llama import Llama


def of_decoder(cfg: ModelConfig, module: Llama, seq_len: int) -> int:
    """Return the FLOPs per token of one of our decoders, for sequences of `seq_len` tokens."""
    parameters = module.active_parameters()
    looked_up = 0 if cfg.tied else parameters["tok_embeddings.weight"]
    attention = 6 * cfg.n_layers * cfg.n_heads * sum(head_dims(cfg)) * seq_len
    return 6 * (sum(parameters.values()) - looked_up) + attention


def of_folder(config: Any, module: nn.Module, seq_len: int) -> int:
    """Return the FLOPs per token of a model that transformers built from `config`; without attention: of weights."""
    experts_taken = getattr(config, "num_experts_per_tok", None) or 1
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        return of_weights(module, experts_taken)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return of_weights(module, experts_taken) + 12 * config.num_hidden_layers * heads * head_dim * seq_len


def of_weights(module: nn.Module, experts_taken: int = 1) -> int:
    """Return the FLOPs per token of the matmuls with weights. Other work depends on the model's code."""
    looked_up = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    multiplied = {id(m.weight) for m in module.modules() if isinstance(m, nn.Linear)}
    total = 0
    for name, p in module.named_parameters():
        if id(p) not in looked_up - multiplied:
            used = p.numel() * experts_taken // p.shape[0] if ".experts." in name and p.dim() == 3 else p.numel()
            total += (6 if p.requires_grad else 4) * used
    return total
