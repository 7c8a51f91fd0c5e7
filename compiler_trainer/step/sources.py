"""The files that code comes from, with all that they import, and what they read beside: what a stored program is of.

A file of one's own is followed: its imports, and theirs. Of a library that is installed the version counts, and the
very files that hold what a model uses. What reads files, arguments or unnamed variables cannot be known by its text.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

OURS = ("passes", "compiler_trainer")
HOME = Path(__file__).parents[2]  # of our packages
INSTALLED = tuple(os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib"))
STANDARD = os.path.realpath(sysconfig.get_path("stdlib"))
VARIABLES = re.compile(r"(TORCH|PYTORCH|TRITON|ATEN|CUDA|CUBLAS|NVIDIA|HF|TRANSFORMERS)(_|INDUCTOR|DYNAMO)")
# whoever reads them: places that do not matter, of which PyTorch sets one itself when it compiles
OF_RANKS = frozenset({"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_VISIBLE_DEVICES"})
# Where things lie and how ranks talk: of no matter to PyTorch's programs, but to code that names one.
ELSEWHERE = re.compile(r"CUDA_(HOME|PATH|VERSION)|NVIDIA_\w+|TORCH_NCCL_\w+|HF_(HOME|TOKEN|HUB_\w+)")
NAMED = re.compile(r"""(?:environ(?:\.\w+)?|getenv)\s*[\[(]\s*["'](\w+)["']""")
UNKNOWN = re.compile(
    r"(?<![\w.])(open|exec|eval|compile|globals|__import__|input)\(|import_module\(|sys\.argv|"
    r"\b(read_text|read_bytes|fromfile|memmap|urlopen|load_file|safe_open)\(|(torch|np|numpy|pickle|json|yaml)\.load\(|"
    r"^\s*(import|from) (subprocess|socket|ctypes)\b",
    re.MULTILINE,
)


class Unkeyed(Exception):
    """What a program would be known by cannot be told."""


@dataclass
class Sources:
    """Files by the name that counts, with their digests; versions of libraries; variables of the environment."""

    files: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    variables: set[str] = field(default_factory=set)
    texts: list[str] = field(default_factory=list)  # of files of one's own
    seen: set[str] = field(default_factory=set)
    read_files: set[str] = field(default_factory=set)

    def add_module(self, name: str) -> None:
        """The file of a module, what it imports, and the packages that it lies in; raises Unkeyed."""
        if name in self.seen or top(name) in (*OURS, "torch", *sys.stdlib_module_names) and name != "__main__":
            return
        self.seen.add(name)
        path = file_of(name)
        if path is None:
            self.files[name] = "missing"
            return
        self.add_file(name, path)
        for parent in parents(name):
            self.add_module(parent)

    def add_file(self, name: str, path: str) -> None:
        """A file by a name; raises Unkeyed."""
        path = os.path.realpath(path)
        if path in self.read_files or is_known(path):
            return
        self.read_files.add(path)
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise Unkeyed(f"{name} has no file that can be read ({path})") from error
        self.files[name] = hashlib.sha256(content).hexdigest()
        if is_installed(path):
            self.versions[top(name)] = version(top(name))
        if path.endswith(".py"):
            self.read(name, path, content.decode(errors="replace"))

    def read(self, name: str, path: str, text: str) -> None:
        """What a file of Python reads: variables, and modules if it is one's own; raises Unkeyed."""
        own = not is_installed(path)
        self.variables |= variables_of(text, f"{Path(path).name}" if own else "")
        if not own:
            return
        if found := UNKNOWN.search(text):
            line = text[: found.start()].count("\n") + 1 + found[0].startswith("\n")
            where = f"{Path(path).name}:{line} has {found[0].strip()!r}"
            raise Unkeyed(f"{where}, which may read what its text does not tell")
        self.texts.append(text)
        for module in imports_of(text, name, path):
            self.add_module(module)

    def environment(self) -> dict[str, str | None]:
        """The variables that were found, and those of PyTorch and its like, with their values."""
        theirs = {name for name in os.environ if VARIABLES.match(name) and not ELSEWHERE.fullmatch(name)}
        return {name: os.environ.get(name) for name in sorted((self.variables | theirs) - OF_RANKS)}

    def defines(self, namespace: str) -> bool:
        """Whether operators of a namespace come from what is known here."""
        quoted = re.compile(rf"""["']{re.escape(namespace)}(::|["'])""")
        return namespace in self.versions or any(quoted.search(text) for text in self.texts)


def top(name: str) -> str:
    """The package that a module lies in."""
    return name.partition(".")[0]


def parents(name: str) -> Iterator[str]:
    """The packages around a module, innermost first."""
    while name := name.rpartition(".")[0]:
        yield name


def file_of(name: str) -> str | None:
    """The file of a module, imported or not; None if there is no such module."""
    module = sys.modules.get(name)
    path = getattr(module, "__file__", None)
    if path is None and name != "__main__":
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError, AttributeError):
            return None
        path = spec and spec.origin
        if path is None and spec is not None:
            return os.devnull  # a package without a file
    if path is None and module is not None:
        raise Unkeyed(f"{name} has no file")
    return path and os.path.realpath(path)


def is_known(path: str) -> bool:
    """Whether a file is of what is known as a whole: Python's own library, PyTorch, and this package."""
    return path.startswith(STANDARD + os.sep) and not is_installed(path) or is_ours(path) or is_torch(path)


def is_installed(path: str) -> bool:
    """Whether a file is of a library that is installed."""
    return path.startswith(tuple(f"{folder}{os.sep}" for folder in INSTALLED))


def is_ours(path: str) -> bool:
    """Whether a file is of this package, which is known as a whole."""
    return path.startswith(tuple(f"{os.path.realpath(HOME / name)}{os.sep}" for name in OURS))


def is_torch(path: str) -> bool:
    """Whether a file is of PyTorch, whose version counts."""
    return path.startswith(os.path.realpath(Path(torch.__file__).parent) + os.sep)


@cache
def version(package: str) -> str:
    """The version of a library; of one that has none, the digest of its files."""
    found = getattr(sys.modules.get(package), "__version__", None)
    if isinstance(found, str):
        return found
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        spec = importlib.util.find_spec(package)
        folders = list(spec.submodule_search_locations or ()) if spec else []
        return digest_of([Path(folder) for folder in folders])


@cache
def ours() -> str:
    """A digest of our own packages."""
    return digest_of([HOME / name for name in OURS])


def digest_of(folders: list[Path]) -> str:
    """A digest of all Python files in folders, and their names."""
    whole = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            whole.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes() + b"\0")
    return whole.hexdigest()


# ---- what a text reads ------------------------------------------------------------------------------


def imports_of(text: str, name: str, path: str) -> Iterator[str]:
    """The modules that a text imports anywhere, and what it takes out of them, which may be modules."""
    package = name if path.endswith("__init__.py") else name.rpartition(".")[0]
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield module
            yield from (each for alias in node.names if is_module(each := f"{module}.{alias.name}"))


def is_module(name: str) -> bool:
    """Whether there is such a module, imported or not."""
    try:
        return name in sys.modules or top(name) not in sys.stdlib_module_names and file_of(name) is not None
    except Unkeyed:
        return False


def variables_of(text: str, own: str) -> set[str]:
    """Variables of the environment that a text names; raises Unkeyed where one's `own` file names one otherwise."""
    if not own or "environ" not in text and "getenv" not in text:
        return set(NAMED.findall(text))
    tree = parsed(text)
    named = [name for node in ast.walk(tree) if (name := variable_in(node)) is not None]
    if len(named) < sum(is_environment(node) for node in ast.walk(tree)):
        raise Unkeyed(f"{own} reads the environment by names that its text does not tell")
    return set(named)


def variable_in(node: ast.AST) -> str | None:
    """The variable that an expression reads: `environ["X"]`, `environ.get("X")`, `getenv("X")`, `"X" in environ`."""
    key: ast.AST | None = None
    if isinstance(node, ast.Subscript) and is_environment(node.value):
        key = node.slice
    elif isinstance(node, ast.Call) and node.args:
        of_dict = isinstance(node.func, ast.Attribute) and is_environment(node.func.value)
        key = node.args[0] if of_dict or is_environment(node.func) else None
    elif isinstance(node, ast.Compare) and is_environment(node.comparators[0]):
        key = node.left
    return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else None


def is_environment(node: ast.AST) -> bool:
    """Whether an expression is the environment, or the function that reads it."""
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name in ("environ", "environb", "getenv", "getenvb")


@cache
def parsed(text: str) -> ast.Module:
    """The syntax of a text; raises Unkeyed."""
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise Unkeyed(f"a file cannot be parsed: {error}") from error
