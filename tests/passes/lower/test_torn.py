"""C++ libraries that were cut short, in the cache that every start loads from."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from compiler_trainer.training.metrics import read
from passes.lower.elf import is_torn
from passes.lower.inductor import know_the_machine

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="libraries are ELF files on Linux only")


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> bytes:
    """A library as the linker writes it."""
    path = tmp_path_factory.mktemp("library") / "a.so"
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(path)]
    subprocess.run(command, input='extern "C" int one() { return 1; }', text=True, check=True)
    return path.read_bytes()


def test_a_library_is_whole_at_its_full_length_alone(library, tmp_path):
    path = tmp_path / "a.so"
    for length in (*range(0, 200), *range(200, len(library), 97), len(library) - 1):
        path.write_bytes(library[:length])
        assert is_torn(path), length
    path.write_bytes(library)
    assert not is_torn(path)
    path.write_bytes(library + b"more")
    assert not is_torn(path)


def test_a_library_whose_headers_were_not_written_yet_is_torn(library, tmp_path):
    path = tmp_path / "a.so"
    path.write_bytes(bytes(len(library)))
    assert is_torn(path)
    path.write_bytes(bytes(64) + library[64:])
    assert is_torn(path)


@pytest.mark.parametrize("order", "<>")
def test_segments_count_where_there_is_no_table_of_sections(order, tmp_path):
    ident = b"\x7fELF\x02" + (b"\x01" if order == "<" else b"\x02") + bytes(10)
    header = ident + struct.pack(f"{order}HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack(f"{order}IIQQQQQQ", 1, 5, 0, 0, 0, 200, 300, 1)
    path = tmp_path / "a.so"
    path.write_bytes((header + segment).ljust(199))
    assert is_torn(path)
    path.write_bytes((header + segment).ljust(200))
    assert not is_torn(path)


def test_what_is_gone_is_not_torn(tmp_path):
    assert not is_torn(tmp_path / "none.so")


def test_torn_libraries_of_the_cache_are_removed_and_others_stay(library, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    whole, torn, other = (Path(tmp_path, "ab", name) for name in ("whole.main.so", "torn.main.so", "torn.main.cpp"))
    whole.parent.mkdir()
    whole.write_bytes(library)
    torn.write_bytes(library[: len(library) // 2])
    other.write_bytes(b"")
    know_the_machine()
    assert whole.read_bytes() == library and other.exists() and not torn.exists()


JOB = ("data=synthetic data.documents=20 train.steps=2 train.seq_len=16 train.global_batch_size=2 model.dim=16 "
       "model.n_layers=1 model.n_heads=2 model.n_kv_heads=1 model.ffn_dim=16 eval.interval=0 checkpoint.enabled=false "
       "run.dump_graphs=false lower.backend=inductor").split()


@pytest.mark.full
def test_a_run_after_all_libraries_were_cut_short_builds_them_anew(tmp_path):
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}

    def losses(name: str) -> list[float]:
        command = [sys.executable, "-m", "compiler_trainer", *JOB, f"run.dir={name}"]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return [record["loss"] for record in read(tmp_path / name / "metrics.jsonl")]

    first = losses("a")
    lengths = {path: path.stat().st_size for path in (tmp_path / "cache").glob("*/*.so")}
    assert lengths
    for path, length in lengths.items():
        os.truncate(path, length // 8)  # half may hold all that is loaded
    assert losses("b") == first
    assert {path: path.stat().st_size for path in lengths} == lengths
