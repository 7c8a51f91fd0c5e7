"""Garbage collection skips the objects of imports, but not later objects."""

from __future__ import annotations

import gc
import sys

from compiler_trainer.cli.imports import unwatched


def test_nothing_is_searched_inside_and_what_was_imported_is_left_out_afterwards(monkeypatch):
    try:
        gc.unfreeze()
        with unwatched():
            assert not gc.isenabled()
            monkeypatch.setitem(sys.modules, "just_imported", sys)
        assert gc.isenabled() and (frozen := gc.get_freeze_count()) > 0
        more = [[] for _ in range(1000)]
        with unwatched():
            pass
        assert gc.get_freeze_count() <= frozen and len(more) == 1000
    finally:
        gc.unfreeze()
