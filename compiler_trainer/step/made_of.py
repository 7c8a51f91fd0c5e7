"""What a program is made of, as text: the model as it is, its code, options, versions, and the state of PyTorch.

A program is stored under the digest of this text. It rather says too much: a change of what does not matter costs a
compilation, a change that is missed would train another program than was asked for. What has no text raises Unkeyed.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import platform
import sys
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from compiler_trainer.config.schema import OptimConfig, PassesConfig
from compiler_trainer.config.targets import called, import_rules
from compiler_trainer.step.sources import OURS, Sources, Unkeyed, is_installed, is_ours, is_torch, ours, top
from passes.program.mesh import Mesh
from passes.program.saved import bytes_of
from passes.program.torch_private import OpOverload, OpOverloadPacket

PLAIN = (type(None), bool, int, float, complex, str, bytes)
NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format, range)
SEQUENCES = (list, tuple, torch.Size)
MAPPINGS = (dict, OrderedDict, defaultdict, types.MappingProxyType)
TENSORS = (Tensor, nn.Parameter, nn.Buffer)
LARGEST_GLOBAL = 1000  # entries


@dataclass(frozen=True)
class Rule:
    """What `add_rule` was given for an operator."""

    given: Any


OF_PROCESS = "_original_object_hash"  # of transformers' GenerationConfig: hashes of texts differ by process


@dataclass
class Text:
    """What was written down so far, and the code that it came from."""

    sources: Sources = field(default_factory=Sources)
    lines: list[str] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)  # of objects by identity: what is shared is written once
    held: list[Any] = field(default_factory=list)  # keeps them alive, or another might get the identity
    code: dict[str, str] = field(default_factory=dict)  # classes by name

    def of(self, value: Any) -> str:
        """One value; raises Unkeyed naming its type."""
        if type(value) in PLAIN or type(value) in NAMED:
            return repr(value)
        if isinstance(value, Enum):
            return f"{self.of_class(type(value))}.{value.name}"
        if isinstance(value, type):
            return self.of_class(value)
        if isinstance(value, OpOverload | OpOverloadPacket):
            return str(value)
        if id(value) in self.numbers:
            return f"#{self.numbers[id(value)]}"
        self.numbers[id(value)] = len(self.numbers)
        self.held.append(value)
        return self.of_new(value)

    def of_new(self, value: Any) -> str:
        """A value that was not met before."""
        kind = type(value)
        if kind in SEQUENCES:
            return f"{kind.__name__}[{', '.join(map(self.of, value))}]"
        if kind in (set, frozenset):
            return f"{kind.__name__}[{', '.join(sorted(map(self.of, value)))}]"
        if kind in MAPPINGS:
            return self.of_mapping(value)
        if isinstance(value, Tensor):
            return of_tensor(value)
        if isinstance(value, weakref.ref):  # as nn.GRU has of its weights
            return f"ref({self.of(value())})"
        if isinstance(value, functools.partial):
            return f"partial({self.of(value.func)}, {self.of(value.args)}, {self.of(value.keywords)})"
        if isinstance(value, types.MethodType):
            return f"{self.of(value.__self__)}.{self.of(value.__func__)}"
        if isinstance(value, types.FunctionType | types.BuiltinFunctionType):
            return self.of_function(value)
        if isinstance(value, types.ModuleType):
            return self.of_module(value)
        if isinstance(value, Rule):
            return self.of_rule(value)
        return self.of_object(value)

    def of_mapping(self, value: Mapping[Any, Any]) -> str:
        """A mapping, in its order."""
        made = self.of(value.default_factory) if isinstance(value, defaultdict) else ""
        pairs = ", ".join(f"{self.of(key)}: {self.of(each)}" for key, each in value.items())
        return f"{type(value).__name__}{made}{{{pairs}}}"

    def of_function(self, function: Any) -> str:
        """A function that is found under its name in its module; raises Unkeyed for any other."""
        module, name = function.__module__ or "", function.__qualname__
        found = sys.modules.get(module)
        for part in name.split("."):
            found = vars(found).get(part) if isinstance(found, type) else getattr(found, part, None)
        if getattr(found, "__func__", found) is not function and not is_operator(function):
            raise Unkeyed(f"{module}.{name} is a closure, a lambda, or another function than its module has")
        self.add_code(module, function)
        return f"{module}.{name}"

    def of_module(self, module: types.ModuleType) -> str:
        """A module by its file, and what it imports."""
        self.sources.add_module(module.__name__)
        return module.__name__

    def of_rule(self, rule: Rule) -> str:
        """A rule that was added: its text, or its function, which may be a lambda, with the values that it holds."""
        function = rule.given
        if not isinstance(function, types.FunctionType):
            return self.of(function)
        self.add_code(function.__module__, function)
        held = [cell.cell_contents for cell in function.__closure__ or ()]
        defaults = (function.__defaults__, function.__kwdefaults__)
        return f"{digest(chr(10).join(of_code(function.__code__)))} {self.of(held)} {self.of(defaults)}"

    def of_class(self, kind: type) -> str:
        """A class that is found under its name in its module, with its bases; raises Unkeyed for any other."""
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name in self.code:
            return name
        self.code[name] = ""
        found: Any = sys.modules.get(kind.__module__)
        for part in kind.__qualname__.split("."):
            found = getattr(found, part, None)
        if found is not kind:
            raise Unkeyed(f"{name} is not the class that its module has")
        self.code[name] = ", ".join(self.of_class(base) for base in kind.__bases__) + self.of_members(kind)
        return name

    def of_members(self, kind: type) -> str:
        """Functions and plain values of a class of one's own, as they are now: a module may change another's."""
        if top(kind.__module__) in ("torch", *sys.stdlib_module_names) and kind.__module__ != "__main__":
            return ""
        self.sources.add_module(kind.__module__)
        members = ((name, each) for name, each in sorted(vars(kind).items()) if callable(each) or not is_pythons(name))
        return "".join(f"\n  {name} = {self.of_member(kind, each)}" for name, each in members)

    def of_member(self, kind: type, value: Any) -> str:
        """A function of a class by its code, a plain value in full, and what else there is by its type."""
        value = getattr(value, "__func__", getattr(value, "fget", value))
        value = getattr(value, "__wrapped__", value)
        if isinstance(value, types.FunctionType):
            self.add_code(kind.__module__, value)
            return digest("\n".join(of_code(value.__code__)))
        return repr(value) if type(value) in PLAIN else type(value).__name__

    def add_code(self, module: str, function: Any) -> None:
        """The file of a function, which may be another than its module's."""
        self.sources.add_module(module)
        code = getattr(function, "__code__", None)
        if code is not None and code.co_filename.endswith(".py"):
            self.sources.add_file(f"{module}:{code.co_filename.rpartition('/')[2]}", code.co_filename)

    def of_object(self, value: Any) -> str:
        """An object by its class and its attributes; raises Unkeyed for one that holds more than these."""
        kind = self.of_class(type(value))
        if not isinstance(value, dict | list | tuple) and not is_told_by_attributes(value):
            raise Unkeyed(f"an object of {kind}")
        slots = [name for base in type(value).__mro__ for name in slots_of(base) if hasattr(value, name)]
        parts = {name: getattr(value, name) for name in slots} | getattr(value, "__dict__", {})
        parts = {name: part for name, part in parts.items() if name != OF_PROCESS}
        content: Any = list(value.items()) if isinstance(value, dict) else None
        content = list(value) if isinstance(value, list | tuple) else content
        return f"{kind}({self.of(parts)}, {self.of(content)})"

    def globals(self) -> Iterator[str]:
        """Plain values that modules of one's own hold now, whatever their text says."""
        for name in sorted(self.sources.seen):
            path = getattr(sys.modules.get(name), "__file__", None) or ""
            if path and not is_installed(path) and not is_ours(path) and not is_torch(path):
                for key, value in sorted(vars(sys.modules[name]).items()):
                    if not key.startswith("__") and is_plain(value):
                        yield f"{name}.{key} = {value!r}"


