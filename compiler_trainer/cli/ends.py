"""How the command ends: one line on stderr, on rank 0, and an exit code."""

from __future__ import annotations

import os
import sys
import time
from typing import NoReturn

from compiler_trainer.config.errors import RunError, UserError

RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
GRACE_S = 5.0


def refuse(error: UserError) -> NoReturn:
    """Say what is wrong with the input, on rank 0 unless only another rank knows, and exit with 2."""
    if RANK != 0:
        time.sleep(GRACE_S)  # if rank 0 says the same, torchrun ends this rank meanwhile
    print(f"error: {' '.join(str(error).splitlines())}", file=sys.stderr)  # names of files may have several
    sys.exit(2)


def end(error: RunError) -> NoReturn:
    """Say on rank 0 in one line why a run ends, and exit with 1."""
    if RANK == 0:
        print(f"error: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(GRACE_S)
    sys.exit(1)
