"""The features of a case: the rows and columns of the page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.nightly.parity.case import SMALLEST, Case

AXES = ("dp_replicate", "dp_shard", "cp", "tp", "ep", "pp")
Asks = Callable[[dict[str, Any]], bool]


def has(name: str, *values: Any) -> Asks:
    """Return a predicate that is true if an option is set, to one of some values if there are any."""
    return lambda options: name in options and (not values or options[name] in values)


OPTIONS: dict[str, Asks] = {
    "microbatches": has("train.microbatches"),
    "batch overlap": has("passes.communication.batch_overlap"),
    "sgd": has("optim.name", "sgd"),
    "adamw": has("optim.name", "adamw"),
    "muon": has("optim.name", "muon"),
    "groups": has("optim.groups"),
    "clip": has("optim.max_norm"),
    "remat full": has("passes.remat.policy", "full"),
    "remat attention": has("passes.remat.policy", "attention"),
    "remat every_n": has("passes.remat.policy", "every_n"),
    "remat offload": has("passes.remat.policy", "offload"),
    "no regather": has("passes.remat.regather"),
    "chunked loss": has("passes.chunk_loss.chunks"),
    "buckets": has("passes.communication.bucket_mib"),
    "ahead": has("passes.communication.prefetch"),
    "segments": has("passes.segment.max_nodes", 30),
    "no segments": has("passes.segment.max_nodes", None),
    "no folding": has("passes.fold_layers"),
    "small whole": has("passes.shard.min_shard_elements"),
    "no sequence parallelism": has("passes.shard.sequence_parallel"),
    "fp32 parameters": has("passes.cast.param_dtype"),
    "fp32 reductions": has("passes.cast.reduce_dtype"),
    "ring": has("passes.context.method", "ring"),
    "all_gather": has("passes.context.method", "all_gather"),
    "ulysses": has("passes.context.method", "ulysses"),
    "hybrid": has("passes.context.method", "hybrid"),
    "head_tail": has("passes.context.load_balance", "head_tail"),
    "blocks": has("passes.context.load_balance", "blocks"),
    "dispatch all_gather": has("passes.moe.dispatch", "all_gather"),
    "dispatch dropless": has("passes.moe.dispatch", "dropless"),
    "dispatch bounded": has("passes.moe.dispatch", "bounded"),
    "dispatch in chunks": has("passes.moe.chunks"),
    "documents": has("documents"),
    "latent attention": has("latent"),
    "grouped heads": has("kv_heads"),
    "tied": has("tied"),
    "frozen": has("frozen"),
    "balance loss": has("balance_loss"),
    "rows without labels": has("labels", "uneven"),
    "dropout": has("dropout"),
}


def features(case: Case) -> frozenset[str]:
    """Return the case's axes, model family, non-default options and uneven sizes."""
    named_options, mesh = case.named_options, case.mesh
    names = {axis for axis in AXES if mesh.get(axis, 1) > 1} or {"one rank"}
    names |= {case.kind.family} | {name for name, asks in OPTIONS.items() if asks(named_options)}
    sizes = SMALLEST | {name: values[0] for name, values in case.kind.space.items()} | named_options
    rows = sizes["rows"] // sizes.get("train.microbatches", 1)
    tp = mesh.get("tp", 1)
    uneven = {
        "uneven rows": rows % (mesh.get("dp_replicate", 1) * mesh.get("dp_shard", 1)),
        "uneven sequence": case.kind.sequence and sizes["length"] % (mesh.get("cp", 1) * tp),
        "uneven heads": sizes.get("heads", tp) % tp or sizes.get("kv_heads", tp) % tp,
        "uneven vocabulary": sizes.get("vocab", tp) % tp,
        "uneven width": sizes.get("ffn", tp) % tp,
        "uneven experts": sizes.get("experts", 0) % mesh.get("ep", 1),
    }
    return frozenset(names | {name for name, remainder in uneven.items() if remainder})