def is_plain(value: Any) -> bool:
    """Whether a value is a number or a text, or holds some of these alone."""
    if type(value) in (list, tuple):
        return len(value) < LARGEST_GLOBAL and all(map(is_plain, value))
    if type(value) is dict:
        return len(value) < LARGEST_GLOBAL and all(map(is_plain, (*value, *value.values())))
    return type(value) in PLAIN


def is_pythons(name: str) -> bool:
    """Whether a name is one of Python's own, as `__slotnames__`, which comes when an object is first pickled."""
    return name.startswith("__") and name.endswith("__")


def is_operator(function: Any) -> bool:
    """Whether a function is one of PyTorch's or of Python's own in C, known by its name."""
    if not isinstance(function, types.BuiltinFunctionType):
        return False
    return function.__self__ is None or isinstance(function.__self__, types.ModuleType | type)


def is_told_by_attributes(value: Any) -> bool:
    """Whether an object is no more than its attributes: one of a class in C may be."""
    kind = type(value)
    if kind.__reduce__ is not object.__reduce__ or kind.__reduce_ex__ is not object.__reduce_ex__:
        return False
    try:
        value.__reduce_ex__(2)
    except TypeError:
        return False
    return True


def slots_of(kind: type) -> tuple[str, ...]:
    """The attributes that a class has beside those of `__dict__`."""
    slots = vars(kind).get("__slots__", ())
    return tuple(name for name in ((slots,) if isinstance(slots, str) else slots) if not name.startswith("__"))


