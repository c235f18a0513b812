"""torchao's NF4Tensor in a live model: NF4 weights of a linear layer, frozen.

    parts of the whole tensor -> the blocks of this rank's rows, scaler blocks regrouped so that
    every rank has whole ones -> NF4Tensor [rows/world, cols] -> DTensor Shard(0)

`scaler_mean` and the table are the whole tensor's on every rank: torchao's all-gather takes them
from the local shard. `n_blocks` is the whole tensor's count too, as in torchao's own `chunk`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from ckptmap.core.quantized_codes import CodeGrid
from ckptmap.errors import LoadError
from ckptmap.live.model.live_form import (
    Decode,
    LiveForm,
    LoadContext,
    LoadStep,
    NeedsFrozen,
    StoredForm,
    StoredPart,
)
from ckptmap.live.model.live_tensor import LiveTensor, device_for, is_dtensor, local_boxes
from ckptmap.live.model.load_report import Encoded
from ckptmap.live.model.row_sharding import row_shard
from ckptmap.live.model.tensor_reader import TensorReader
from ckptmap.live.quantized.nf4_torchao import from_torchao, live_scaler_block, regroup, to_torchao
from ckptmap.planning.kept_codes import code_grid, writes_keeping_codes
from ckptmap.protocols import Refusal
from ckptmap.quantization.blockwise.chunks import chunk_numel
from ckptmap.quantization.nf4.encoding import (
    DATA,
    FACTOR,
    MEAN,
    PARTS,
    SCALERS,
    TABLE,
    default_encoding,
)
from ckptmap.quantization.nf4.scheme import NF4, NF4Scheme
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Box, TensorInfo

if TYPE_CHECKING:
    import torch

LIVE_CLASS = "NF4Tensor"
ENCODING = "nf4"
CHUNK_NUMEL = 1 << 22
"""Elements that quantizing reads at a time, unless the memory bound asks for fewer."""


class NF4Form(LiveForm):
    """torchao's NF4Tensor, frozen, in a linear layer."""

    scheme = "nf4"
    classes = frozenset({LIVE_CLASS})

    def step(
        self, target: LiveTensor, source: LazyTensor, context: LoadContext
    ) -> LoadStep | Decode | NeedsFrozen | None:
        stored, live = source.encoding == ENCODING, self.is_live(target)
        if not stored and not live:
            return None
        if target.tensor.requires_grad:
            return NeedsFrozen("NF4")
        if stored:
            encoding = cast(NF4, source.encoding_)
            rows = can_hold(target) or rows_of(target, source.info, encoding)
            if isinstance(rows, str):
                return Decode(rows)
            return _replacing(target, source, rows, context, read_rows)
        info = TensorInfo(source.shape, target.dtype)
        rows = _quantizable(target, info, source)
        if isinstance(rows, str):
            raise LoadError(
                "CKM504",
                f"model: {target.fqn} is NF4, but the checkpoint's values cannot be quantized to it: {rows}",
                "make this weight dense before loading",
            )
        step = _replacing(target, source, rows, context, quantize_rows)
        return replace(step, quantizes=not keeps_codes(source, rows))

    def overwrite(self, reader: TensorReader, source: LazyTensor, target: LiveTensor) -> None:
        local = target.local
        _, live, _ = from_torchao(local)
        whole = TensorInfo(source.shape, target.dtype)
        same = source.encoding == ENCODING and source.dtype == target.dtype
        found = cast(NF4, source.encoding_) if same else encoding_for(whole, source, target)
        if (
            isinstance(found, str)
            or found.block_size != live.block_size
            or found.scaler_block_size % live.scaler_block_size
        ):
            why = (
                found
                if isinstance(found, str)
                else f"blocks of {found.block_size} and {found.scaler_block_size}"
            )
            raise LoadError(
                "CKM504",
                f"{target.fqn}: live NF4 has blocks of {live.block_size}, and {live.scaler_block_size} of them a scaler, the"
                f" checkpoint's cannot be regrouped to that: {why}",
                "load it with ckptmap.load, which builds the live tensor anew",
            )
        ((box, _),) = local_boxes(target)
        regrouped = replace(found, scaler_block_size=live.scaler_block_size)
        rows = NF4Rows(TensorInfo(box.sizes, whole.dtype), whole, found, regrouped, box)
        make = read_rows if same else quantize_rows
        made = make(reader, source, rows, local.device)
        for name in PARTS:
            getattr(local, name).copy_(getattr(made, name))

    def quantized(
        self, reader: TensorReader, source: LazyTensor, target: LiveTensor
    ) -> torch.Tensor | None:
        rows = _quantizable(target, source.info, source)
        if isinstance(rows, str):
            return None
        return quantize_rows(reader, source, rows, target.local.device)

    def reads_own_scales(self, source: LazyTensor) -> bool:
        return source.encoding == ENCODING

    def reads_whole(self, source: LazyTensor) -> bool:
        return source.encoding != ENCODING

    def stored(self, target: LiveTensor, fqn: str) -> StoredForm | None:
        return stored_form(target, fqn) if self.is_live(target) else None


