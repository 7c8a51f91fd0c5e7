"""Closed forms: time and memory of a setting by arithmetic alone, without a graph.

They select the settings to compile (`compiled.py`). `rank.py` has the quantities that settings share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from compiler_trainer.planning.rank import Rank
from compiler_trainer.planning.space import Candidate

# Fitted to compiled programs of Llama 3 8B: how often elementwise kernels read and write a layer's features, forward
# and backward. Without it steps are a tenth too short, and recomputation of everything but matmuls costs nothing.
ELEMENTWISE = (1.8, 3.7)
# Per entry: an update reads parameter, gradient and moments, and writes all but the gradient; each microbatch adds its
# gradient. Without the latter, plans of 70B on 64 GPUs compile pipelines of 64 microbatches first, 25 % slower.
UPDATE_BYTES, ACCUMULATE_BYTES = 36, 24
# Fitted too: bytes kept without recomputation, relative to the outputs of matmuls. Without it, settings that do not fit
# are compiled first.
ALL_KEPT = 2.52
NEAREST = {"every_n": "full", "budget": "full", "offload": "full"}
RINGS, EXCHANGES = ("ring", "hybrid"), ("ulysses", "hybrid")
GATHERED_AHEAD = 3  # layers whose parameters are gathered when the backward begins


@dataclass(frozen=True)
class Estimate:
    """The cost of a setting: seconds of a step, computing and waiting by axis, and bytes at the peak by kind.

    Compiled settings also have the bytes that a rank sends, by axis and link, and the place of the peak; closed forms
    have a lower bound of the bytes of any program.
    """

    candidate: Candidate
    compute_s: float
    exposed_s: Mapping[str, float]
    memory: Mapping[str, float]
    step_s: float
    bytes: float
    sent: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    place: str = ""
    least_bytes: float = 0.0

    @property
    def is_compiled(self) -> bool:
        """True if the estimate comes from compiled programs."""
        return bool(self.place)


def estimates(rank: Rank, candidates: list[Candidate]) -> Iterator[Estimate]:
    """Yield the estimates of settings of the same rank, which differ in recomputation and method of attention."""
    for candidate in candidates:
        compute, exposed, memory = *seconds(rank, candidate), peak_bytes(rank, candidate)
        waits = {axis: s for axis, s in exposed.items() if s > 0}
        step = compute + sum(waits.values())
        least = least_bytes(rank, candidate)
        yield Estimate(candidate, compute, waits, memory, step, sum(memory.values()), least_bytes=least)


# ---- time ---------------------------------------------------------------------------------------------


def seconds(rank: Rank, candidate: Candidate) -> tuple[float, dict[str, float]]:
    """Return (seconds of a step that are computed, seconds waited for each axis)."""
    times, layers, axes = candidate.microbatches, rank.layers, rank.axes
    if axes.pp > 1:
        return piped_seconds(rank, candidate)
    forward, backward = layer_seconds(rank, candidate)
    update_bytes = UPDATE_BYTES + (ACCUMULATE_BYTES * times if times > 1 else 0)
    update_s = rank.local_entries * update_bytes / rank.memory_bytes_per_s
    gather_again_s = rank.gather_s if candidate.regather else 0.0
    waits = max(0.0, rank.gather_s - forward) + max(0.0, gather_again_s + rank.reduce_s - backward)
    along_tp = layers * (11 if candidate.collectives else 8) + 6
    hidden = min(rank.gather_s, forward) + min(gather_again_s + rank.reduce_s + rank.sum_s, backward)
    slowed = hidden * (1 / rank.cluster.beside.computing - 1)
    return times * (layers * (forward + backward + slowed) + rank.head_s) + update_s, {
        "fsdp": times * (layers * waits + rank.tables_s),
        "dp_replicate": times * (layers * max(0.0, rank.sum_s - backward) + rank.sum_tables_s),
        "tp": times * along_tp * rank.sequence_s,
        "cp": times * layers * rank.context_s[candidate.method] if axes.cp > 1 else 0.0,
        "ep": times * layers * rank.dispatch_s if axes.ep > 1 else 0.0,
    }


def piped_seconds(rank: Rank, candidate: Candidate) -> tuple[float, dict[str, float]]:
    """Return `seconds` for a rank of a pipeline: parameters are gathered and gradients reduced once, not overlapped."""
    times, layers, axes = candidate.microbatches, rank.layers, rank.axes
    computing = layers * sum(layer_seconds(rank, candidate)) + rank.head_s / axes.pp
    update_bytes = UPDATE_BYTES * rank.local_entries + ACCUMULATE_BYTES * times * rank.local_entries * rank.stored_over
    along_tp = layers * (11 if candidate.collectives else 8) + 6 / axes.pp
    waits_inside = {
        "tp": along_tp * rank.sequence_s,
        "cp": layers * rank.context_s[candidate.method] if axes.cp > 1 else 0.0,
        "ep": layers * rank.dispatch_s if axes.ep > 1 else 0.0,
    }
    bubble = (axes.pp - 1) / (candidate.chunks or 1) * (computing + sum(waits_inside.values()))
    return times * computing + update_bytes / rank.memory_bytes_per_s, {
        "fsdp": layers * (rank.gather_s + rank.reduce_s) + rank.tables_s / axes.pp,
        "dp_replicate": layers * rank.sum_s + rank.sum_tables_s / axes.pp,
        "pp": bubble,
    } | {axis: times * s for axis, s in waits_inside.items()}


def layer_seconds(rank: Rank, candidate: Candidate) -> tuple[float, float]:
    """Return the seconds that a layer computes for a microbatch, (forward, backward with recomputation)."""
    computes_masked_half = candidate.method == "all_gather" and rank.axes.cp > 1  # computes the masked half, too
    attention, backward_attention = (
        s * (2 if computes_masked_half else 1) for s in (rank.attention_s, rank.attention_backward_s)
    )
    elementwise_s = [times * rank.moved_s for times in ELEMENTWISE]
    forward = rank.matmuls_s + attention + elementwise_s[0]
    recompute_s = recompute_seconds(rank, candidate, 0.0 if candidate.method in RINGS else attention)  # rings are kept
    return forward, 2 * rank.matmuls_s + backward_attention + elementwise_s[1] + recompute_s


def recompute_seconds(rank: Rank, candidate: Candidate, attention: float) -> float:
    """Return the seconds of a layer's forward that the backward recomputes."""
    policy, elementwise_s = policy_of(rank, candidate), ELEMENTWISE[0] * rank.moved_s
    if policy == "none":
        return 0.0
    if policy == "selective":
        return elementwise_s / 2
    # the output of the last matmul is not needed
    matmuls_s = rank.matmuls_s * (1 - rank.sizes.last_matmul_entries / max(rank.sizes.active_entries, 1.0))
    return matmuls_s + elementwise_s + (0.0 if policy == "attention" else attention)


