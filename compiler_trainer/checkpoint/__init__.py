"""Checkpoints that any mesh can read, in which no damage goes unnoticed, and whose content is never executed.

    checkpoints/step_00000010/  index.json  rank_00000.safetensors  rank_00001.safetensors

A tensor is stored as the rectangles that ranks own, cut into pieces of at most 16 MiB; a rank of another mesh reads the
pieces that overlap its own rectangles. The header of each file has the SHA-256 of its pieces, the index that of each
header, and the index begins with its own: no byte can change unnoticed. A checkpoint gets its name only once all of it
is on disk; until then it is `*.tmp`.

This is not the format of `torch.distributed.checkpoint`, whose index is a pickle. Its ranks also exchange a plan, which
is not needed here: each rank derives from the placements what all ranks hold of a tensor.
"""

from compiler_trainer.checkpoint.index import Damaged, TrainState
from compiler_trainer.checkpoint.listing import aside, complete, number_of, set_aside
from compiler_trainer.checkpoint.load import (
    load,
    load_averaged,
    load_model,
    on_all_ranks,
    opened,
    read_averaged,
    read_model,
)
from compiler_trainer.checkpoint.opened import Checkpoint, check_format
from compiler_trainer.checkpoint.remote import RemoteCheckpoints, bring_newest
from compiler_trainer.checkpoint.save import SaveError, Saver
from compiler_trainer.checkpoint.sender import Sender
from compiler_trainer.checkpoint.spread import bring_to_run, link_to_run
from compiler_trainer.checkpoint.spread import opened as opened_on_machines
from compiler_trainer.checkpoint.verify import check, check_all

__all__ = [
    "Checkpoint", "Damaged", "RemoteCheckpoints", "SaveError", "Saver", "Sender", "TrainState", "aside", "bring_newest",
    "bring_to_run", "link_to_run",
    "check", "check_all", "check_format", "complete", "load", "load_averaged", "load_model", "number_of",
    "on_all_ranks", "opened", "opened_on_machines", "read_averaged", "read_model", "set_aside",
]  # fmt: skip
