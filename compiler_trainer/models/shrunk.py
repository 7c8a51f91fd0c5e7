"""A small model of the same kind as a transformers model: the same layers, flags and masks, with small sizes.

Questions about a model's code, such as which tokens affect a logit, are then answered by values in a fraction of a
second.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

VOCAB, POSITIONS, WINDOW, FEW = 64, 64, 6, 2
LARGEST = 30_000_000  # most parameters of a small model
SIZES: dict[int, str] = {
    32: """hidden_size d_model n_embd embedding_size word_embed_proj_dim embedding_dim emb_dim attention_hidden_size
        lru_width input_embedding_size output_embedding_size""",
    40: """intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size n_inner moe_intermediate_size
        shared_expert_intermediate_size shared_intermediate_size dense_intermediate_size dim_ff dff d_inner
        moe_shared_expert_intermediate_size intermediate_size_mlp feed_forward_size expert_ffn_hidden_size
        shared_experts_intermediate_size""",
    16: """qk_head_dim index_head_dim q_lora_rank kv_lora_rank o_lora_rank router_hidden_size laurel_rank hc_lowrank
        index_n_heads indexer_n_heads""",  # with few heads, many scores are 0, and selections fall by ties
    5: "index_topk index_kpool index_block_size",  # keys that an indexer selects, of a block, and blocks
    8: """head_dim swa_head_dim global_head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim kv_channels dim_head d_head
        linear_key_head_dim linear_value_head_dim linear_head_dim indexer_head_dim mamba_d_head mamba_head_dim
        attention_head_size attention_head_dim mamba_n_heads mamba_num_heads mamba_d_state ssm_state_size state_size
        mamba_headdim mamba_chunk_size chunk_size num_heads hidden_size_per_layer_input""",
    4: """num_attention_heads n_head n_heads decoder_attention_heads encoder_attention_heads attention_heads
        swa_num_attention_heads num_decoder_attention_heads linear_num_value_heads linear_num_heads
        num_experts num_local_experts n_routed_experts moe_num_experts zero_expert_num rotary_dim encoder_layers
        num_encoder_layers indexer_budget""",
    FEW: """num_key_value_heads swa_num_key_value_heads num_kv_heads num_query_groups linear_num_key_heads
        num_experts_per_tok moe_topk moe_k num_experts_per_token moe_top_k index_topk_blocks indexer_compress_ratio""",
    1: """n_group topk_group num_expert_group mamba_n_groups n_groups mamba_ngroups
        first_k_dense_replace num_dense_layers moe_layer_start_index""",  # the first layer with experts
    VOCAB: """vocab_size decoder_vocab_size vocab_size_per_layer_input max_position_embeddings n_positions max_seq_len
        n_ctx mamba_d_ssm""",
    WINDOW: "sliding_window sliding_window_size attention_window_size window_size local_attention attention_chunk_size",
}
SIZE_OF = {name: size for size, names in SIZES.items() for name in names.split()}
PATTERNS = ("period", "interval", "pattern", "every", "group_size")  # in names of layer counts
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers")


def shrunk(config: Any) -> Any:
    """Return a config of a model of the same kind, with small sizes, and one layer or more of each kind."""
    small = copy.deepcopy(config)
    heads, key_heads = (vars(config).get(name) for name in ("num_attention_heads", "num_key_value_heads"))
    for name, value in list(vars(config).items()):
        if isinstance(value, int) and not isinstance(value, bool) and value and name in SIZE_OF:
            is_alike = name in ("num_key_value_heads", "num_kv_heads") and value in (1, heads)
            is_count = is_alike or SIZE_OF[name] == FEW
            size = SIZE_OF["num_attention_heads" if is_alike else name]
            setattr(small, name, min(value, size) if is_count else size)
            if name == "index_n_heads" and value == key_heads:  # an indexer's head for each key head
                small.index_n_heads = SIZE_OF["num_key_value_heads"]
        if hasattr(value, "to_dict"):
            setattr(small, name, shrunk(value))
        if name.endswith("_token_id") and isinstance(value, int):
            setattr(small, name, min(value, VOCAB - 1))
    cut_layers(small)
    scale_turns(small)
    if overrides := config.to_dict().get("per_layer_config"):
        small.per_layer_config = dict(scaled(overrides, vars(config), vars(small)))
    return small


def scale_turns(config: Any) -> None:
    """Divide the pairs of a smaller head among positions in time, height and width, if rotary embeddings have these."""
    rotary = vars(config).get("rope_parameters")
    if isinstance(rotary, dict) and rotary.get("mrope_section"):
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        pairs = int(head * rotary.get("partial_rotary_factor", 1.0)) // 2
        config.rope_parameters = rotary | {"mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]}


def scaled(
    overrides: dict[Any, dict[str, Any]], large: dict[str, Any], small: dict[str, Any]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield, for each layer left that has sizes of its own, these in the ratio to the sizes of other layers."""
    count = next(small[name] for name in LAYERS if name in small)
    for layer, sizes in overrides.items():
        if int(layer) < count:
            ratios = {name: size * small[name] // large[name] for name, size in sizes.items() if name in SIZE_OF}
            yield int(layer), sizes | ratios


def cut_layers(config: Any) -> None:
    """Keep the first layers, such that each kind of layer is among them."""
    entries = dict(vars(config))
    name = next((name for name in LAYERS if isinstance(entries.get(name), int)), None)
    if name is None:
        return
    count = entries[name]
    lists = {key: value for key, value in entries.items() if isinstance(value, list) and len(value) == count}
    kinds = [str([value[i] for value in lists.values()]) for i in range(count)]
    enough = next((i for i in range(1, count) if len({*kinds[:i]}) == len({*kinds})), count)
    new_count = min(count, max([2, enough, *patterns(entries)]))
    setattr(config, name, new_count)
    if "num_kv_shared_layers" in entries:
        config.num_kv_shared_layers = 0
    for key, value in lists.items():
        setattr(config, key, value[:new_count])


def patterns(entries: dict[str, Any]) -> Iterator[int]:
    """Yield the numbers of layers after which a pattern of layers repeats."""
    for name, value in entries.items():
        if isinstance(value, int) and not isinstance(value, bool) and any(part in name for part in PATTERNS):
            yield value
