"""Console progress of tokenization: bytes done and their rate."""

from __future__ import annotations

import time

from rich.filesize import decimal
from rich.progress import BarColumn, TextColumn

from compiler_trainer.console import Renewed, say

LINE_EVERY_S = 10.0


class Bar(Renewed):
    """A context manager that shows the bytes done of `size_bytes`: a bar on a terminal, or lines at intervals."""

    def __init__(self, size_bytes: int, bytes_done: int = 0):
        super().__init__(BarColumn(), TextColumn("{task.description}"), transient=True)
        self.size_bytes, self.bytes_done, self.first = size_bytes, bytes_done, bytes_done
        self.task = self.bar.add_task(f"tokenizing {decimal(size_bytes)}", total=size_bytes, completed=bytes_done)

    def add(self, size_bytes: int) -> None:
        """Add `size_bytes` to the bytes done."""
        self.bytes_done += size_bytes
        self.bar.update(self.task, completed=self.bytes_done, description=self.line())
        now = time.monotonic()
        if not self.console.is_terminal and now - self.last_line >= LINE_EVERY_S:
            self.last_line = now
            say(self.line())

    def line(self) -> str:
        """Return `tokenizing: 512.0 MB of 1.0 GB, 11.2 MB/s, 45 s left`."""
        rate = (self.bytes_done - self.first) / max(time.monotonic() - self.started, 1e-9)
        seconds_left = (self.size_bytes - self.bytes_done) / max(rate, 1)
        progress = f"{decimal(self.bytes_done)} of {decimal(self.size_bytes)}"
        return f"tokenizing: {progress}, {decimal(int(rate))}/s, {seconds_left:.0f} s left"