def _replacing(
    target: LiveTensor,
    source: LazyTensor,
    rows: NF4Rows,
    context: LoadContext,
    make: Callable[[TensorReader, LazyTensor, NF4Rows, torch.device], torch.Tensor],
) -> LoadStep:
    """Return the step that puts what `make` builds of the rows into the model."""
    stored, live = rows.stored.scaler_block_size, rows.live.scaler_block_size
    device = device_for(target, context.fallback)

    def run(reader: TensorReader) -> None:
        with reader.meter.hold(rows.nbytes, device):
            target.put(make(reader, source, rows, device))

    return LoadStep(
        run,
        encoded=Encoded(target.fqn, ENCODING, stored, live, rows.nbytes),
        becomes=(LIVE_CLASS, rows.info.dtype),
    )


def _quantizable(target: LiveTensor, info: TensorInfo, source: LazyTensor) -> NF4Rows | str:
    """Return this rank's rows of a tensor that is quantized here; a text: why it cannot be."""
    encoding = encoding_for(info, source, target)
    return encoding if isinstance(encoding, str) else rows_of(target, info, encoding)


@dataclass(frozen=True)
class NF4Rows:
    """The rows of one rank, in an encoding whose scaler blocks they fill.

    info    shape and dtype of the rows
    whole   shape and dtype of the tensor
    stored  encoding of the whole tensor
    live    encoding of the rows
    box     the rows in the whole tensor
    """

    info: TensorInfo
    whole: TensorInfo
    stored: NF4
    live: NF4
    box: Box

    @property
    def nbytes(self) -> int:
        """Bytes of the quantized rows."""
        parts = self.live.parts(self.info)
        assert not isinstance(parts, Refusal), parts.reason
        return sum(part.nbytes for part in parts.values())


def can_hold(target: LiveTensor) -> str:
    """Return why the module cannot hold an NF4Tensor; empty: it can."""
    if target.is_buffer:
        return "a buffer cannot be an NF4Tensor"
    if target.is_flat:
        return "FSDP1 keeps flat dense parameters"
    if type(target.local).__name__ == LIVE_CLASS:
        return ""
    for module, _ in target.places:
        if not any("Linear" in cls.__name__ for cls in type(module).__mro__):
            return f"{type(module).__name__} cannot compute with an NF4Tensor"
    return ""


def rows_of(target: LiveTensor, info: TensorInfo, encoding: NF4) -> NF4Rows | str:
    """Return this rank's rows; a text: why they cannot be held as an NF4Tensor."""
    rank, world = 0, 1
    if is_dtensor(target.tensor):
        sharding = row_shard(target, "NF4")
        if isinstance(sharding, str):
            return sharding
        rank, world = sharding
    scaler_block = live_scaler_block(info, encoding, world)
    if scaler_block is None:
        return f"{list(info.shape)} is not cut by {world} ranks into equal rows of whole blocks"
    rows = info.shape[0] // world
    shape = (rows, *info.shape[1:])
    box = Box((rank * rows,) + (0,) * (len(shape) - 1), shape)
    live = replace(encoding, scaler_block_size=scaler_block)
    return NF4Rows(TensorInfo(shape, info.dtype), info, encoding, live, box)


# ------------------------------------------------------------------------------- from NF4


def read_rows(
    reader: TensorReader, source: LazyTensor, rows: NF4Rows, device: torch.device
) -> torch.Tensor:
    """Read the rows of an NF4 tensor of the checkpoint, and no other bytes, as an NF4Tensor."""
    parts = {}
    for name in source.parts:
        box = rows.stored.part_box(rows.whole, name, rows.box)
        assert box is not None
        parts[name] = reader.part(source, name, box, device)
    return _build(parts, rows)


