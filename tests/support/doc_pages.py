"""The commands that README and docs/ show, parsed and classified."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from compiler_trainer.config.jobs import is_job_file

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(p for p in (ROOT / "docs").rglob("*.md") if p.name != "LOG.md")])

TRAIN = ("compiler-trainer", "-m compiler_trainer")
STARTS = ("compiler-trainer", "torchrun", "python -m", "pip install", "make ", ".venv/bin/")
OTHERS = {  # commands of others: first word -> the reason not to check the line
    "git": "git clone", "cd": "", "source": ".venv/bin/activate", "hf": "hf download", "vllm": "vllm serve", "llama-cli": "llama-cli -m",
    "tensorboard": "", "lm_eval": "lm_eval --model hf", "apt-get": "", "docker": "docker build", "tlparse": "", "head=$(scontrol": "SLURM",
}
SHELL_FENCES = ("sh", "bash")
FIXED = {  # variables of shell scripts and synopses
    "$SLURM_NNODES": "8", "$SLURM_JOB_ID": "1", "$head:29500": "node0:29500", "N": "2", "/shared/": "shared/",
}


@dataclass(frozen=True)
class Command:
    """One command of a page: its words without prompt, comment, leading `VAR=value`, and line breaks."""

    page: str
    line: int
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {shlex.join(self.words)}"

    @property
    def kind(self) -> str:
        """The kind of command: job, sweep, plan, verb, help, tool, pip, make, pytest or other; raises ValueError."""
        first, rest = self.words[0], self.words[1:]
        if first == "torchrun" and "compiler_trainer" not in self.words:
            return "other"
        if first == "torchrun" or self.words[:3] == ("python", "-m", "compiler_trainer"):
            first, rest = "compiler-trainer", self.arguments
        if first == "compiler-trainer":
            if rest[:1] == ("launch",):
                return "job"
            if any(word.startswith(("[", "OPTION", "VERB")) for word in rest):
                return "synopsis"
            if not rest or "=" in rest[0] or is_job_file(rest[0]) or rest[0] in ("-m", "--config-dir", "--cfg"):
                return "sweep" if "-m" in rest else "job"
            return rest[0] if rest[0] in ("plan", "--help", "--version") else "verb"
        if self.words[:2] == ("python", "-m"):
            return "tool"
        if first.endswith("pytest"):
            return "pytest"
        if first in ("pip", "make"):
            return first
        if first in OTHERS:
            return "other"
        raise ValueError(f"{self}: no test knows what this is")

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments of the trainer, without torchrun and its options."""
        if "compiler_trainer" in self.words:
            return self.words[self.words.index("compiler_trainer") + 1 :]
        return self.words[1:]

    @property
    def options(self) -> list[str]:
        """The overrides and the job file."""
        flagged = {"--config-dir", "--vary", "--cfg"}
        pairs = zip(("", *self.arguments), self.arguments)
        are = [before not in flagged and not word.startswith("--") for before, word in pairs]
        return [word for word, is_one in zip(self.arguments, are) if is_one and ("=" in word or is_job_file(word))]

    def flag(self, name: str) -> str | None:
        """Return the word after a flag; None without it."""
        return self.words[self.words.index(name) + 1] if name in self.words else None

    @property
    def ranks(self) -> int:
        """The number of processes that the command starts."""
        tasks = [int(o.partition("=")[2]) for o in self.options if o.startswith("hydra.launcher.tasks_per_node=")]
        return int(self.flag("--nproc-per-node") or self.flag("-n") or 1) * int(self.flag("--nnodes") or 1) * (tasks or [1])[0]


def commands() -> list[Command]:
    """Return every command of every page."""
    return [command for page in PAGES for command in commands_of(page.read_text(), str(page.relative_to(ROOT)))]


def commands_of(text: str, page: str) -> Iterator[Command]:
    """Yield the commands of one page, in code blocks and in the text."""
    for line, code, is_shell in code_lines(text):
        if is_shell or code.startswith(STARTS):
            yield from parsed(page, line, code)
    for number, code in spans(text):
        if code.startswith(("compiler-trainer ", "torchrun -", "python -m ", "pip install ", "make ")):
            yield from parsed(page, number, code)


def code_lines(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yield lines of code blocks, continued ones joined: number, text, and True if all of these are commands."""
    fence, joined, began = None, "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            fence = line[3:].strip() or "text" if fence is None else None
            continue
        if fence is None and not line.startswith("    "):
            continue
        code = line.strip()
        is_shell = fence in SHELL_FENCES
        if fence == "console":
            is_shell = code.startswith("$ ") or joined != ""  # a continued line has no prompt
            code = code.removeprefix("$ ") if is_shell else ""
        elif fence not in (None, *SHELL_FENCES):
            continue
        began = began or number
        if code.endswith("\\"):
            joined += code[:-1]
            continue
        whole = (joined + code).strip()
        if whole and not whole.startswith("#"):
            yield began, whole, is_shell
        joined, began = "", 0


def spans(text: str) -> Iterator[tuple[int, str]]:
    """Yield texts between backticks outside of blocks, with their line numbers."""
    inside, kept = False, []
    for line in text.splitlines():
        inside ^= line.startswith("```")
        kept.append("" if inside or line.startswith(("```", "    ")) else line)
    whole = "\n".join(kept)
    for found in re.finditer(r"`([^`]+)`", whole):
        yield whole[: found.start()].count("\n") + 1, " ".join(found[1].split())


def parsed(page: str, line: int, code: str) -> Iterator[Command]:
    """Yield the commands of a line of shell."""
    for part in re.split(r" && | &$| > .*", code):
        words = [fixed(word) for word in shlex.split(part, comments=True) if word not in ("...", "&")]
        while words and (words[0] == "srun" or re.match(r"[A-Z_]+=", words[0])):
            words.pop(0)
        if words:
            yield Command(page, line, tuple(words))


def fixed(word: str) -> str:
    """Return a word with a scheduler's variables filled in, and with folders of a cluster below the current one."""
    return FIXED.get(word, word).replace("/shared/", FIXED["/shared/"])
