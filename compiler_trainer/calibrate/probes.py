"""The measurements of a calibration on each rank: matmuls, attention, memory, launches, collectives, overlap."""

from __future__ import annotations

import itertools
import math
import os
import socket
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from passes.ir.record import read_values
from passes.lower.backends import NamingInterpreter
from passes.lower.heap import keep_freed_memory

Measurements = dict[str, Any]
MIB, GIB = 2**20, 2**30
BUDGET_S = 0.12  # target time for one kernel: three rounds, of which the median is taken
MATMUL_SIZES = ((128, 64), (256, 128), (1024, 128), (2048, 256), (2048, 512), (2048, 1024))  # (tokens, features)
COLD_MIB = 96  # of operand sets used in rotation, so that most kernels read from memory, as in a training step
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
ATTENTION_LENGTHS = (64, 192, 512, 768, 1024, 2048)  # the CPU's kernel changes its block sizes at 192 and 768
ADDITION_BYTES = 12  # of an entry: two read, one written, in fp32
ADDITION_MIB = (0.0625, 0.25, 1, 4, 16, 64)
MAX_SETS = 200  # of operands
VIEWS = 200  # operators that compute nothing, in the graph of `operator_s`
BUFFER_MIB = (0.004, 0.0625, 0.5, 4, 32)
MATMUL_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def free_port() -> int:
    """Return a free port on this machine for the ranks to connect to."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def leave_group() -> None:
    """Wait for all ranks, and leave the process group if there is one."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