def policy_of(rank: Rank, candidate: Candidate) -> str:
    """Return the policy of recomputation, or the nearest in `space.POLICIES`."""
    policy = rank.cfg.passes.remat.policy if candidate.recompute == "as given" else candidate.recompute
    return NEAREST.get(policy, policy)


# ---- memory -------------------------------------------------------------------------------------------


def least_bytes(rank: Rank, candidate: Candidate) -> float:
    """Return a lower bound of the peak bytes of the fullest rank, whatever the passes do.

    Parameters and moments are inputs of the update; a rank holds at least its share of them, more with padding and
    unsharded parameters. All gradients are alive at once if they are clipped by their norm (it needs the last gradient
    before the first is applied) or summed over microbatches. When a forward ends, the input of each layer is still
    needed by its backward. These inputs are not counted for a pipeline, or if options state the recomputation.
    """
    sizes, axes, optim = rank.sizes, rank.axes, rank.cfg.optim
    share = 1 / (axes.pp * axes.tp * rank.stored_over)
    state = share * (sizes.stored_bytes + sizes.trained_entries * rank.moment_bytes)
    gradients = share * sizes.trained_entries * min(rank.compute_bytes, rank.reduce_bytes, rank.master_bytes)
    summed = gradients if candidate.microbatches > 1 else 0.0
    inputs = (sizes.layers - 1) * rank.tokens / axes.tp * sizes.dim * rank.compute_bytes
    is_counted = axes.pp == 1 and candidate.recompute != "as given" and sizes.heads.queries > 0
    return state + max(gradients if optim.max_norm is not None else 0.0, summed + inputs * is_counted)


