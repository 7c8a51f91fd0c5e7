"""The command `compiler-trainer`. Each verb is imported only when it is called."""

from __future__ import annotations

import gc
import importlib
import os
import re
import shutil
import signal
import sys
import warnings
from pathlib import Path

from compiler_trainer.cli.ends import end, record, refuse
from compiler_trainer.cli.extras import not_installed
from compiler_trainer.cli.imports import unwatched
from compiler_trainer.cli.table import VERBS, usage
from compiler_trainer.config.errors import STATED, RunError, Stopped, UserError
from compiler_trainer.elastic.engines import place_of_rank

HELP = ("-h", "--help")
WITH_RANKS = ("resume", "eval", "profile", "check-export")  # verbs that may run on several ranks
COLLECTED = 200_000  # new objects between two garbage collections: a graph has a million; Python's 700 cost a sixth
MOST_COLUMNS = 100  # of help, which is read with ease
SPINS = "10000"  # of a waiting OpenMP thread; GNU's 300,000 starve the thread that it waits for on a busy core
USUAL = warnings.formatwarning
OURS = tuple(f"{Path(__file__).parents[2] / package}{os.sep}" for package in ("compiler_trainer", "passes"))


def main() -> None:
    """Run the command line; exit with 0 when done, 2 on bad input, 1 on other errors, or as `run.exit_codes` says."""
    warnings.formatwarning = formatted
    gc.set_threshold(COLLECTED)
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # read when PyTorch is imported
    STATED.clear()
    try:
        if code := act(sys.argv[1:]):
            sys.exit(code)
    except UserError as error:
        refuse(error)
    except RunError as error:
        end(error)
    except ModuleNotFoundError as error:
        refuse(not_installed(error))
    except Stopped:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):  # schedulers may send one again, to no purpose
            signal.signal(number, signal.SIG_IGN)
        raise
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)  # Python would take more than a second to tear down the imported modules
    except Exception as error:
        record(error)
        raise


def act(arguments: list[str]) -> int | None:
    """Train, or run the verb in the first argument; return the exit code, None for 0."""
    first = arguments[0] if arguments else ""
    if first not in VERBS or first in WITH_RANKS:
        join_engine()
    if first == "--version":
        print(versions())
    elif first in HELP and len(arguments) > 1:
        from compiler_trainer.config.descriptions import explain

        columns = min(shutil.get_terminal_size().columns, MOST_COLUMNS)
        print("\n".join(explain("" if arguments[1] == "options" else " ".join(arguments[1:]), columns)))
    elif first in HELP:
        print(usage())
    elif first in VERBS:
        return importlib.import_module(f"compiler_trainer.cli.verbs.{first.replace('-', '_')}").main(arguments[1:])
    elif is_word(first):
        raise no_verb(first)
    else:
        if sys.stdout.isatty():
            print("starting", flush=True)  # the next import takes seconds
        with unwatched():
            from compiler_trainer.cli import app

        app.main()
    return None


def join_engine() -> None:
    """Make this process the rank that an engine such as SLURM started it for; print which engine it is."""
    place = place_of_rank(os.environ)
    if place is not None:
        os.environ.update(place.as_rank())
        if place.rank == 0:
            print(place, file=sys.stderr, flush=True)


def formatted(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return a warning as a line. Warnings from our packages leave out the source line, which does not help users."""
    return f"warning: {message}\n" if filename.startswith(OURS) else USUAL(message, category, filename, lineno, line)


def versions() -> str:
    """Return the installed versions."""
    from importlib.metadata import version

    return f"compiler-trainer {version('compiler-trainer')}, torch {version('torch')}"


def is_word(argument: str) -> bool:
    """Return True if an argument can be a verb: no flag, no option (with =, or ~ before it) and no job file."""
    return argument != "" and not argument.startswith(("-", "~")) and not re.search(r"=|\.ya?ml$", argument)


def no_verb(word: str) -> UserError:
    """Return the error for an unknown verb."""
    from compiler_trainer.config.compose import no_value
    from compiler_trainer.config.options import did_you_mean

    if word == "train":
        return UserError(word, "is not a verb: options or a job file alone train, as compiler-trainer job.yaml")
    near = did_you_mean(word, VERBS)
    return UserError(word, f"no such verb; {near}" if near else no_value(word))


if __name__ == "__main__":
    main()
