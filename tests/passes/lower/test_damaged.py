"""Damage to the compiler's cache: only files that are as they were written are executed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from compiler_trainer.training.metrics import read
from passes.lower.cpu_start.door import checked_files, notes_of
from passes.lower.store import DAY_S, Store, bound

ROOT = Path(__file__).parents[3]
SOURCE = "def call(args):\n    return args[0] * 1.0\n"
DAMAGE = {
    "changed": lambda path: path.write_text(path.read_text().replace("1.0", "3.0")),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Return an Inductor cache for this test alone."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_source_that_is_not_what_is_to_be_written_is_written_anew(damage, cache):
    from torch._inductor.codecache import PyCodeCache

    with checked_files:
        path = Path(PyCodeCache.write(SOURCE)[1])
        before = path.stat()
        damage(path)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert PyCodeCache.write(SOURCE)[1] == str(path) and path.read_text() == SOURCE
    assert list(path.parent.iterdir()) == [path]


def test_a_built_file_is_whole_as_it_was_noted_alone(tmp_path):
    store, path = Store(tmp_path / "bodies"), tmp_path / "a.so"
    path.write_bytes(b"0" * 100)
    assert not store.is_as_noted(path), "nobody knows where it is from"
    store.note(path)
    assert store.is_as_noted(path)
    for content in (b"0" * 99, b"0" * 50 + b"1" + b"0" * 49, b""):
        path.write_bytes(b"0" * 100)
        store.note(path)
        path.write_bytes(content)
        with pytest.warns(UserWarning, match=r"a.so is damaged; it is built again"):
            assert not store.is_as_noted(path)


def test_a_header_that_all_caches_share_is_noted_beside_it(tmp_path, monkeypatch):
    header = tmp_path / "headers/a.gch"
    header.parent.mkdir()
    for name, content in (("one", b"built by one"), ("other", b"by the other")):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / name))
        header.write_bytes(content)
        notes_of(header).note(header)
        assert notes_of(tmp_path / name / "ab/a.so").folder == tmp_path / name / "bodies"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "one"))
    assert notes_of(header).is_as_noted(header), "another job has built it since, which is no damage"


def test_what_a_killed_build_leaves_is_not_called_damaged(tmp_path, recwarn):
    store, path = Store(tmp_path / "bodies"), tmp_path / "a.so"
    path.write_bytes(b"0" * 100)
    store.note(path)
    path.unlink()
    assert not store.is_as_noted(path)
    path.write_bytes(b"0" * 50)  # left by the build that was killed
    assert not store.is_as_noted(path) and not recwarn.list


def test_a_disk_that_takes_nothing_is_said_and_training_goes_on(tmp_path):
    (tmp_path / "bodies").write_text("a file in its place")
    with pytest.warns(UserWarning, match="cannot be written"):
        Store(tmp_path / "bodies").put("k", b"v")


def test_a_cache_is_bounded_by_what_was_not_used_for_longest(tmp_path):
    for number in range(5):
        path = tmp_path / f"{number % 2}" / str(number)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(1 << 20))
        used = time.time() - (10 - number) * DAY_S
        os.utime(path, (used, used))
    assert bound(tmp_path, 5 << 20) == "" and bound(tmp_path, 1 << 40) == ""
    assert bound(tmp_path, 3 << 20) == f"{tmp_path} had more than {3 / 1024:g} GiB: the oldest 2 MiB were deleted"
    assert sorted(path.name for path in tmp_path.glob("*/*")) == ["2", "3", "4"]
    for path in tmp_path.glob("*/*"):
        os.utime(path)
    assert bound(tmp_path, 0) == "" and len(list(tmp_path.glob("*/*"))) == 3, "used today"


JOB = ("data=synthetic data.documents=20 train.steps=2 train.seq_len=16 train.global_batch_size=2 model.dim=16 "
       "model.n_layers=1 model.n_heads=2 model.n_kv_heads=1 model.ffn_dim=16 eval.interval=null checkpoint.interval=null "
       "run.dump_graphs=false lower.backend=inductor").split()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    for place in range(len(content) // 3, len(content), max(1, len(content) // 6)):
        content[place] ^= 16
    path.write_bytes(content)


@pytest.mark.full
@pytest.mark.parametrize("damage", [flip, DAMAGE["empty"]], ids=["flipped", "empty"])
def test_a_run_after_every_file_of_the_cache_was_damaged_makes_them_anew(damage, tmp_path):
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}

    def losses(name: str) -> list[float]:
        command = [sys.executable, "-m", "compiler_trainer", *JOB, f"run.dir={name}"]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return [record["loss"] for record in read(tmp_path / name / "metrics.jsonl")]

    first = losses("a")
    files = [path for ending in ("py", "so", "cpp", "h", "gch") for path in (tmp_path / "cache").glob(f"*/*.{ending}")]
    assert {path.suffix for path in files} >= {".py", ".so", ".cpp"}
    for path in files:
        damage(path)
    assert losses("b") == first
