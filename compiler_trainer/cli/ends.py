"""The end of a command: one line on stderr, from rank 0, and an exit code."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import NoReturn

from compiler_trainer.config.errors import RunError, UserError, with_line

GRACE_S = 5.0


def is_first() -> bool:
    """Return True if this process is rank 0 now, which in an elastic job may change."""
    return os.environ.get("RANK", "0") == "0"


def ranks() -> int:
    """Return the number of ranks that were started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def refuse(error: UserError) -> NoReturn:
    """Print a problem of the input and exit; on rank 0, unless only another rank knows the problem."""
    record(error)  # before the wait, because it may have to import PyTorch, for as long on each rank
    if not is_first():
        time.sleep(GRACE_S)  # if rank 0 prints the same error, torchrun ends this rank meanwhile
    print(f"error: {' '.join(with_line(error).splitlines())}", file=sys.stderr)  # file names may contain line breaks
    sys.exit(error.exit_code)


def end(error: RunError) -> NoReturn:
    """Print on rank 0 why a run ends, or on each rank that alone knows, and exit."""
    record(error)
    if is_first() or not error.is_of_all_ranks:
        print(f"error: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(GRACE_S)
    sys.exit(error.exit_code)


def record(error: Exception) -> None:
    """Write the error that is being handled into the file from which torchrun reports it, if there is one."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        with contextlib.suppress(OSError):  # the error itself is printed
            get_error_handler().record_exception(error)
