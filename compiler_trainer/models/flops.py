"""FLOPs that a token takes forward and backward, without recomputation: 6 N + 12 L H h T (PaLM, appendix B).

N leaves out embeddings, which are looked up and not multiplied (unless they are the head as well), and experts that a
token does not take. Of a frozen weight no gradient is made: it counts 4 times and not 6. h is the mean size of a
head's key and its value.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from compiler_trainer.config.schema import ModelConfig
from compiler_trainer.models.attention import head_dims
from compiler_trainer.models.llama import Llama


def of_decoder(cfg: ModelConfig, module: Llama, seq_len: int) -> int:
    """Of one of our decoders, a row of `seq_len` tokens."""
    parameters = module.active_parameters()
    looked_up = 0 if cfg.tied else parameters["tok_embeddings.weight"]
    attention = 6 * cfg.n_layers * cfg.n_heads * sum(head_dims(cfg)) * seq_len
    return 6 * (sum(parameters.values()) - looked_up) + attention


def of_folder(config: Any, module: nn.Module, seq_len: int) -> int:
    """Of a model that transformers built from its `config`; one without attention has weights alone."""
    taken = getattr(config, "num_experts_per_tok", None) or 1
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        return of_weights(module, taken)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return of_weights(module, taken) + 12 * config.num_hidden_layers * heads * head_dim * seq_len


def of_weights(module: nn.Module, experts_taken: int = 1) -> int:
    """Of the products with weights alone: what a model does beside them only the model knows."""
    looked_up = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    multiplied = {id(m.weight) for m in module.modules() if isinstance(m, nn.Linear)}
    total = 0
    for name, p in module.named_parameters():
        if id(p) not in looked_up - multiplied:
            used = p.numel() * experts_taken // p.shape[0] if ".experts." in name and p.dim() == 3 else p.numel()
            total += (6 if p.requires_grad else 4) * used
    return total