def _build(parts: dict[str, torch.Tensor], rows: NF4Rows) -> torch.Tensor:
    """Return the local NF4Tensor of parts that are cut at the rows' blocks, and of the factors whose
    scaler blocks cover the rows."""
    first, count = _blocks(rows)
    parts = regroup(parts, rows.stored, rows.live.scaler_block_size)
    unit = rows.live.scaler_block_size
    low = first % rows.stored.scaler_block_size // unit
    # A copy, so that no factor of another rank's rows is kept or saved.
    parts[FACTOR] = parts[FACTOR][low : low + count // unit].clone()
    return to_torchao(parts, rows.info, rows.live, rows.whole.numel // rows.live.block_size)


def _blocks(rows: NF4Rows) -> tuple[int, int]:
    """Return the number of the rows' first block in the whole tensor, and the count of blocks."""
    width = math.prod(rows.whole.shape[1:])
    block = rows.stored.block_size
    return rows.box.offsets[0] * width // block, rows.info.numel // block


# ------------------------------------------------------------------------------- to be saved


def stored_form(target: LiveTensor, fqn: str) -> StoredForm:
    """Return the five parts of a live NF4 weight, and what this rank holds of each: a run of every
    1-D part."""
    local, encoding, parts = from_torchao(target.local)
    whole = TensorInfo(tuple(target.tensor.shape), local.dtype)
    expected = encoding.parts(whole)
    assert not isinstance(expected, Refusal), expected.reason
    ((rows, _),) = local_boxes(target)
    found = []
    for name, values in parts.items():
        everywhere = name in (MEAN, TABLE)
        box = encoding.part_box(whole, name, rows)
        assert box is not None
        box = Box.whole(expected[name].shape) if everywhere else box
        alone = everywhere or not is_dtensor(target.tensor)
        found.append(StoredPart(f"{fqn}.{name}", expected[name], box, values, alone))
    return StoredForm(found, encoding.record(whole))


# ------------------------------------------------------------------------------- from dense


def kept_grid(source: LazyTensor) -> CodeGrid | None:
    """Return the grid of NF4 codes that another encoding holds; None: the source has no such codes."""
    grid = code_grid(source)
    return grid if grid is not None and grid.name == "nf4" else None


def keeps_codes(source: LazyTensor, rows: NF4Rows) -> bool:
    """Return whether the source's codes can be kept, so that nothing is quantized here."""
    grid = kept_grid(source)
    return grid is not None and rows.stored.recoder(rows.whole, grid, "cpu") is not None


def encoding_for(info: TensorInfo, source: LazyTensor, target: LiveTensor) -> NF4 | str:
    """Return the encoding of a live NF4 weight that keeps the source's codes where it has them, else that with the
    blocks of the live one; a text: why the weight cannot be NF4. The scaler block follows from the shape, so that
    values do not depend on the ranks that cut it."""
    grid = kept_grid(source)
    kept = NF4Scheme().keeping(info, grid, False) if grid is not None else None
    if isinstance(kept, NF4):
        return kept
    encoding = default_encoding(info, getattr(target.local, "block_size", 64))
    parts = encoding.parts(info)
    return parts.reason if isinstance(parts, Refusal) else encoding


def quantize_rows(
    reader: TensorReader, source: LazyTensor, rows: NF4Rows, device: torch.device
) -> torch.Tensor:
    """Quantize the whole dense tensor as `to_nf4`, and return these rows; keep the codes of a source
    that has NF4 codes.

    Every rank streams the whole tensor, since the scales depend on all of it. It holds one chunk,
    the absmax of every block (1/64 of the elements) and its own rows.
    """
    import torch

    parts = _empty_parts(rows, device)
    grid = kept_grid(source)
    if grid is not None and keeps_codes(source, rows):
        with reader.meter.hold(8 * math.prod(grid.scales), device):
            for write in writes_keeping_codes(source, rows.stored, grid, CHUNK_NUMEL):
                _keep(parts, rows, write.part, write.box, write.values)
        return _build(parts, rows)
    encoder = rows.stored.encoder(rows.whole, str(device))
    with reader.meter.hold(encoder.state_nbytes, device):
        for box, offset in _chunks(rows.whole, rows.stored.block_size, reader.max_memory, device):
            values = torch.empty(box.sizes, dtype=getattr(torch, rows.whole.dtype), device=device)
            with reader.meter.hold(values.numel() * values.element_size(), device):
                reader.decoded(source, box, values)
                for write in encoder.feed(offset, values.view(-1)):
                    _keep(parts, rows, write.part, write.box, write.values)
        for write in encoder.finish():
            _keep(parts, rows, write.part, write.box, write.values)
    return _build(parts, rows)


def _empty_parts(rows: NF4Rows, device: torch.device) -> dict[str, torch.Tensor]:
    """Return part name -> an uninitialised tensor of the size that `_build` takes."""
    import torch

    parts = {}
    for name in (DATA, SCALERS, FACTOR, MEAN, TABLE):
        box = rows.stored.part_box(rows.whole, name, rows.box)
        info = cast(dict[str, TensorInfo], rows.stored.parts(rows.whole))[name]
        assert box is not None
        parts[name] = torch.empty(box.sizes, dtype=getattr(torch, info.dtype), device=device)
    return parts


def _keep(
    parts: dict[str, torch.Tensor], rows: NF4Rows, name: str, box: Box, values: torch.Tensor
) -> None:
    """Copy the elements of a written range of a part that belong to these rows."""
    wanted = rows.stored.part_box(rows.whole, name, rows.box)
    assert wanted is not None
    wanted = wanted if wanted.sizes else Box((0,), (1,))
    common = wanted.intersect(box)
    if common is not None:
        to, come = common.offsets[0] - wanted.offsets[0], common.offsets[0] - box.offsets[0]
        n = common.sizes[0]
        parts[name].view(-1)[to : to + n] = values[come : come + n]


def _chunks(
    info: TensorInfo, block: int, max_memory: int, device: torch.device
) -> list[tuple[Box, int]]:
    """Return boxes of rows that hold whole blocks, each with the number of its first flat element."""
    width = math.prod(info.shape[1:])
    grain = block // math.gcd(block, width)
    numel = min(chunk_numel(device, CHUNK_NUMEL), max_memory // (2 * info.itemsize))
    step = max(1, numel // (width * grain)) * grain
    rest = (0,) * (len(info.shape) - 1)
    return [
        (Box((row, *rest), (min(step, info.shape[0] - row), *info.shape[1:])), row * width)
        for row in range(0, info.shape[0], step)
    ]
