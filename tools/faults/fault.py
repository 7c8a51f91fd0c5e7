"""A fault: a fragment of a file of the passes, and its replacement."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A replacement of the fragment `old` of a file by `new`; the fragment is unique, or starts `at` an offset."""

    name: str
    file: str
    old: str
    new: str
    means: str
    at: int | None = None

    @property
    def room(self) -> str:
        """The package of the passes that it is in."""
        return self.file.split("/")[1]

    def start(self, text: str) -> int:
        """Return the offset of the fragment in the file's text; raise ValueError unless it occurs there once."""
        if self.at is not None and text.startswith(self.old, self.at):
            return self.at
        if self.at is not None or (count := text.count(self.old)) != 1:
            where = "not at its offset" if self.at is not None else f"{count} times in {self.file}, not once"
            raise ValueError(f"fault {self.name}: its old text occurs {where}")
        return text.index(self.old)

    def planted_in(self, text: str) -> str:
        """Return the file's text with the fault; raise ValueError as `start` does."""
        start = self.start(text)
        return text[:start] + self.new + text[start + len(self.old) :]