class Probes:
    """The measurements of one rank of one machine. All ranks run the same probe at the same time, one after another.

    The clock `cpu` counts the computing time of a rank's threads, without waiting, so that other processes disturb it
    little. It cannot measure what overlap costs: `beside` returns ones.
    """

    def __init__(self, rank: int, ranks: int, threads: int, port: int, clock: str = "wall"):
        self.is_wall, self.now = clock == "wall", CLOCKS[clock]
        self.load = os.getloadavg()[0]
        self.rank, self.ranks = rank, ranks
        self.device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
        torch.set_num_threads(threads)
        if self.device.type == "cpu":
            keep_freed_memory()  # as a job does
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if ranks > 1:
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)

    def measure_all(self) -> Measurements:
        """Run every probe; return the results under the keys of the calibration file."""
        figures: Measurements = {
            "device": self.device.type,
            "at": datetime.now().strftime("%Y-%m-%d %H:%M"),
            "load": self.load,
            "memory_gib": self.memory_gib(),
            "products": {name: list(self.matmul_rates(dtype)) for name, dtype in MATMUL_DTYPES.items()},
            "attention": self.attention(),
            "memory": list(self.memory()),
            "kernel_us": figure(1e6 * self.seconds(partial(torch.add, self.full(16), 1.0))),
            "launch_us": figure(1e6 * self.launch_s()) if self.device.type == "cuda" else 0.0,
            "operator_us": figure(1e6 * self.operator_s()),
            "collectives": list(self.collectives()),
            "beside": self.beside(),
        }
        if figures["collectives"]:
            figures["link_gb_s"] = max(link_gb_s(times) for times in figures["collectives"])
        return figures

    def memory_gib(self) -> float:
        """Return the memory of a device; on a CPU, the machine's memory divided by its ranks."""
        if self.device.type == "cuda":
            return figure(torch.cuda.get_device_properties(self.device).total_memory / GIB)
        return figure(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB / self.ranks)

    # ---- operands and time -------------------------------------------------------------------------------------

    def full(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return random numbers on the device."""
        return torch.randn(shape, device=self.device).to(dtype)

    def cold(self, run: Callable[..., Any], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> Callable[[], Any]:
        """Return `run` on sets of operands in rotation, so that a call finds its operands evicted from the cache."""
        size = sum(math.prod(shape) for shape in shapes) * dtype.itemsize
        count = min(MAX_SETS, max(1, COLD_MIB * MIB // size))
        operands = itertools.cycle([[self.full(*shape, dtype=dtype) for shape in shapes] for _ in range(count)])
        outputs: deque[Any] = deque(maxlen=count)  # alive, so that the allocator returns no cached block
        return lambda: outputs.append(run(*next(operands)))

    def wait(self) -> None:
        """Wait until the device has finished."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def meet(self) -> None:
        """Wait until the device has finished and all ranks are here."""
        self.wait()
        if self.ranks > 1:
            dist.barrier()

    def seconds(self, run: Callable[[], Any]) -> float:
        """Return the seconds of one run, all ranks doing the same: the median of three rounds, the mean over ranks."""
        run()
        began = self.now()
        run()
        self.wait()
        times = self.from_rank_0(max(1, round(BUDGET_S / 3 / max(self.now() - began, 1e-6))))
        rounds = []
        for _ in range(3):
            self.meet()
            began = self.now()
            for _ in range(times):
                run()
            self.wait()
            rounds.append((self.now() - began) / times)
        return self.mean(statistics.median(rounds))

    def from_rank_0(self, times: int) -> int:
        """Return the `times` of rank 0, on every rank."""
        return round(self.mean(float(times if self.rank == 0 else 0)) * self.ranks)

    def mean(self, value: float) -> float:
        """Return the mean over ranks."""
        if self.ranks == 1:
            return value
        total = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total) / self.ranks

    # ---- kernels ----------------------------------------------------------------------------------

    def matmul_rates(self, dtype: torch.dtype) -> Iterator[list[float]]:
        """Yield [GFLOP of one, TFLOP/s] of a linear layer's matmuls: forward, input gradient, weight gradient."""
        slow = self.device.type == "cpu" and dtype is torch.bfloat16  # 40 times slower without instructions
        scale = 4 if self.device.type == "cuda" else 1
        for rows, width in MATMUL_SIZES[: 3 if slow else None]:
            shapes = [(n * scale, width * scale) for n in (rows, rows, width)]  # x, gradient, w
            flops = 2 * rows * scale * (width * scale) ** 2
            kernels = (
                self.cold(lambda x, gradient, w: torch.mm(x, w.t()), shapes, dtype),
                self.cold(lambda x, gradient, w: torch.mm(gradient, w), shapes, dtype),
                self.cold(lambda x, gradient, w: torch.mm(gradient.t(), x), shapes, dtype),
            )
            yield [figure(flops / 1e9), figure(3 * flops / sum(map(self.seconds, kernels)) / 1e12)]

    def attention(self) -> dict[str, list[list[float]]]:
        """Return lists of [sequence length, TFLOP/s] of causal attention, forward and backward, with heads of 64."""
        rates: dict[str, list[list[float]]] = {"forward": [], "backward": []}
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        for length in ATTENTION_LENGTHS:
            heads = max(1, (8 if self.device.type == "cuda" else 1) * 2048 // length)
            laid_out = [self.full(1, length, heads, 64, dtype=dtype).transpose(1, 2) for _ in range(3)]  # as in models
            q, k, v = (x.requires_grad_() for x in laid_out)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            gradient = torch.ones_like(out)
            with torch.no_grad():
                forward_s = self.seconds(partial(F.scaled_dot_product_attention, q, k, v, is_causal=True))
            backward_s = self.seconds(partial(torch.autograd.grad, out, (q, k, v), gradient, retain_graph=True))
            flops = heads * length * length * 64  # of one matmul, half of it masked; forward has 2, backward 5
            rates["forward"].append([length, figure(2 * flops / forward_s / 1e12)])
            rates["backward"].append([length, figure(5 * flops / backward_s / 1e12)])
        return rates

    def memory(self) -> Iterator[list[float]]:
        """Yield [MiB read and written, GB/s] of additions into new memory, as in a step."""
        for mib in ADDITION_MIB:
            count = int(mib * MIB / ADDITION_BYTES)
            run = self.cold(torch.add, [(count,), (count,)], torch.float32)
            yield [mib, figure(ADDITION_BYTES * count / self.seconds(run) / 1e9)]

    def launch_s(self) -> float:
        """Return the wall time in which the host launches a kernel."""
        x, times = self.full(16), 1000
        self.meet()
        began = time.perf_counter()
        for _ in range(times):
            torch.add(x, 1.0)
        return (time.perf_counter() - began) / times

    def operator_s(self) -> float:
        """Return the host's time for an operator that computes nothing, when the eager backend interprets a graph."""
        graph, x = make_fx(transpose_often, tracing_mode="fake")(self.full(4, 4)), self.full(4, 4)
        read_values(graph.graph)  # the interpreter reads the records of nodes
        interpreter = NamingInterpreter(graph)
        return self.seconds(partial(interpreter.run, x, enable_io_processing=False)) / VIEWS

    # ---- collectives ------------------------------------------------------------------------------

    def collectives(self) -> Iterator[Measurements]:
        """Yield a record per kind and group size: `us` has [MiB of buffer, microseconds]; all groups run at once."""
        for size in (n for n in range(2, self.ranks + 1) if self.ranks % n == 0):
            groups = [dist.new_group(range(first, first + size)) for first in range(0, self.ranks, size)]
            group = groups[self.rank // size]
            for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "shift"):
                runs = [self.collective(kind, int(mib * MIB), size, group) for mib in BUFFER_MIB]
                times = [[mib, figure(1e6 * self.seconds(run))] for mib, run in zip(BUFFER_MIB, runs, strict=True)]
                yield {"kind": kind, "ranks": size, "us": times}

    def collective(self, kind: str, size_bytes: int, ranks: int, group: Any) -> Callable[[], Any]:
        """Return a function that runs a collective with a largest buffer of `size_bytes`, into new memory."""
        count = size_bytes // 4 // ranks * ranks
        part, full = self.full(count // ranks), self.full(count)
        if kind == "all_gather":
            return lambda: dist.all_gather_into_tensor(torch.empty_like(full), part, group=group)
        if kind == "reduce_scatter":
            return lambda: dist.reduce_scatter_tensor(torch.empty_like(part), full, group=group)
        if kind == "all_reduce":
            return lambda: dist.all_reduce(full.clone(), group=group)
        if kind == "all_to_all":
            return lambda: dist.all_to_all_single(torch.empty_like(full), full, group=group)
        return partial(shift, full, group)

    def beside(self) -> list[float]:
        """Return the shares of speed kept: a matmul and an addition during an all-reduce, it during matmuls."""
        if self.ranks == 1 or not self.is_wall:
            return [1.0, 1.0, 1.0]
        x, w = self.full(512, 512), self.full(512, 512)
        a = self.full(int(4 * MIB / ADDITION_BYTES))
        full = self.full(8 * MIB)
        shares = [self.together(run, full) for run in (partial(torch.mm, x, w), partial(torch.add, a, a))]
        return [figure(share) for share in (shares[0][0], shares[1][0], shares[0][1])]

    def together(self, run: Callable[[], Any], full: Tensor) -> tuple[float, float]:
        """Return the shares of speed that a kernel and an all-reduce keep while both run."""
        alone_s, sending_s = self.seconds(run), self.seconds(partial(dist.all_reduce, full))
        shares = []
        for _ in range(3):
            self.meet()
            began, runs = time.perf_counter(), 0
            work = dist.all_reduce(full, async_op=True)
            while not work.is_completed():
                run()
                runs += 1
                if self.device.type == "cuda":
                    torch.cuda.current_stream().synchronize()  # not the stream of the all-reduce
            work.wait()
            took_s = time.perf_counter() - began
            shares.append((min(1.0, runs * alone_s / took_s), min(1.0, sending_s / took_s)))
        middle = (statistics.median(share) for share in zip(*shares, strict=True))
        computing, sending = (self.mean(share) for share in middle)
        return max(computing, 0.05), max(sending, 0.05)


def transpose_often(x: Tensor) -> Tensor:
    """Transpose a matrix `VIEWS` times: operators that compute nothing."""
    for _ in range(VIEWS):
        x = x.t()
    return x


def shift(x: Tensor, group: Any) -> None:
    """Send to the next rank of a group and receive from the one before."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    y = torch.empty_like(x)
    send = dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % size)
    receive = dist.P2POp(dist.irecv, y, group=group, group_peer=(rank - 1) % size)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()


def link_gb_s(times: Measurements) -> float:
    """Return the bytes of the largest buffer over its time, GB/s."""
    mib, us = times["us"][-1]
    return figure(mib * MIB / us / 1e3)


def figure(value: float) -> float:
    """Round a number to four significant digits."""
    return float(f"{value:.4g}")
