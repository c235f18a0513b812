"""The errors of tensors as a map of layers x projections, and where the map of a plan comes from.

An error is measured on every value: of a tensor against the one of the other checkpoint, or against
what it decodes to after the plan's encoding, which is written to a temporary file for that.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckptmap.checkpoint.compare_tensors import Difference, difference
from ckptmap.errors import RunError
from ckptmap.operations.encode_again import FEED_NUMEL, encoded_writes
from ckptmap.operations.report.collect import layers_of, projection, shown_name
from ckptmap.planning.file_plan import Encode
from ckptmap.planning.kept_codes import writes_keeping_codes
from ckptmap.planning.plan import Plan
from ckptmap.protocols import Group, Refusal, Write
from ckptmap.storage.files import Files
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Extent, StoredTensor

if TYPE_CHECKING:
    import torch

FAR = 4
"""An outlier has an error above this many times the rms of the tensor's errors."""
EXPONENTS = 2200
"""Number of the powers of two that a float64 can be near, from 2**-1100 on."""
MEASURED = ("codes", "quantize", "requantize")
"""Fidelities under which a decoded value can differ from the source's."""


@dataclass(frozen=True)
class TensorError:
    """How far one tensor is from another of its shape.

    relative  rms of the errors over rms of the values
    outliers  values with an error of FAR times the rms of errors, rounded up to a power of two
    index     of the first value that differs
    """

    relative: float
    max_abs: float
    count: int
    numel: int
    outliers: int
    index: tuple[int, ...]


class Spread:
    """Counts errors by their power of two, box by box."""

    def __init__(self) -> None:
        self.squares = 0.0
        self.infinite = 0
        self._counts: torch.Tensor | None = None

    def add(self, delta: torch.Tensor) -> None:
        """Count the errors of one box, float64."""
        import torch

        size = delta.abs().flatten()
        finite = size.isfinite()
        self.infinite += int(finite.logical_not().sum())
        size = size[finite & (size > 0)]
        self.squares += float((size * size).sum())
        exponents = torch.frexp(size).exponent.clamp(-1100, EXPONENTS - 1101).long() + 1100
        counts = torch.bincount(exponents, minlength=EXPONENTS)
        self._counts = counts if self._counts is None else self._counts + counts

    def outliers(self, numel: int) -> int:
        """Return how many errors are above the bound: see `TensorError`."""
        bound = FAR * math.sqrt(self.squares / max(1, numel))
        if self._counts is None or not math.isfinite(bound) or bound <= 0:
            return self.infinite
        # x >= 2**k where frexp gives x an exponent of k + 1 or more.
        first = math.ceil(math.log2(bound)) + 1 + 1100
        return self.infinite + int(self._counts[max(0, first) :].sum())


def measured(a: LazyTensor, b: LazyTensor) -> tuple[Difference | None, TensorError]:
    """Return how the decoded values of two tensors differ, as `diff` does, and the error of b."""
    spread = Spread()
    differ = difference(a, b, spread.add)
    numel = a.info.numel
    if differ is None:
        return None, TensorError(0.0, 0.0, 0, numel, 0, ())
    return differ, TensorError(
        differ.relative, differ.max_abs, differ.count, numel, spread.outliers(numel), differ.index
    )


def errors_of_plan(plan: Plan) -> tuple[dict[str, TensorError], dict[str, RunError]]:
    """Return the error of each tensor that a plan quantizes, by FQN, and why others cannot be.

    Each is encoded and decoded again; one encoded tensor at a time lies in a temporary file.
    """
    errors, refused = {}, {}
    for encode in plan.encodes:
        if encode.fidelity in MEASURED:
            fqn = encode.tensor.fqn
            try:
                with tempfile.TemporaryDirectory(prefix="ckptmap-report-") as folder:
                    errors[fqn] = _error_of(encode, Path(folder) / "parts")
            except RunError as error:  # values that are not finite, for one
                refused[fqn] = error
    return errors, refused


def _error_of(encode: Encode, file: Path) -> TensorError:
    tensor, encoding = encode.tensor, encode.encoding
    infos = encoding.parts(tensor.info)
    assert not isinstance(infos, Refusal), f"{tensor.fqn}: planned, though {infos}"
    starts, end = {}, 0
    for name, info in infos.items():
        starts[name], end = end, end + info.nbytes
    with file.open("wb") as out:
        out.truncate(end)
        for write in _writes(encode):
            out.seek(starts[write.part] + write.box.offsets[0] * infos[write.part].itemsize)
            out.write(_bytes(write))
    files = Files()
    parts = {
        name: StoredTensor(info, Extent(str(file), starts[name], None))
        for name, info in infos.items()
    }
    try:
        again = LazyTensor(tensor.fqn, Group(tensor.fqn, tensor.info, encoding, parts), files)
        return measured(tensor, again)[1]
    finally:
        files.close()


def _writes(encode: Encode) -> Iterator[Write]:
    if encode.keeps is not None:
        yield from writes_keeping_codes(encode.tensor, encode.encoding, encode.keeps, FEED_NUMEL)
    else:
        yield from encoded_writes(encode.tensor, encode.encoding)


def _bytes(write: Write) -> memoryview:
    import torch

    flat = write.values.cpu().contiguous().view(-1).view(torch.uint8)
    return memoryview(flat.numpy().data)


# ----------------------------------------------------------------------------- the map


def error_map(title: str, errors: Mapping[str, TensorError]) -> dict[str, object]:
    """Return the map of one comparison in the form that the page's script draws.

    A cell holds the tensors of one projection in one layer, experts for one: its values are those
    of the worst of them.
    """
    names = list(errors)
    layers, layer_of = layers_of(names)
    projections: dict[str, int] = {}
    cells: dict[tuple[int, int], list[str]] = {}
    for name, layer in zip(names, layer_of, strict=True):
        column = projections.setdefault(projection(name), len(projections))
        cells.setdefault((layer, column), []).append(name)
    rows = [(*at, *_worst(inside, errors), len(inside)) for at, inside in sorted(cells.items())]
    return {
        "title": title,
        "rows": [shown_name(layer) for layer in layers],
        "columns": [shown_name(name) for name in projections],
        "cells": [list(column) for column in zip(*rows, strict=True)],
    }


def _worst(
    names: Sequence[str], errors: Mapping[str, TensorError]
) -> tuple[object, object, object, object, str]:
    name = max(names, key=lambda name: ordered(errors[name].relative))
    error = errors[name]
    outliers = error.outliers / error.numel if error.numel else 0.0
    return plain(error.relative), plain(error.max_abs), outliers, error.count, shown_name(name)


def ordered(value: float) -> float:
    """Return the value to sort by: NaN as infinity."""
    return math.inf if math.isnan(value) else value


def plain(value: float) -> object:
    """Return a number that JSON takes; NaN and infinity as text."""
    return float(f"{value:.6g}") if math.isfinite(value) else str(value)
