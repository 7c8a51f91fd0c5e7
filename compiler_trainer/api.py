"""The trainer from Python: model, loss, data and options as arguments; the loop is that of the command line."""

from __future__ import annotations

import atexit
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.utils import get_object
from torch import Tensor, nn

from compiler_trainer.cli.outcome import on_ranks
from compiler_trainer.config import short_names
from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.jobs import as_override, choice_of
from compiler_trainer.config.options import Own
from compiler_trainer.config.schema import Config
from compiler_trainer.config.targets import GIVEN, handed
from compiler_trainer.models.loss import LossFn
from compiler_trainer.step.ranks import stop_ranks
from compiler_trainer.training.callbacks import Callback, Run
from compiler_trainer.training.loggers import Logger

Options = Mapping[str, Any] | str
APART = ("optim", "lr_schedule", "data")  # groups whose `_target_` takes its arguments from the option `arguments`
LISTS = ("callbacks", "loggers", "extra")  # options that list targets


class Trainer:
    """Trains a model as the command line does with the same options: see docs/guides/your-loop.md.

    Under torchrun every rank creates the same trainer. Each `_target_` in a group may be the object itself.

    Args:
        model: a plain module with its initial weights, the name of a preset, or the options of `model=...`.
        loss: a function of (model, batch) that returns a 0-d tensor, or one and a dict of metrics. By default the
            cross-entropy of the next tokens.
        data: a dataset whose samples are dicts of tensors, or the options of `data=...`.
        callbacks: objects that the run calls, or mappings with a `_target_` and its arguments.
        loggers: objects that get the metrics of rank 0, or mappings with a `_target_` and its arguments.
        rewards: functions of (records, answers) to numbers, or their dotted names; for the loss `grpo`.
        options: groups of options, each a mapping or the name of a preset: `optim={"name": "muon", "lr": 1e-3}`,
            `recipe="pretrain"`.

    Raises:
        UserError: an option is unknown or has a bad value.
    """

    def __init__(
        self,
        model: nn.Module | Options | None = None,
        loss: LossFn | Options | None = None,
        data: Any = None,
        *,
        callbacks: Sequence[Callback | Own] = (),
        loggers: Sequence[Logger | Own] = (),
        rewards: Sequence[Callable[..., Any] | str] = (),
        **options: Options,
    ):
        named = Named()
        named_groups = {"model": model, "loss": loss, "data": data}
        groups = {
            name: named.group(name, value) for name, value in (named_groups | options).items() if value is not None
        }
        for group, key, values in (("train", "callbacks", callbacks), ("run", "loggers", loggers)):
            if values:
                groups[group] = {**group_of(groups, group), key: named.inside({key: values}, group)[key]}
        self.handed = named.objects
        self.cfg = dataclasses.replace(composed(groups), rewards=tuple(map(named_function, rewards)))
        self.run: Run | None = None
        self.reason = ""  # to stop

    def train(self) -> float:
        """Train to the end; return the last validation loss in nats per token, or without evaluation the last loss.

        With `run.dry` it returns the predicted milliseconds of a step.

        Raises:
            UserError: the input is bad; nothing is written.
            SystemExit: a signal or `run.time_limit` ended training.
        """
        self.run = None
        stop_ranks()  # of an earlier call, with the connections of its groups
        with handed(self.handed):
            result = on_ranks(self.cfg, [Keeps(self)])
        self.reason = ""
        atexit.unregister(stop_ranks)
        atexit.register(stop_ranks)
        return result

    def stop(self, reason: str = "Trainer.stop() was called") -> None:
        """End training after the current step, or the first one, with a checkpoint; any thread may call this.

        Args:
            reason: the text that the run prints and logs.
        """
        self.reason = reason
        if self.run is not None:
            self.run.stop(reason)

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.run.cfg.run.dir if self.run else self.cfg.run.dir)

    def state_dict(self) -> dict[str, Tensor]:
        """Return trained parameters and buffers in full, by the model's names; every rank calls it after `train`.

        Raises:
            RuntimeError: `train` has not been called.
        """
        if self.run is None:
            raise RuntimeError("there is no trained state: call train() first")
        return self.run.state_dict()


class Keeps(Callback):
    """A callback that gives a trainer its run."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer

    def on_start(self, run: Run) -> None:
        self.trainer.run = run
        if self.trainer.reason:
            run.stop(self.trainer.reason)


@dataclass
class Named:
    """Options with names in place of objects: a class or function has its own name, another object a generated one."""

    objects: dict[str, Any] = field(default_factory=dict)

    def group(self, name: str, value: Any) -> Options:
        """Return a group of options; an object in its place becomes the group's `_target_`."""
        if isinstance(value, str):
            return value
        return self.inside(value if isinstance(value, Mapping) else {"_target_": value}, name)

    def inside(self, options: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return a mapping of options with names for all objects in it."""
        named: dict[str, Any] = {}
        for key, value in options.items():
            if key == "_target_" and not isinstance(value, str):
                target, arguments = self.target(value, where)
                named["_target_"] = target
                is_apart = arguments and where.partition(".")[0] in APART
                named |= {"arguments": arguments} if is_apart else arguments
            elif isinstance(value, Mapping):
                named[key] = self.inside(value, f"{where}.{key}")
            elif isinstance(value, list | tuple):
                holds_objects = [key in LISTS or isinstance(item, Mapping) for item in value]
                named[key] = [
                    self.group(f"{where}.{key}[{i}]", item) if holds_object else item
                    for i, (item, holds_object) in enumerate(zip(value, holds_objects))
                ]
            else:
                named[key] = value
        return named

    def target(self, target: Any, where: str) -> tuple[str, Own]:
        """Return the dotted name of a target, and the arguments that it needs in addition to the given ones."""
        name = f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', '')}"
        if is_called(target, name):
            return name, {}
        if isinstance(target, type):
            raise UserError(where, f"{name} is not found by that name; define the class at the top of its module")
        type_name = name if callable(target) and hasattr(target, "__qualname__") else type(target).__qualname__
        self.objects[key := f"{where}: {type_name}"] = target
        return GIVEN, {"what": key}


def is_called(target: Any, name: str) -> bool:
    """Return True if a dotted name finds this class or function."""
    if not (isinstance(target, type) or isinstance(target, Callable) and hasattr(target, "__qualname__")):  # type: ignore
        return False
    try:
        return get_object(name) is target
    except (ImportError, ValueError):
        return False


def named_function(reward: Callable[..., Any] | str) -> str:
    """Return the dotted name of a function; raise UserError if no module has it under its name."""
    if isinstance(reward, str):
        return reward
    name = f"{reward.__module__}.{reward.__qualname__}"
    if not is_called(reward, name):
        raise UserError("rewards", f"{name} is not found by that name; define the function at the top of its module")
    return name


def group_of(groups: Mapping[str, Options], name: str) -> Mapping[str, Any]:
    """Return the options of a group; raise UserError if the group is a name, not a mapping."""
    options = groups.get(name, {})
    if isinstance(options, str):
        raise UserError(name, f"{options!r} is not a group of options; give a mapping")
    return options


def composed(groups: Mapping[str, Options]) -> Config:
    """Return the configuration of the default job with some groups of options; raise UserError on bad ones."""
    short, plain = short_names.taken_out(groups)
    names = {name: value for name, value in plain.items() if isinstance(value, str)}
    options = {name: value for name, value in plain.items() if name not in names}
    chosen = names | {name: choice for name, value in options.items() if (choice := choice_of(name, value))}
    return to_config(compose([*(f"{name}={as_override(choice)}" for name, choice in chosen.items()), *short], options))