def peak_bytes(rank: Rank, candidate: Candidate) -> dict[str, float]:
    """Return the bytes of a rank at the peak, by kind.

    The peak is at the end of the forward, in the backward of the head, at the end of the backward, or in the update.
    """
    if rank.axes.pp > 1:
        return piped_bytes(rank, candidate)
    sizes, layer, is_stored = rank.sizes, rank.layer_entries, rank.stored_over > 1
    gradients = {"gradients": rank.master_bytes * rank.local_entries}
    table = max(sizes.head_entries, sizes.embedding_entries) / rank.axes.tp
    weights = table * rank.compute_bytes if is_stored else 0.0
    if is_stored and not candidate.regather:
        weights += sizes.layers * layer * rank.compute_bytes
    stored = {**rank.state, **(gradients if candidate.microbatches > 1 else {})}
    layers = sizes.layers * kept_bytes(rank, candidate, policy_of(rank, candidate))
    forward = stored | {"activations": layers + rank.logits, "gathered weights": weights}
    gathered_ahead = weights + (
        GATHERED_AHEAD * layer * rank.compute_bytes if is_stored and candidate.regather else 0.0
    )
    head_backward = stored | {
        "activations": layers + rank.logits_later,
        "gathered weights": gathered_ahead,
        "head": 4 * table,
    }
    communication = 2 * layer * (rank.compute_bytes + rank.reduce_bytes) if is_stored else 0.0
    communication += table * rank.reduce_bytes
    end = {**rank.state, **gradients}
    backward = end | {"communication": communication, "activations": kept_bytes(rank, candidate, "none")}
    update = end | {"update": 6 * rank.master_bytes * table / rank.stored_over}
    return max((forward, head_backward, backward, update), key=lambda at: sum(at.values()))


def piped_bytes(rank: Rank, candidate: Candidate) -> dict[str, float]:
    """Return `peak_bytes` for the first rank of a pipeline, which keeps most microbatches, all unsharded."""
    pp, chunks = rank.axes.pp, candidate.chunks or 1
    entries = rank.layers * rank.layer_entries + rank.sizes.embedding_entries / rank.axes.tp
    forwards_kept = min(candidate.microbatches * chunks, (chunks - 1) * pp + 2 * pp - 1 if chunks > 1 else pp)
    layers = rank.layers * kept_bytes(rank, candidate, policy_of(rank, candidate))
    return {
        **rank.state,
        "gradients": rank.master_bytes * entries,
        "gathered weights": rank.compute_bytes * entries if rank.stored_over > 1 else 0.0,
        "activations": forwards_kept / chunks * layers + kept_bytes(rank, candidate, "none"),
    }


def kept_bytes(rank: Rank, candidate: Candidate, policy: str) -> float:
    """Return the bytes that a layer keeps of a microbatch for its backward."""
    sizes, heads, entry_bytes, tp = rank.sizes, rank.sizes.heads, rank.compute_bytes, rank.axes.tp
    tokens = rank.tokens / tp
    input_bytes, matmul_bytes = tokens * sizes.dim * entry_bytes, tokens * sizes.output_features * entry_bytes
    attention_bytes = tokens * heads.queries * (heads.value_dim * entry_bytes + 4)
    gathered_bytes = 2 * rank.tokens * sizes.dim * entry_bytes if tp > 1 and not candidate.collectives else 0.0
    if candidate.method == "all_gather" and rank.axes.cp > 1:
        gathered_bytes += rank.tokens * rank.axes.cp * heads.keys / tp * 2 * heads.key_dim * entry_bytes
    gathered_bytes += rank.expert_rows
    exchanged_bytes = attention_bytes if rank.axes.cp > 1 and candidate.method in EXCHANGES else 0.0
    if policy == "selective":
        return matmul_bytes + attention_bytes + exchanged_bytes + gathered_bytes
    sent_bytes = tokens * (heads.queries * heads.key_dim + heads.keys * (heads.key_dim + heads.value_dim)) * entry_bytes
    sent_bytes = sent_bytes if exchanged_bytes else 0.0  # results of communication are not recomputed
    if policy == "attention":
        return input_bytes + attention_bytes + exchanged_bytes + sent_bytes + gathered_bytes
    ring_bytes = attention_bytes if candidate.method in RINGS else 0.0
    if policy == "none":
        return ALL_KEPT * matmul_bytes + exchanged_bytes + gathered_bytes + ring_bytes
    return input_bytes * (2 if tp > 1 else 1) + exchanged_bytes + sent_bytes + gathered_bytes + ring_bytes
