"""Each resource limit that a process hits gives one line with the way out, and nothing is published."""

from __future__ import annotations

import errno
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest
import torch

from ckptmap import convert
from ckptmap.errors import DestinationError, SourceError
from ckptmap.storage.resource_limits import or_resource_error, resource_error

LIMITED = """
import resource, sys
name, most = sys.argv.pop(1), int(sys.argv.pop(1))
from ckptmap_cli.main import leave
resource.setrlimit(getattr(resource, name), (most, resource.getrlimit(getattr(resource, name))[1]))
leave()
"""
INTERRUPTED = """
import os, signal, sys
sys.modules.pop("ckptmap_cli.main", None)
class Met:
    def find_spec(self, name, path=None, target=None):
        if name == "ckptmap_cli.main":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Met())
from ckptmap_cli.entry_point import run
run()
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "model.pt"
    torch.save({f"layers.{i}.weight": torch.randn(64, 64) for i in range(4)}, path)
    return path


def limited(
    name: str, most: int, *args: object, stdout: int | IO[str] = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LIMITED, name, str(most), *map(str, args)],
        stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_too_few_open_files(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = limited("RLIMIT_NOFILE", 6, "convert", source, out, "--to", "fsdp2", "--world-size", 4)
    assert done.returncode in (2, 3), done.stderr
    assert re.match(r"error\[CKM313\]: .*[Tt]oo many open files", done.stderr)
    assert "  hint: ulimit -n " in done.stderr and not out.exists()
    convert(source, out, to="fsdp2", world_size=4)


def test_what_is_kept_is_said_by_the_exit_code(source: Path, tmp_path: Path) -> None:
    """Exit code 2 says that nothing is left on the disk: a run that keeps its work ends with 3."""
    convert(source, tmp_path / "dcp", to="fsdp2", world_size=32)
    line = ("convert", tmp_path / "dcp", tmp_path / "out.pt", "--to", "full")
    done = limited("RLIMIT_NOFILE", 14, *line)
    assert done.stderr.startswith("error[CKM313]: "), done.stderr
    left = sorted(tmp_path.glob(".out.pt.ckptmap-*"))
    assert done.returncode == (3 if left else 2), left
    assert left, "too few files to have begun: the case is gone"
    assert limited("RLIMIT_NOFILE", 200, *line).returncode == 0
    assert not [*tmp_path.glob(".out*")]


def test_verify_that_cannot_read_says_nothing_of_the_output(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", to="fsdp2", world_size=2)
    done = limited("RLIMIT_NOFILE", 4, "verify", tmp_path / "out")
    assert done.returncode in (2, 3) and "CKM313" in done.stderr and "NOT ok" not in done.stdout


def test_a_file_that_may_not_be_so_large(source: Path, tmp_path: Path) -> None:
    done = limited("RLIMIT_FSIZE", 20_000, "convert", source, tmp_path / "out", "--to", "full")
    assert done.returncode == 2 and done.stderr.startswith("error[CKM313]: ")
    assert "ulimit -f" in done.stderr and not (tmp_path / "out").exists()


def test_a_thread_that_cannot_be_started_ends_those_that_wait(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first worker waits for torch, which is brought when all are started."""
    from concurrent.futures import ThreadPoolExecutor

    submit, started = ThreadPoolExecutor.submit, []

    def second_fails(pool: ThreadPoolExecutor, *args: object) -> object:
        started.append(args)
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        return submit(pool, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(ThreadPoolExecutor, "submit", second_fails)
    with pytest.raises(RuntimeError, match="can't start new thread") as caught:
        convert(source, tmp_path / "out", to="full-nf4", encode=["*"], threads=2)
    short = resource_error(caught.value)
    assert short is not None and "--threads 1" in short.hint and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemoryError(), "ran out of memory"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "memory"),
        (OSError(errno.ENFILE, "Too many open files in system"), "open more files"),
        (RuntimeError("can't start new thread"), "start another thread"),
        (torch.OutOfMemoryError("CUDA out of memory"), "ran out of memory"),
    ],
)
def test_what_ran_out(error: BaseException, says: str) -> None:
    short = resource_error(error)
    assert short is not None and short.code == "CKM313" and says in short.message and short.hint
    refused = or_resource_error(error, SourceError("CKM101", "x: cannot be read", "check the path"))
    assert (type(refused), refused.code) == (SourceError, "CKM313")


def test_other_errors_are_no_shortage() -> None:
    for error in (ValueError("x"), OSError(errno.EACCES, "no"), ImportError("no name x")):
        assert resource_error(error) is None
    refused = DestinationError("CKM304", "x", "y")
    assert or_resource_error(OSError(errno.EACCES, "no"), refused) is refused


def test_ctrl_c_while_the_command_is_imported_is_silent() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, "doctor"], capture_output=True, text=True, timeout=60,
        check=False, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_stdout(
    unbuffered: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    with open(tmp_path / "listing", "w") as full:
        done = limited("RLIMIT_FSIZE", 10, "inspect", source, stdout=full)
    assert done.returncode == 3
    assert done.stderr.startswith("error: stdout cannot be written: File too large\n")
