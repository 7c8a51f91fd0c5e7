"""Descriptions of passes and of their counts, for readers who do not know the passes."""

from __future__ import annotations

PASSES = {
    "capture": "traces the model: one graph of forward and loss",
    "cast": "computes in the compute dtype",
    "intervals": "attention masks as first and last key of each query",
    "chunk_loss": "head and loss in chunks of tokens",
    "normalize": "operators rewritten as ones that have a sharding rule",
    "token_mean": "means over the trainable tokens of all microbatches",
    "batch_overlap": "several microbatches in one program",
    "sequence_layout": "the tokens that each rank of cp holds",
    "experts": "rows sorted by expert",
    "place": "a placement for every parameter",
    "float8": "linear layers in float8",
    "shard": "the graph of one rank; reshards where placements differ",
    "assign": "the pipeline stage of each operator",
    "joint": "forward and backward in one graph, by number of operators",
    "simplify": "operators removed or merged that change nothing",
    "cse": "computed or sent once instead of repeatedly",
    "reassociate": "partial sums added, then reduced once",
    "defer": "sums over ranks left to the update",
    "remat": "activations kept, recomputed or offloaded",
    "async_tp": "matmuls overlapped with the steps of a ring, not after a gather",
    "optimize": "gradients reduced and clipped, parameters updated",
    "accumulate": "gradients of microbatches added",
    "apply": "gradients reduced and clipped, parameters updated",
    "bucket": "small collectives merged into larger ones",
    "collectives": "reshards as collectives of process groups",
    "communicators": "process groups for gradients alone",
    "take_turns": "one microbatch computes while another's values travel",
    "overlap": "collectives started early, waited for late",
    "segment": "equal layers compiled once",
    "unfold": "the layers that a folded layer stands for, written out",
}

COUNTS = {
    "drop": "without effect",
    "join_scales": "scales merged",
    "scale_before_expanding": "scaled before expanding",
    "attention_by_interval": "attention operators",
    "parameters_sharded": "parameters sharded",
    "unknown": "operators without a rule",
    "apart": "in a separate group",
    "saved_bytes": "saved for the backward",
    "offloaded_bytes": "offloaded",
    "with_products_beside": "overlapped with a matmul",
}
