"""Facts about this machine, a line each, with a fix if something looks wrong."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch

from compiler_trainer.training.speed import machine
from passes.torch_private import compiler_folder

GIB = 2**30
PACKAGES = ("compiler-trainer", "torch", "triton", "transformers", "torchao")
CACHE_GIB, SHARED_GIB, FREE_SHARE, HOST_SHARE = 1, 0.25, 0.9, 0.5  # less is reported
QUERY = "driver_version,clocks.sm,clocks.max.sm,power.limit,temperature.gpu"


class Fact(NamedTuple):
    """A fact about the machine; `fix` says what to do if it looks wrong."""

    name: str
    text: str
    fix: str = ""


def facts() -> Iterator[Fact]:
    """Yield the facts that a bug report needs; a fact that cannot be read has its error as text."""
    for name, read in FACTS.items():
        try:
            yield from read()
        except Exception as error:
            yield Fact(name, f"{type(error).__name__}: {error}", "this could not be read")


def versions() -> Iterator[Fact]:
    """Yield the versions of important packages and of Python."""
    yield Fact("versions", ", ".join((*map(installed, PACKAGES), machine()["versions"].split(", ", 1)[1])))


def installed(package: str) -> str:
    """Return a package's name and version."""
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"


def host() -> Iterator[Fact]:
    """Yield processor, load, memory, limits and shared memory."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    busy = "other work uses the cores: times are unreliable" if load > 2 * cores else ""
    yield Fact("processor", f"{machine()['processor']}, load {load:.1f}", busy)
    total, free = memory()
    taken = "other processes use the rest: ps aux --sort=-rss" if free < HOST_SHARE * total else ""
    yield Fact("memory", f"{free:.1f} of {total:.1f} GiB free", taken)
    files, locked = (resource.getrlimit(which)[0] for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    few = "raise it: ulimit -n 65536" if 0 < files < 1024 else ""
    yield Fact("limits", f"open files {files}, locked memory {'unlimited' if locked < 0 else locked}", few)
    if (shared := Path("/dev/shm")).exists():
        yield room("shared memory", shared, SHARED_GIB, "NCCL and workers need it: docker run --shm-size=8g")


def memory() -> tuple[float, float]:
    """Return (GiB of the host, GiB that are free or hold droppable file caches)."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(lines[name].split()[0]) / 2**20 for name in ("MemTotal", "MemAvailable"))
    return total, free


def room(name: str, folder: Path, least_gib: float, fix: str) -> Fact:
    """Return the free space at a folder that exists or will."""
    nearest = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(nearest).free / GIB
    is_writable = os.access(nearest, os.W_OK)
    text = f"{folder}, {free:,.1f} GiB free" + ("" if is_writable else ", not writable")
    return Fact(name, text, "" if is_writable and free >= least_gib else fix)


def caches() -> Iterator[Fact]:
    """Yield the folders of compiled kernels and temporary files."""
    fix = "make room, or set TORCHINDUCTOR_CACHE_DIR"
    yield room("kernels", compiler_folder(), CACHE_GIB, fix)
    yield room("temporary files", Path(tempfile.gettempdir()), CACHE_GIB, "make room, or set TMPDIR")


def compiler() -> Iterator[Fact]:
    """Yield the compiler of C++ kernels and of the wrapper of GPU kernels."""
    name = os.environ.get("CXX", "g++")
    if shutil.which(name) is None:
        yield Fact("C++ compiler", f"no {name}", "apt-get install g++, or set CXX; lower.backend=eager needs none")
        return
    version_output = subprocess.run([name, "--version"], capture_output=True, text=True, timeout=20)
    yield Fact(
        "C++ compiler",
        version_output.stdout.partition("\n")[0] or version_output.stderr,
        "it does not start" if version_output.returncode else "",
    )


def network() -> Iterator[Fact]:
    """Yield the network interfaces, and the result of a connection between processes of this machine."""
    names = [name for _, name in socket.if_nameindex()]
    wrong = [f"{variable}={os.environ[variable]} matches none of them" for variable in unmatched(names)]
    yield Fact("interfaces", ", ".join(names), "; ".join(wrong))
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
        yield Fact("loopback", "works")
    except OSError as error:
        yield Fact("loopback", str(error), "ranks cannot meet: ip link set lo up")


def unmatched(names: Sequence[str]) -> Iterator[str]:
    """Yield the variables that choose network interfaces, but none, or for gloo not all, of those that there are.

    gloo takes exact names, NCCL prefixes, exact names after `=`, and after `^` those not to take.
    """
    if not {*filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))} <= {*names}:
        yield "GLOO_SOCKET_IFNAME"
    value = os.environ.get("NCCL_SOCKET_IFNAME", "")
    patterns = value.lstrip("^=").split(",")
    is_exact, is_inverted = value.lstrip("^").startswith("="), value.startswith("^")
    matching = {n for n in names if any(n == p if is_exact else n.startswith(p) for p in patterns)}
    if value and not ({*names} - matching if is_inverted else matching):
        yield "NCCL_SOCKET_IFNAME"


def gpus() -> Iterator[Fact]:
    """Yield the GPUs, their free memory, their links, and their driver."""
    if not torch.cuda.is_available():
        has_smi = shutil.which("nvidia-smi") is not None
        fix = f"this PyTorch ({torch.__version__}) does not use them: its build, or the driver" if has_smi else ""
        yield Fact("GPUs", "none" if not has_smi else "nvidia-smi is there, but PyTorch sees none", fix)
        return
    count = torch.cuda.device_count()
    yield Fact("GPUs", f"{machine()['GPU']}, CUDA {torch.version.cuda}, NCCL {torch.cuda.nccl.version()}")
    for each in range(count):
        free, total = torch.cuda.mem_get_info(each)
        taken = "other processes use the rest: nvidia-smi" if free < FREE_SHARE * total else ""
        yield Fact(f"GPU {each}", f"{free / GIB:.1f} of {total / GIB:.1f} GiB free", taken)
    linked = all(torch.cuda.can_device_access_peer(a, b) for a in range(count) for b in range(count) if a != b)
    if count > 1:
        fix = "collectives go through the host: nvidia-smi topo -m"
        yield Fact("links", "each GPU reaches each" if linked else "not each GPU reaches each", "" if linked else fix)
    clocks = subprocess.run(
        ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv"], capture_output=True, text=True, timeout=20
    )
    yield Fact("driver, clocks", "; ".join(clocks.stdout.strip().splitlines()))


FACTS: dict[str, Callable[[], Iterator[Fact]]] = {
    "versions": versions,
    "processor": host,
    "C++ compiler": compiler,
    "GPUs": gpus,
    "kernels": caches,
    "network": network,
}
