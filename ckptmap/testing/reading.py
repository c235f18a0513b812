"""Check a reader on an existing checkpoint: values, boxes, damaged files, and what it imports."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ckptmap.core.tiling import prove_tiling
from ckptmap.errors import CkptmapError, SourceError
from ckptmap.execution import manifest as manifests
from ckptmap.protocols import Container, Directory
from ckptmap.quantization.blockwise.dequantize import window
from ckptmap.testing.base import claims, expect, opened, run_all, stored_tensors
from ckptmap.testing.samples import random_box, same
from ckptmap.testing.strangers import strangers

if TYPE_CHECKING:
    import torch

BOXES = 4
MAX_FILES = 8
"""Most files of a checkpoint that are truncated, each to a dozen lengths."""
LOST_BYTES = (1, 2, 9, 100)
"""Numbers of bytes to cut off the end, besides the lengths of `_lengths`."""


def check_reader(
    container: Container | Directory,
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    tmp_path: Path,
) -> None:
    """Raise AssertionError where the reader returns wrong values, or accepts a damaged file.

    `tensors` are the true values by plain FQN. Use it for a format that ckptmap does not write:

        from ckptmap.testing import check_reader
        safetensors.torch.save_file(tensors, path)
        check_reader(MyReader(), path, tensors, tmp_path)

    The checks work on copies below `tmp_path`; they are the methods named in `ReaderKit.CHECKS`.
    """
    run_all(ReaderKit(container, path, tensors, tmp_path))


@dataclass
class ReaderKit:
    """The checks of `check_reader` one by one, for a test each: `getattr(kit, name)()`."""

    container: Container | Directory
    path: Path
    tensors: Mapping[str, torch.Tensor]
    tmp_path: Path

    CHECKS = ("claims", "indexes", "values", "boxes", "truncated", "outside", "without_torch")

    def __post_init__(self) -> None:
        self.tmp_path.mkdir(parents=True, exist_ok=True)

    @property
    def name(self) -> str:
        return self.container.name

    @cached_property
    def own_files(self) -> list[str]:
        """The files of the checkpoint, relative to its path; `"."` for a single file."""
        with opened(self.path, self.container) as ckpt:
            files = [Path(file) for file in ckpt.index.files]
        base = self.path.absolute()
        return [str(file.relative_to(base)) for file in files if file.name != manifests.NAME]

    # ------------------------------------------------------------------ checks

    def claims(self) -> None:
        """Check that the reader claims the checkpoint, and no path that is not a checkpoint."""
        expect(claims(self.container, self.path), f"{self.name}: does not claim {self.path.name}")
        folder = self.tmp_path / "strangers"
        folder.mkdir()
        for stranger in strangers(folder):
            wrong = claims(self.container, stranger)
            expect(not wrong, f"{self.name}: claims {stranger.name}, which is not its own")

    def indexes(self) -> None:
        """Check that files are absolute, chunks tile their tensors, and regions lie inside their files."""
        with opened(self.path, self.container) as ckpt:
            container = ckpt.index.container
            expect(
                container == self.name, f"{self.name}: the index names the container {container}"
            )
            sizes = {file: Path(file).stat().st_size for file in ckpt.index.files}
            for file in sizes:
                expect(Path(file).is_absolute(), f"{self.name}: file {file} is not absolute")
            for fqn, stored in stored_tensors(ckpt):
                wrong = prove_tiling(stored.info.shape, [chunk.box for chunk in stored.chunks])
                expect(wrong is None, f"{self.name}: {fqn}: {wrong}")
                for region in (chunk.region for chunk in stored.chunks):
                    expect(region.file in sizes, f"{self.name}: {fqn}: {region.file} is not listed")
                    end = region.offset + region.span_nbytes
                    expect(
                        end <= sizes[region.file],
                        f"{self.name}: {fqn} ends at byte {end} of {sizes[region.file]}",
                    )

    def values(self) -> None:
        """Check that exactly the given tensors are read, bit for bit, under their plain FQNs."""
        with opened(self.path, self.container) as ckpt:
            lost, new = set(self.tensors) - set(ckpt), set(ckpt) - set(self.tensors)
            expect(not lost, f"{self.name}: {sorted(lost)[:1]} is not read")
            expect(not new, f"{self.name}: {sorted(new)[:1]} is read, but was never written")
            for fqn, tensor in self.tensors.items():
                expect(ckpt[fqn].info.shape == tuple(tensor.shape), f"{self.name}: {fqn}: shape")
                expect(same(ckpt[fqn].read(), tensor), f"{self.name}: {fqn} has other values")

    def boxes(self) -> None:
        """Check that a random box equals that slice of the tensor."""
        draw = random.Random(5)
        with opened(self.path, self.container) as ckpt:
            for fqn, tensor in self.tensors.items():
                for _ in range(BOXES):
                    box = random_box(tuple(tensor.shape), draw)
                    values = ckpt[fqn].read(box.offsets, box.sizes)
                    expect(
                        same(values, window(tensor, box)), f"{self.name}: {fqn} at {box} differs"
                    )

    def truncated(self) -> None:
        """Check that a truncated file is refused by SourceError, or all values read from it are right."""
        copy = self._copied("truncated")
        for name in _some(self.own_files):
            content = (copy / name).read_bytes()
            for length in _lengths(len(content)):
                (copy / name).write_bytes(content[:length])
                self._survives(copy, f"{name} truncated to {length} of {len(content)} bytes")
            (copy / name).write_bytes(content)

    def outside(self) -> None:
        """Check that a name inside the format that leads out of the directory is never followed."""
        if self.path.is_file():
            return
        for holder, name, evil in _named(self.path, self.own_files):
            copy = self._copied("outside")
            target = (copy / holder).parent / evil
            shutil.copy(self.path / name, target)
            content = (copy / holder).read_bytes()
            (copy / holder).write_bytes(content.replace(Path(name).name.encode(), evil.encode()))
            title = f"{holder} names {evil!r}"
            self._survives(copy, title)
            try:
                with opened(copy, self.container) as ckpt:
                    files = [Path(file).resolve() for file in ckpt.index.files]
                left = [file for file in files if copy.resolve() not in file.parents]
                expect(not left, f"{self.name}: {title}, and it is read: {left[:1]}")
            except SourceError:
                pass
            finally:
                target.unlink(missing_ok=True)

    def without_torch(self) -> None:
        """Check that opening imports no torch, in a new process; not checked for a class defined in a function."""
        kind = type(self.container)
        if "<locals>" in kind.__qualname__ or kind.__module__ == "__main__":
            return
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, kind.__module__, kind.__qualname__, str(self.path)],
            capture_output=True, text=True, timeout=60, env={"PYTHONPATH": ":".join(sys.path)},
        )  # fmt: skip
        expect(done.returncode == 0, f"{self.name}: opened in a new process: {done.stderr}")
        expect(done.stdout == "", f"{self.name}: opening imports {done.stdout}")

    # ------------------------------------------------------------------ damage

    def _copied(self, name: str) -> Path:
        """Return a fresh copy, one directory deeper, so that names that lead out stay inside tmp_path."""
        folder = self.tmp_path / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        copy = folder / self.path.name
        if self.path.is_file():
            return Path(shutil.copy(self.path, copy))
        return Path(shutil.copytree(self.path, copy))

    def _survives(self, copy: Path, title: str) -> None:
        try:
            with opened(copy, self.container) as ckpt:
                expect(
                    set(ckpt) == set(self.tensors), f"{self.name}: {title}: other keys, no error"
                )
                for fqn, tensor in self.tensors.items():
                    good = same(ckpt[fqn].read(), tensor)
                    expect(good, f"{self.name}: {title}: {fqn} has other values, and no error")
        except CkptmapError:
            return
        except AssertionError:
            raise
        except Exception as error:
            kind = type(error).__name__
            raise AssertionError(
                f"{self.name}: {title} raises {kind}, expected SourceError: {error}"
            ) from error


_PROGRAM = """
import functools, importlib, sys
from ckptmap.testing.base import opened
module, name, path = sys.argv[1:]
kind = functools.reduce(getattr, name.split("."), importlib.import_module(module))
opened(path, kind()).close()
sys.stdout.write(" ".join({"torch", "numpy"} & set(sys.modules)))
"""


def _some(names: list[str]) -> list[str]:
    """Return at most MAX_FILES names, evenly spread, with the first and the last."""
    if len(names) <= MAX_FILES:
        return names
    step = (len(names) - 1) / (MAX_FILES - 1)
    return [names[round(i * step)] for i in range(MAX_FILES)]


def _lengths(size: int) -> list[int]:
    """Return lengths to truncate to: nothing, a few bytes, fractions, and all but a few bytes."""
    some = [0, 1, 7, 8, 9, 64, size // 4, size // 2, 3 * size // 4]
    return sorted({n for n in (*some, *(size - lost for lost in LOST_BYTES)) if 0 <= n < size})


def _named(base: Path, names: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (file, another file whose name occurs in it, a name of equal length that leads out)."""
    for holder in names:
        content = (base / holder).read_bytes()
        for name in names:
            last = Path(name).name
            if name != holder and last.encode() in content and len(last) > 4:
                yield holder, name, "../" + last[3:]
                break
