"""Whether a shared library was cut short: to load such a one ends the process, and says nothing."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

MAGIC = b"\x7fELF\x02"  # of 64 bits, https://gabi.xinuos.com
ORDERS = {1: "<", 2: ">"}


def is_torn(path: Path) -> bool:
    """Whether an ELF file is shorter than its headers say; without them it is torn, for a linker writes them last."""
    try:
        with path.open("rb") as file:
            return path.stat().st_size < length(file)
    except (KeyError, struct.error):
        return True
    except OSError:  # gone meanwhile, or another user's
        return False


def length(file: BinaryIO) -> int:
    """Where the last segment, or the table of sections, ends; raises KeyError or struct.error where nothing says it."""
    header = file.read(64)
    order = ORDERS[header[5] if header.startswith(MAGIC) and len(header) > 5 else 0]
    segments_at, sections_at = struct.unpack_from(f"{order}QQ", header, 32)
    segment_bytes, segments, section_bytes, sections = struct.unpack_from(f"{order}HHHH", header, 54)
    file.seek(segments_at)
    table = file.read(segments * segment_bytes)
    found = (struct.unpack_from(f"{order}Q16xQ", table, at * segment_bytes + 8) for at in range(segments))
    return max(sections_at + sections * section_bytes, *(offset + size for offset, size in found))
