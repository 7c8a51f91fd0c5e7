"""Simulated CUDA graphs in the worst case: a replay overwrites all memory of its own pool.

A recording may use the memory that was free in its pool when it was made. Later recordings lie there.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch

from passes.lower import cudagraphs
from passes.lower.cudagraphs import Replayed


class PlayedGraph:
    """A graph that replays its recording into the same results, by running it again."""

    part: Replayed
    later: list[Replayed]  # of its pool

    def replay(self) -> None:
        for each in self.later:
            held = {value.data_ptr() for value in each.values.values()}
            for result in each.results:
                if result.is_floating_point() and result.data_ptr() not in held:
                    result.fill_(float("nan"))
        new = self.part.run([self.part.values[i] for i in sorted(self.part.values)])
        for result, value in zip(self.part.results, new, strict=True):
            result.copy_(value)

    def reset(self) -> None:
        """Do nothing: a played graph has no resources."""


@contextlib.contextmanager
def played_cuda() -> Iterator[list[str]]:
    """Simulate recordings; yield the list of events, `record` and `wait`."""
    done, pools, now = list[str](), defaultdict[Any, list[PlayedGraph]](list), list[Replayed]()
    handles, record = itertools.count(), Replayed.record

    def recorded(part: Replayed, *given: Any) -> None:
        now.append(part)
        record(part, *given)

    @contextlib.contextmanager
    def recording(graph: PlayedGraph, pool: Any, **options: Any) -> Iterator[None]:
        part = graph.part = now.pop()
        kept = {i: value.clone() for i, value in part.values.items()}
        yield
        done.append("record")
        graph.later = []
        for before in pools[pool]:
            before.later.append(part)
        pools[pool].append(graph)
        for i, value in kept.items():  # recording computes nothing
            part.values[i].copy_(value)

    class Stream:
        def wait_stream(self, other: Stream) -> None:
            done.append("wait")

    on = {"Stream": Stream, "CUDAGraph": PlayedGraph, "graph": recording, "current_stream": Stream}
    on |= {"stream": lambda stream: contextlib.nullcontext(), "graph_pool_handle": lambda: (next(handles), 0)}
    with contextlib.ExitStack() as stack:
        for name, value in on.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(patch.object(Replayed, "record", recorded))
        try:
            yield done
        finally:
            cudagraphs.release()
