"""Train one configuration: load data and model, compile a step, run the loop, and write a run folder."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from torch import Tensor

from compiler_trainer import checkpoint
from compiler_trainer.checkpoint import Damaged
from compiler_trainer.checkpoint.listing import path_of
from compiler_trainer.config.device import for_running
from compiler_trainer.config.schema import Config
from compiler_trainer.config.validate import validate
from compiler_trainer.console import say
from compiler_trainer.data.datasets import Datasets, check_labels, check_vocabulary
from compiler_trainer.data.loader import Loader
from compiler_trainer.data.prompts import Rollouts
from compiler_trainer.elastic.member import Regroup, is_awaited
from compiler_trainer.models.subject import Subject, subject
from compiler_trainer.step.compile import compile_step
from compiler_trainer.step.effects import effect_lines
from compiler_trainer.step.program_cache import ProgramCache
from compiler_trainer.step.ranks import local_device, rank, start_ranks
from compiler_trainer.step.step import Step, programs_of
from compiler_trainer.training import averages, folder, trace
from compiler_trainer.training.anomalies import Lost, Replicas, Rollback
from compiler_trainer.training.callbacks import Callback, Callbacks, Run, build_callbacks
from compiler_trainer.training.checkpoints import (
    checkpoints_of,
    pass_over,
    save_snapshot,
    saving,
    send_rest,
    snapshots,
    unchanged,
)
from compiler_trainer.training.evaluate import Patience, Samples, means, samples_left_out, validation_batches
from compiler_trainer.training.failures import Peers, Watch
from compiler_trainer.training.loggers import (
    Working,
    announce,
    build_loggers,
    logging,
    say_next,
)
from compiler_trainer.training.lr_schedule import rates
from compiler_trainer.training.metrics import Record
from compiler_trainer.training.owner import Owners, owning
from compiler_trainer.training.preflight import data_names, describe, notes
from compiler_trainer.training.prepare import (
    Phases,
    Start,
    check_capture,
    check_room,
    find_start,
    make_reproducible,
    open_streams,
    read_data,
    resolve_steps,
    same_on_all_ranks,
)
from compiler_trainer.training.reference import refer
from compiler_trainer.training.rollouts import Answers
from compiler_trainer.training.speed import machine, sent_bytes
from compiler_trainer.training.status import Status
from compiler_trainer.training.steps import Meters, Steps, is_due
from compiler_trainer.training.stop import Stop, end_early, ending_at_signals
from passes.torch_private import dump_allocations, record_allocations


def train(
    cfg: Config,
    remark: Callable[[Config, Subject], str] = lambda cfg, trained: "",
    callbacks: Sequence[Callback] = (),
) -> float:
    """Train `cfg` on the ranks that torchrun started; return the last validation loss, or without one the last loss.

    `remark` returns a note on the job, which is printed before compilation. `callbacks` run after those of `cfg`. The
    process group stays open.

    Raises UserError on bad input, with nothing written, and SystemExit if a signal or `run.time_limit` ended the run.
    """
    start_time, phases = time.monotonic(), Phases()
    phases.end("import")
    ranks = start_ranks()  # selects each rank's GPU
    phases.end("ranks")
    cfg = validate(for_running(cfg), ranks)
    make_reproducible(cfg.train)
    announce(f"reading {data_names(cfg.data)}")
    datasets = read_data(cfg)
    cfg = resolve_steps(cfg, datasets, ranks)
    patience = [] if cfg.eval.patience is None else [Patience(cfg.eval.patience)]
    status = Status(cfg)
    callbacks, loggers = [*build_callbacks(cfg), *patience, *callbacks], [*build_loggers(cfg), status]
    rates(cfg)(1)
    phases.end("data")
    trained = subject(cfg)
    check_vocabulary(datasets, trained.vocab_size)
    samples: list[Callback] = [Samples(cfg, trained, loggers)] if cfg.eval.prompts else []
    if isinstance(datasets.train, Rollouts):
        samples.append(Answers(cfg, trained, datasets.train))
    if cfg.eval.interval is not None:
        check_labels(datasets)
    left_out = samples_left_out(cfg, datasets.eval) if datasets.eval and cfg.eval.interval is not None else ""
    check_room(cfg, trained)
    cfg = same_on_all_ranks(cfg, datasets)
    with owning(cfg) as owners, Peers(cfg.run.elastic), status:
        start = find_start(cfg, datasets)
        if start.ckpt is not None and start.step >= cfg.train.steps:
            save_snapshot(cfg)
            return report_finished(cfg, start)
        open_streams(datasets)
        trace.check(cfg, start.step)
        checked = check_capture(cfg, trained, lambda: peek(datasets.train))
        for note in (*notes(cfg, trained), remark(cfg, trained), checked, left_out):
            if note:
                announce(note)
        phases.end("model")
        step, start = prepare_step(cfg, trained, datasets, start, owners, phases, status)
        if start.ckpt is not None:
            announce(f"resuming after step {start.step:,}, from {start.ckpt.path}")
        with (
            Watch(cfg.run.timeout_s, Path(cfg.run.dir)) as watch,
            Stop(cfg.run, start_time) as stop,
            allocations(cfg),
            logging(cfg, start.step, loggers, ("reward", *step.metrics)) as log_record,
        ):
            active_callbacks = Callbacks(Run(cfg, step, start.step, stop.ask), [*samples, *callbacks])
            active_callbacks.start()
            for record in run(cfg, trained, step, datasets, start, stop, active_callbacks):
                owners.check()
                log_record(record)
                watch.step = int(record["step"])
            active_callbacks.stop()
    if stop.is_wish:
        reason = stop.callback_reason or "a callback on another rank requested it"
        announce(f"ended after step {int(record['step']):,} of {cfg.train.steps:,}: {reason}")
    elif record["step"] < cfg.train.steps:
        end_early(cfg, stop, int(record["step"]))
    if cfg.checkpoint.saves:
        say_next(cfg)
    return record.get("eval_loss", record.get("loss", math.nan))


def report_finished(cfg: Config, start: Start) -> float:
    """Report that a run already has all its steps, and return the last validation loss, or NaN if there is none.

    This is not an error, because a scheduler may start a finished run again.
    """
    assert start.ckpt is not None
    text = f"{cfg.run.dir} has all {cfg.train.steps:,} steps (train.steps), as of {start.ckpt.path}"
    announce(f"{text}; nothing to do")
    send_rest(cfg)
    eval_loss = start.ckpt.index.eval_loss
    return math.nan if eval_loss is None else eval_loss


def prepare_step(
    cfg: Config, trained: Subject, datasets: Datasets, start: Start, owners: Owners, phases: Phases, status: Status
) -> tuple[Step, Start]:
    """Compile the step and load its state; return it with the start that was used in the end.

    Rank 0 also creates the run folder, once nothing can be refused any more.
    """
    store_reference = refer(cfg, datasets)
    phases.end("reference")
    if rank() != 0:
        step = build_step(cfg, trained, datasets, None, lambda task: None)
        return step, restore(cfg, trained, step, datasets, start)
    say(datasets.describe((cfg.train.steps - start.step) * datasets.train.batch_size))
    for line in describe(cfg, trained, peek(datasets.train)):
        say(line)
    say(f"compiling ({cfg.lower.backend})")
    with folder.graphs_of(cfg) as dumps, ending_at_signals(cfg.run), Working() as tell:
        status.begin("compiling")
        step = build_step(cfg, trained, datasets, dumps, tell)
        phases.end_compiling(step.report["seconds"])
        start = restore(cfg, trained, step, datasets, start)
    phases.end("checkpoint")
    report = {"machine": machine(), "data": datasets.report(), **phases.report(), **step.report}
    report["sent_bytes"] = sent_bytes(step)
    owners.restore = partial(folder.create, cfg, report, step.schedule)
    owners.restore()
    store_reference()
    for path in start.damaged_paths:
        checkpoint.set_aside(path, "damaged")
    if cfg.lower.programs is not None:
        say(f"program {step.report['program']['stored_as'][:12]}, compiled ahead, was loaded from {cfg.lower.programs}")
    for line in effect_lines(step.report):
        say(line)
    for line in step.report["remarks"]:
        say(f"note: {line}")
    for line in step.report.get("cudagraphs", ()):
        say(f"CUDA graphs: {line}")
    say(f"{'restarted' if 'program' in step.report['seconds'] else 'started'} in {phases}")
    say(f"the run folder is {cfg.run.dir}")
    return step, start


def restore(cfg: Config, trained: Subject, step: Step, datasets: Datasets, start: Start) -> Start:
    """Load the checkpoint that a run starts from; if it is damaged, fall back to the newest undamaged one before it."""
    while start.ckpt is not None:
        try:
            averages.load(step, start.ckpt, unchanged(trained, programs_of(step.train).values()))
            return start
        except Damaged as damage:
            start = find_start(cfg, datasets, pass_over(cfg, start.ckpt.path, damage, start.damaged_paths))
    return start


def build_step(
    cfg: Config, trained: Subject, datasets: Datasets, observe: folder.Dumps | None, tell: Callable[[str], None]
) -> Step:
    """Compile the step and set its initial weights; `observe` is called with the graph after each pass."""
    step = compile_step(
        trained.module,
        trained.loss,
        peek(datasets.train),
        mesh=cfg.mesh,
        optim=cfg.optim,
        passes=cfg.passes,
        lower=cfg.lower,
        microbatches=cfg.train.microbatches,
        seed=cfg.train.seed,
        skip_nonfinite=cfg.train.nonfinite == "skip",
        initial=trained.initial(),
        device=local_device(),
        evaluate=cfg.eval.interval is not None,
        below=datasets.below,
        observe=observe,
        cache=ProgramCache.of(cfg.lower, observe.folder if observe else None),
        cluster=cfg.cluster,
        tell=tell,
    )
    if cfg.train.ema is not None:
        averages.add(step, (name for name, p in trained.module.named_parameters() if p.requires_grad))
    datasets.read_only(step.samples_read(step.ranks).numpy())
    return step


def run(
    cfg: Config, trained: Subject, step: Step, datasets: Datasets, start: Start, stop: Stop, callbacks: Callbacks
) -> Iterator[Record]:
    """Train from `start` to `train.steps`, or until the run should stop, and yield the record of each step.

    A record is yielded before its checkpoint is saved. An interruption between the two leaves one record too many,
    which resuming drops, and never one too few.
    """
    if start.step == 0 and trained.has_weights and datasets.eval is not None and cfg.eval.interval is not None:
        metrics, _ = means(step, validation_batches(datasets.eval, cfg.eval.batches, not cfg.has_own_loss))
        announce(f"eval loss {metrics['loss']:.3f} before the first step")
    rollback, replicas = Rollback(cfg, trained, step, start), Replicas(cfg, step)
    intervals = [cfg.checkpoint.interval, cfg.eval.interval, cfg.train.replica_check.interval]
    intervals += [cfg.run.snapshot_interval] if cfg.run.elastic else []

    def looks(number: int) -> bool:
        return callbacks.look_at_steps or any(is_due(number, interval, cfg.train.steps) for interval in intervals)

    steps = Steps(cfg, step, datasets, Meters(cfg, trained, step), looks)
    with saving(cfg, trained, step) as save, snapshots(cfg, trained, step) as snapshot:
        while True:
            try:
                for record in steps.records(start):
                    yield record
                    callbacks.step(record)
                    if callbacks.callbacks and callbacks.pending_path and not stop.maximum(save.is_writing):
                        callbacks.end_checkpoint(save.wait())
                    number = int(record["step"])
                    is_stopping = stop.is_last_step() and number % cfg.steps_per_rollout == 0
                    is_last = is_stopping or number == cfg.train.steps
                    if is_last and steps.launched:
                        steps.stay()  # end after the step that is already launched
                        continue
                    is_well = "skipped" not in record  # a bad state must not replace a good checkpoint
                    is_saving = is_last or is_well and is_due(number, cfg.checkpoint.interval, cfg.train.steps)
                    is_copied = is_well and cfg.run.elastic and number % cfg.run.snapshot_interval == 0
                    if is_saving or is_copied or is_due(number, cfg.train.replica_check.interval, cfg.train.steps):
                        replicas.check(number)
                    if is_saving and cfg.checkpoint.saves:
                        callbacks.end_checkpoint(save.wait())
                        save(record, datasets.train)
                        callbacks.begin_checkpoint(path_of(checkpoints_of(cfg), number))
                    if is_last:
                        return
                    if is_copied:
                        snapshot(record, datasets.train)
                        if stop.maximum(is_awaited()):
                            snapshot.wait()
                            raise Regroup
            except Lost as lost:
                callbacks.end_checkpoint(save.wait())
                start = rollback.recover(lost)


def peek(loader: Loader) -> dict[str, Tensor]:
    """Return the next global batch without consuming it."""
    state = loader.state_dict()
    batch = loader.next()
    loader.load_state_dict(state)
    return batch


@contextmanager
def allocations(cfg: Config) -> Iterator[None]:
    """Record the GPU allocator's history if `run.memory_snapshot` is set, and write it to disk however the run ends."""
    if not cfg.run.memory_snapshot:
        yield
        return
    record_allocations()
    try:
        yield
    finally:
        dump_allocations(Path(cfg.run.dir, f"memory_{rank()}.pickle"))