def of_code(code: types.CodeType) -> Iterator[str]:
    """What a function does, and the functions inside it."""
    yield f"{code.co_name} {code.co_firstlineno} {code.co_names} {code.co_varnames} {code.co_freevars}"
    yield code.co_code.hex()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from of_code(constant)
        else:
            yield repr(sorted(constant, key=repr)) if isinstance(constant, frozenset) else repr(constant)


def of_tensor(value: Tensor) -> str:
    """A tensor by its layout and, unless it is a parameter or has none, its values; raises Unkeyed for other kinds."""
    if type(value) not in TENSORS or value.layout is not torch.strided:
        raise Unkeyed(f"a tensor of {type(value).__name__}")
    layout = f"{type(value).__name__} {value.dtype} {value.device} {tuple(value.shape)} {value.stride()}"
    layout += f" {value.requires_grad}"
    if isinstance(value, nn.Parameter) or value.is_meta:
        return layout
    return f"{layout} {hashlib.sha256(bytes_of(value)).hexdigest()}"


def digest(text: str) -> str:
    """The digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


# ---- all of it ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MadeOf:
    """The parts that a program is made of, each as text, and the sources of its code."""

    parts: Mapping[str, str]
    sources: Sources

    @property
    def key(self) -> str:
        """What the program is stored under."""
        return digest(json.dumps(self.parts, sort_keys=True))


def made_of(model: nn.Module, loss_fn: Any, batch: Mapping[str, Tensor], options: Mapping[str, Any]) -> MadeOf:
    """What the programs of a model, its loss, a batch of some shapes and `options` are made of; raises Unkeyed."""
    text = Text()
    parts = {"model": text.of(model), "loss": text.of(loss_fn)}
    parts |= {name: text.of(value) for name, value in options.items()}
    parts["batch"] = repr([(name, value.dtype, tuple(value.shape), value.stride()) for name, value in batch.items()])
    parts |= {"classes": json.dumps(text.code), "globals": "\n".join(text.globals())}
    parts |= {"files": json.dumps(text.sources.files), "versions": json.dumps(text.sources.versions)}
    values = {name: value and digest(value) for name, value in text.sources.environment().items()}  # some are secret
    parts |= {"environment": json.dumps(values), "process": process(), "ours": ours()}
    return MadeOf(parts, text.sources)


def process() -> str:
    """Versions and what is switched in PyTorch."""
    switches = {
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "gradients": torch.is_grad_enabled(),
        "autocast": [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "attention": [torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()],
        "mkldnn": torch.backends.mkldnn.enabled,
    }
    release = torch.__version__.partition("+")[0]  # without the build, of CPU or CUDA, which the device tells
    versions = sys.implementation.name, sys.version.split()[0], release, torch.version.git_version
    return f"{versions} {switches} {sorted(torch.ops.loaded_libraries)}"


def name_of_device(device: torch.device) -> str:
    """A device by the name of its kind, which decides what is made for it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} {platform.machine()}"


def options_of(
    passes: PassesConfig, optim: OptimConfig, mesh: Mesh, device: str, **further: Any
) -> dict[str, Any]:
    """The options that a program is made with, for a `device` by its name; the learning rate is fed to it."""
    update = dataclasses.asdict(optim)
    del update["lr"]
    where = {"mesh": str(mesh), "device": device}
    return {"passes": dataclasses.asdict(passes), "optim": update, **plugged(passes, optim), **where, **further}


def plugged(passes: PassesConfig, optim: OptimConfig) -> dict[str, Any]:
    """What is plugged in beside options: passes, an optimizer, and rules, with the modules that add them."""
    own = [called(each, f"passes.extra[{number}]") for number, each in enumerate(passes.extra)]
    optimizer = called({"_target_": optim._target_, **optim.arguments}, "optim") if optim._target_ else None
    return {"extra": own, "optimizer": optimizer, "modules": import_rules(passes.rules), "rules": added_rules()}


def added_rules() -> dict[str, Rule]:
    """The rules that others than our own modules added; none where nothing imported the table of rules."""
    added: Mapping[str, Any] = getattr(sys.modules.get("passes.rules"), "ADDED", {})
    others = {name: rule for name, rule in added.items() if top(getattr(rule, "__module__", "")) not in OURS}
    return {name: Rule(rule) for name, rule in sorted(others.items())}
