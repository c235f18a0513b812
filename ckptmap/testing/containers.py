"""Check a file format with its writer: what goes in comes out, or nothing appears at the destination."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckptmap.checkpoint.split_roles import is_tensor
from ckptmap.errors import PlanError, SourceError
from ckptmap.execution import manifest as manifests
from ckptmap.mapping.wrappers import strip_wrappers
from ckptmap.operations.convert import convert
from ckptmap.protocols import Container, Directory, OutState, Setup, Writer
from ckptmap.tensors import Path as LeafPath
from ckptmap.testing import samples
from ckptmap.testing.base import bytes_read, claims, expect, indexed, opened, run_all
from ckptmap.testing.images import Broken, check_files, image
from ckptmap.testing.killed import killed
from ckptmap.testing.reading import ReaderKit
from ckptmap.testing.workbench import EXTRA, Workbench

if TYPE_CHECKING:
    import torch

SPARE_NBYTES = 256 << 10
"""Bytes by which opening may read more when tensors grow: windows at the ends of files, no tensor."""


def check_container(
    container: Container | Directory,
    writer: Writer,
    setup: Setup,
    tmp_path: Path,
    world_size: int = 2,
) -> None:
    """Raise AssertionError where the format breaks its protocols or loses a bit.

        from ckptmap.testing import check_container
        def test_my_format(tmp_path):
            check_container(MyReader(), MyWriter(), MY_SETUP, tmp_path)

    None of the three need be registered. For a writer of a framework's directory, `container` is its
    directory adapter. Files are made below `tmp_path`, by torch.save and by the writer. A sharded setup is
    sharded over `world_size` ranks. The checks are the methods named in `ContainerKit.CHECKS`.
    """
    run_all(ContainerKit(container, writer, setup, tmp_path, world_size))


@dataclass
class ContainerKit(Workbench):
    """The checks of `check_container` one by one, for a test each: `getattr(kit, name)()`.

    Subclass it and override `sample` for a format that cannot hold all of the sample tensors.
    """

    CHECKS = (
        "agrees", "slots", "seals", "round_trips", "dtypes", "reads", "deterministic",
        "names", "empties", "records", "duplicates", "crashes", "killed", "headers_only",
    )  # fmt: skip

    # ------------------------------------------------------------------ checks

    def agrees(self) -> None:
        """Check that reader, writer and setup name one format; the writer of a variant adds a suffix: `accelerate-full`."""
        names = (self.container.name, self.writer.name, self.setup.writer)
        form = f"{names[1]}-".startswith(f"{names[0]}-")
        expect(
            names[0] and form and names[1] == names[2],
            f"reader, writer and setup disagree: {names}",
        )
        expect(
            strip_wrappers([".".join((*self.setup.wrap, "w"))])
            == {".".join((*self.setup.wrap, "w")): "w"},
            f"{self.setup.name}: the wrappers {self.setup.wrap} are not recognised again",
        )

    def slots(self) -> None:
        """Check that slots do not overlap, lie inside their files, and hold every element; files stay in the destination."""
        for world_size in (1, 2, 3) if self.setup.sharded else (1,):
            options = {"world_size": world_size} if self.setup.sharded else {}
            plan = self.planned(self.source, **options)
            state, name, files = self.writer_call(plan)
            check_files(files, self.setup.name)
            expect(
                not self.writer.one_file or len(files) == 1,
                f"{self.setup.name}: one_file, but {len(files)} files",
            )
            files_again = self.writer.files(state, name)
            for a, b in zip(files, files_again, strict=True):
                is_equal = (a.name, a.nbytes, list(a.slots)) == (b.name, b.nbytes, list(b.slots))
                expect(
                    is_equal,
                    f"{self.setup.name}: {a.name} is laid out differently when asked again",
                )

    def seals(self) -> None:
        """Check that slots and seal together write every byte of a file, and the file has the announced size."""
        plan = self.planned(self.source)
        _, _, files = self.writer_call(plan)
        tensors = self.expected_tensors(plan)
        for out in files:
            for manifest in (None, b'{"kit": 1}') if out.holds_manifest else (None,):
                zeroed_image = image(out, tensors, 0xAA, manifest)
                sealed_again = image(out, tensors, 0xAA, manifest)
                expect(
                    sealed_again == zeroed_image,
                    f"{self.setup.name}: {out.name}: sealed again, other bytes",
                )
                filled_image = image(out, tensors, 0x55, manifest)
                unwritten = [
                    i
                    for i, (a, b) in enumerate(zip(zeroed_image, filled_image, strict=True))
                    if a != b
                ]
                expect(
                    not unwritten,
                    f"{self.setup.name}: {out.name}: nothing writes byte {unwritten[:1]} ({len(unwritten)} such)",
                )
                expect(
                    manifest is not None or len(zeroed_image) == out.nbytes,
                    f"{self.setup.name}: {out.name}: {len(zeroed_image)} bytes, {out.nbytes} were said",
                )

    def round_trips(self) -> None:
        """Check that tensors, names, ties and plain values are read back; the files hold the planned bytes."""
        plan = self.planned(self.source)
        _, _, files = self.writer_call(plan)
        tensors = self.expected_tensors(plan)
        with opened(self.output, self.container) as ckpt:
            manifest = None if ckpt.index.manifest is None else ckpt.index.manifest()
            for out in files:
                file = self.output if self.writer.one_file else self.output / out.name
                expected = image(out, tensors, 0, manifest)
                expect(
                    file.read_bytes() == expected,
                    f"{self.setup.name}: {out.name}: other bytes than slots and seal give",
                )
            for key, value in EXTRA.items():
                if self.setup.has_place_for((key,)):
                    stored = ckpt.extra.get(key)
                    expect(
                        stored == value,
                        f"{self.setup.name}: extra {key}: {stored!r}, was {value!r}",
                    )
        for seed in (2, 3):
            self._round_trip(f"state_{seed}", self.sample(seed, ("bfloat16", "int32")))

    def _round_trip(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        source = samples.save(self.tmp_path / f"{name}.pt", tensors, {})
        out = self.converted(source, f"{name}_out")
        ReaderKit(self.container, out, tensors, self.tmp_path / f"{name}_read").values()

    def dtypes(self) -> None:
        """Check that every dtype is stored bit for bit, or refused by PlanError before a byte is written."""
        accepted: dict[str, torch.Tensor] = {}
        for dtype in samples.dtypes():
            tensors = samples.of_dtype(dtype)
            source = samples.save(self.tmp_path / f"{dtype}.pt", tensors, {})
            try:
                self.planned(source)
            except PlanError:
                continue
            accepted |= {f"{dtype}.{key}": tensor for key, tensor in tensors.items()}
        for dtype in ("float32", "bfloat16", "float16", "int64"):
            expect(f"{dtype}.w" in accepted, f"{self.setup.name}: refuses {dtype}")
        self._round_trip("dtypes", accepted)

    def reads(self) -> None:
        """Check that the output passes every check of `check_reader`."""
        run_all(ReaderKit(self.container, self.output, self.tensors, self.tmp_path / "reading"))

    def deterministic(self) -> None:
        """Check that a second run writes the same bytes, with any number of threads."""
        first = contents(self.output)
        for threads in (1, 4):
            files = contents(self.converted(self.source, f"threads_{threads}", threads=threads))
            differing = [name for name in first | files if first.get(name) != files.get(name)]
            expect(not differing, f"{self.setup.name}: {threads} threads: {differing[:1]} differs")

    def names(self) -> None:
        """Check that an odd name is stored, or refused by PlanError before a byte is written."""
        failures = {}
        for number, key in enumerate(samples.ODD_KEYS):
            tensors = {key: samples.bits((2, 3), "float32", number), "other": self.small_tensor}
            try:
                self._round_trip(f"odd_{number}", tensors)
            except (SourceError, PlanError):
                continue
            except Exception as error:
                failures[key] = f"{type(error).__name__}: {error}"
        for key, text in failures.items():
            expect(False, f"{self.setup.name}: {key!r:.40} ({len(failures)} such names): {text}")

    def empties(self) -> None:
        """Check that tensors without elements, and without dims, keep their shapes."""
        shapes = ((), (0,), (0, 3), (3, 0), (1, 0, 2))
        tensors = {f"e{i}.weight": samples.bits(s, "float32", i) for i, s in enumerate(shapes)}
        self._round_trip("empties", {**tensors, "other": self.small_tensor})

    def records(self) -> None:
        """Check that records of encodings are read back from the files, without a manifest.

        A format that cannot store records raises PlanError, or its setup is `dense`.
        """
        if self.setup.dense:
            return
        state, name, _ = self.writer_call(self.planned(self.source))
        key = ".".join(map(str, state.tensors[0].path))
        records = {key: {"scheme": "kit", "version": 1, "shape": [2, 3], "größe": None}}
        state = replace(state, extra={}, records=records)
        try:
            files = self.writer.files(state, name)
        except PlanError:
            return
        tensors = self.expected_tensors(self.planned(self.source))
        folder = self.tmp_path / "records"
        folder.mkdir()
        for out in files:
            (folder / out.name).parent.mkdir(parents=True, exist_ok=True)
            (folder / out.name).write_bytes(image(out, tensors))
        path = folder / files[0].name if self.writer.one_file else folder
        expect(claims(self.container, path), f"{self.setup.name}: with records it is not claimed")
        index = indexed(self.container, path)
        expect(index.records == records, f"{self.setup.name}: records {index.records}, {records}")
        keys = {".".join(map(str, path)) for path, leaf in index.leaves.items() if is_tensor(leaf)}
        expect(key in keys, f"{self.setup.name}: without a manifest {key} is not read")

    def duplicates(self) -> None:
        """Check that a tensor path that occurs twice is refused by PlanError, as is a plain value at a tensor's path."""
        plan = self.planned(self.source)
        state, name, _ = self.writer_call(plan)
        tensor = next(t for t in state.tensors if t.alias_of is None)
        self._refused(replace(state, tensors=[*state.tensors, tensor]), name, tensor.path)
        if self.setup.holds_extra and self.setup.places is None and self.setup.filing is None:
            extra = {**state.extra, tensor.path: 7}
            self._refused(replace(state, extra=extra), name, tensor.path)

    def _refused(self, state: OutState, name: str, path: LeafPath) -> None:
        try:
            self.writer.files(state, name)
        except PlanError:
            return
        except Exception as error:
            kind = type(error).__name__
            raise AssertionError(
                f"{self.setup.name}: {path} twice raises {kind}, expected PlanError: {error}"
            ) from error
        raise AssertionError(f"{self.setup.name}: {path} twice, and it is written")

    # ------------------------------------------------------------------ faults

    def crashes(self) -> None:
        """Check that, if sealing fails, nothing is published, and the same command continues the run."""

        def full() -> None:
            raise OSError(errno.ENOSPC, "no space, says the kit")

        self._interrupted("crashed", full)

    def killed(self) -> None:
        """Check that, if the process is killed, nothing is published, and the same command continues the run."""
        if hasattr(os, "fork"):
            self._interrupted("killed", None)

    def _interrupted(self, name: str, fault: Callable[[], None] | None) -> None:
        out = self.tmp_path / name / "out"
        out.parent.mkdir()

        def run(fault: Callable[[], None]) -> None:
            with self.together(Broken(self.writer, fault)):
                convert(self.source, out, self.setup.name, **self.options)

        if fault is None:
            killed(run)
        else:
            try:
                run(fault)
            except Exception:
                pass
            else:
                raise AssertionError(f"{self.setup.name}: a failing seal went unnoticed")
        expect(
            not out.exists(), f"{self.setup.name}: {name} while sealing, and {out.name} is there"
        )
        with self.together():
            convert(self.source, out, self.setup.name, **self.options)
        self._equal(contents(out), contents(self.output), name)
        leftovers = [path.name for path in out.parent.iterdir() if path != out]
        expect(
            not leftovers,
            f"{self.setup.name}: {name}, continued, and {leftovers[:1]} is left beside it",
        )

    def _equal(self, files: Mapping[str, bytes], whole: Mapping[str, bytes], name: str) -> None:
        differing = [file for file in {**files, **whole} if files.get(file) != whole.get(file)]
        differing = [file for file in differing if file != manifests.NAME]
        expect(not differing, f"{self.setup.name}: {name}, continued, and {differing[:1]} differs")

    def headers_only(self) -> None:
        """Check that opening reads no more of a large checkpoint than of a small one: headers only."""
        import torch

        counts = []
        for rows in (8, 512):
            tensors = {f"layers.{i}.weight": torch.zeros(rows, 1024) for i in range(4)}
            source = samples.save(self.tmp_path / f"rows_{rows}.pt", tensors, {})
            out = self.converted(source, f"rows_{rows}_out")
            for _ in range(2):  # the first time modules are imported, which reads them
                with bytes_read() as count, opened(out, self.container) as ckpt:
                    expect(len(ckpt) == 4, f"{self.setup.name}: {len(ckpt)} tensors of 4")
            counts.append(count[0])
        grown = counts[1] - counts[0]
        expect(
            grown <= SPARE_NBYTES,
            f"{self.setup.name}: opening 8 MiB reads {grown} bytes more than opening 128 KiB",
        )
        shutil.rmtree(self.tmp_path / "rows_512_out", ignore_errors=True)


def contents(path: Path) -> dict[str, bytes]:
    """Return the bytes of every file below `path` by name; a single file has the name `""`."""
    if path.is_file():
        return {"": path.read_bytes()}
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path)): file.read_bytes() for file in files}
