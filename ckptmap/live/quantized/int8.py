"""torchao's Int8Tensor in a live model: int8 weights of a linear layer, frozen.

    codes i8 [out, in], scales f32 [out, in / g]
        -> rows of this rank as Int8Tensor, frozen        plain models, DDP, compiled
        -> the same with an all-gather, in a DTensor      fully_shard

The codes of torchao, bitsandbytes and compressed-tensors are kept. FSDP2 cannot cut torchao's class,
so that a shard is of a subclass (see `int8_sharded`). The codes cannot be a parameter of their own:
only floating tensors can require gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from ckptmap.core.quantized_codes import Coded, CodeGrid
from ckptmap.errors import LoadError, RunError
from ckptmap.live.model.live_form import (
    Decode,
    LiveForm,
    LoadContext,
    LoadStep,
    StoredForm,
)
from ckptmap.live.model.live_tensor import LiveTensor, device_for, is_dtensor
from ckptmap.live.model.load_report import Encoded
from ckptmap.live.model.row_sharding import row_shard
from ckptmap.live.model.tensor_reader import TensorReader
from ckptmap.live.quantized import int8_activations
from ckptmap.live.quantized.int8_sharded import sharded_class, torchao_class
from ckptmap.live.quantized.int8_stored import stored_int8
from ckptmap.protocols.offers import offers
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Box

if TYPE_CHECKING:
    import torch

LIVE_CLASSES = ("Int8Tensor", "ShardedInt8")
"""Of a whole weight, and of one that fully_shard cuts."""
ENCODING = "int8"
SAVED_BY_TORCH = "save it with torch.save(model.state_dict(), PATH), which ckptmap reads"
OWN_WEIGHTS = {"Linear4bit", "Linear8bitLt"}
"""Linear layers of bitsandbytes, which compute with weights of its classes only."""


class Int8Weight(Protocol):
    """torchao's Int8Tensor."""

    qdata: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    block_size: Sequence[int]


class Int8Form(LiveForm):
    """torchao's Int8Tensor, frozen, in a linear layer."""

    scheme = "int8"
    classes = frozenset(LIVE_CLASSES)

    def step(
        self, target: LiveTensor, source: LazyTensor, context: LoadContext
    ) -> LoadStep | Decode | None:
        device = device_for(target, context.fallback)
        if self.is_live(target):
            _refuse_factors(target, ("act_pre_scale",), "load before smoothing and quantizing it")
        if is_int8(source):
            rows = rows_of(target, source)
            if isinstance(rows, str):
                return Decode(rows)
            return _kept(target, source, rows, device, self.is_live(target))
        if not self.is_live(target):
            return None

        def run(reader: TensorReader) -> None:
            made = quantize_rows(reader, source, target, device)
            target.put(_computing_as(target.local, made))

        return LoadStep(run, quantizes=True)

    def overwrite(self, reader: TensorReader, source: LazyTensor, target: LiveTensor) -> None:
        device = target.local.device
        rows = rows_of(target, source) if is_int8(source) else ""
        if isinstance(rows, str):
            made = quantize_rows(reader, source, target, device)
        else:
            made = read_rows(reader, source, rows, device)
        live = target.local
        assert _is_int8_weight(live) and _is_int8_weight(made)
        if live.scale.numel() != made.scale.numel():
            raise LoadError(
                "CKM504",
                f"{target.fqn}: live int8 has blocks of {list(live.block_size)}, the checkpoint's are"
                f" {list(made.block_size)}",
                "load it with ckptmap.load, which builds the live tensor anew",
            )
        live.qdata.copy_(made.qdata)
        live.scale.copy_(made.scale.view(live.scale.shape))

    def quantized(
        self, reader: TensorReader, source: LazyTensor, target: LiveTensor
    ) -> torch.Tensor | None:
        return quantize_rows(reader, source, target, target.local.device)

    def decides_by(self, source: LazyTensor) -> Iterable[str]:
        """Return the scales and zero points: a weight whose zero points are not zero is decoded."""
        coded = source.encoding_
        if offers(coded, Coded) and is_int8(source):
            return coded.scale_parts(source.info)
        return ()

    def stored(self, target: LiveTensor, fqn: str) -> StoredForm | None:
        return stored_int8(target, fqn, *_plain_parts(target)) if self.is_live(target) else None


def _kept(
    target: LiveTensor, source: LazyTensor, rows: Int8Rows, device: torch.device, is_live: bool
) -> LoadStep:
    """Return the step that puts the checkpoint's codes into the model."""
    activations, said = int8_activations.decide(target.local, is_live, source)

    def run(reader: TensorReader) -> None:
        with reader.meter.hold(rows.nbytes, device):
            made: Any = _computing_as(target.local, read_rows(reader, source, rows, device))
            made.act_quant_kwargs = activations
            target.put(made)

    return LoadStep(
        run,
        encoded=Encoded(target.fqn, f"{ENCODING}, {said}" if said else ENCODING, 0, 0, rows.nbytes),
        becomes=(LIVE_CLASSES[rows.sharded], target.dtype),
    )


@dataclass(frozen=True)
class Int8Rows:
    """The rows of one rank.

    grid     the blocks of the whole tensor that share one scale each
    box      the rows in the whole tensor
    dtype    dtype of the live weight, which torchao's tensor appears to have
    sharded  True: fully_shard cuts the weight
    """

    grid: CodeGrid
    box: Box
    dtype: torch.dtype
    sharded: bool

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        blocks = 1
        for size, block in zip(self.box.sizes, self.grid.block, strict=True):
            blocks *= -(-size // block)
        return self.box.numel + 4 * blocks


def is_int8(source: LazyTensor) -> bool:
    return _grid(source) is not None


def _grid(source: LazyTensor) -> CodeGrid | None:
    """Return the grid of int8 codes; None: the source is of another encoding."""
    coded = source.encoding_
    grid = coded.grid(source.info) if offers(coded, Coded) else None
    return grid if grid is not None and grid.name == "int8" else None


def rows_of(target: LiveTensor, source: LazyTensor) -> Int8Rows | str:
    """Return this rank's rows; a text: why the weight must be decoded instead."""
    grid = _grid(source)
    assert grid is not None, f"{source.fqn}: {source.encoding} is not int8"
    reason = _unfit(target, grid)
    if reason:
        return reason
    rank, world = 0, 1
    if is_dtensor(target.tensor):
        sharding = row_shard(target, "int8")
        if isinstance(sharding, str):
            return sharding
        rank, world = sharding
    rows, rest = divmod(source.shape[0], world)
    if rest or not rows or (grid.block[0] < source.shape[0] and rows % grid.block[0]):
        return f"{list(source.shape)} is not cut by {world} ranks into equal rows of whole blocks"
    try:
        source.read_scales()
    except RunError as error:  # zero points that are not zero
        return error.message
    box = Box((rank * rows, 0), (rows, source.shape[1]))
    return Int8Rows(grid, box, target.tensor.dtype, is_dtensor(target.tensor))


def _unfit(target: LiveTensor, grid: CodeGrid) -> str:
    if target.tensor.requires_grad:
        return "the live weight is trainable, and int8 codes cannot be"
    if target.is_buffer or target.is_flat:
        return "a buffer, or a flat parameter of FSDP1, cannot be an Int8Tensor"
    if len(grid.codes.shape) != 2 or any(
        n % b for n, b in zip(grid.codes.shape, grid.block, strict=True)
    ):
        return f"torchao has no blocks of {list(grid.block)} for {list(grid.codes.shape)}"
    for module, _ in target.places:
        kinds = {cls.__name__ for cls in type(module).__mro__}
        if not any("Linear" in kind for kind in kinds) or kinds & OWN_WEIGHTS:
            return f"{type(module).__name__} cannot compute with an Int8Tensor"
    return "" if torchao_class() is not None else "torchao 0.15 or later is not installed"


# ------------------------------------------------------------------------------- read


def read_rows(
    reader: TensorReader, source: LazyTensor, rows: Int8Rows, device: torch.device
) -> torch.Tensor:
    """Return the rows as torchao's tensor. The scales are read whole, and those of the rows kept."""
    import torch

    codes = torch.empty(rows.box.sizes, dtype=torch.int8, device=device)
    reader.codes(source, rows.box, codes)
    scales = source.read_scales()
    _refuse_infinite(source, scales)
    block = rows.grid.block[0]
    if scales.shape[0] > 1:
        scales = scales.narrow(0, rows.box.offsets[0] // block, rows.box.sizes[0] // block)
    blocks = [min(b, n) for b, n in zip(rows.grid.block, rows.box.sizes, strict=True)]
    # A copy, so that no scale of another rank's rows is kept.
    return _made(codes, scales.clone().to(device), blocks, rows.dtype, rows.sharded)


def _refuse_infinite(source: LazyTensor, scales: torch.Tensor) -> None:
    if not bool(scales.isfinite().all()):
        raise LoadError(
            "CKM115",
            f"{source.fqn}: expected finite scales, found NaN or infinity",
            "it was quantized from values that were not finite; convert the original again",
        )


def _made(
    codes: torch.Tensor, scales: torch.Tensor, block: list[int], dtype: torch.dtype, sharded: bool
) -> torch.Tensor:
    cls = sharded_class() if sharded else torchao_class()
    made: torch.Tensor = cls(codes, scales, block, dtype)
    return made


def _computing_as(old: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """Return `made` with the settings of `old` for quantizing activations: the live model decides how
    it computes. Zero points, which are 0, stay where it has some: torchao copies only what both have."""
    for name in ("act_quant_kwargs", "act_quant_scale", "act_quant_zero_point", "reduce_range"):
        if hasattr(old, name):
            setattr(made, name, getattr(old, name))
    live, new = old, made
    if _is_int8_weight(live) and _is_int8_weight(new) and live.zero_point is not None:
        new.zero_point = new.scale.new_zeros(new.scale.shape, dtype=live.zero_point.dtype)
    return made


# ------------------------------------------------------------------------------- to be saved


def _is_int8_weight(tensor: torch.Tensor) -> TypeGuard[Int8Weight]:
    return type(tensor).__name__ in LIVE_CLASSES


def _plain_parts(target: LiveTensor) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """Return codes, scales in the shape of their grid, and blocks of a live weight.

    Raises LoadError CKM505 where its zero points are not zero, or factors of its activations belong to it.
    """
    local = target.local
    assert _is_int8_weight(local)
    _refuse_factors(target, ("act_pre_scale", "act_quant_scale"), SAVED_BY_TORCH)
    if local.zero_point is not None and bool(local.zero_point.count_nonzero()):
        raise LoadError(
            "CKM505",
            f"model: {target.fqn} is int8 with zero points, expected symmetric codes",
            "quantize it symmetrically, or decode it before saving",
        )
    return local.qdata, local.scale, tuple(local.block_size)


def _refuse_factors(target: LiveTensor, names: Sequence[str], hint: str) -> None:
    """Raise LoadError CKM505 where the live weight has one of these tensors beside its codes and scales."""
    found = [name for name in names if getattr(target.local, name, None) is not None]
    if found:
        raise LoadError(
            "CKM505",
            f"model: {target.fqn} is int8 with {found[0]}, expected codes and scales of the weight alone",
            hint,
        )


# ------------------------------------------------------------------------------- from dense


def quantize_rows(
    reader: TensorReader, source: LazyTensor, target: LiveTensor, device: torch.device
) -> torch.Tensor:
    """Quantize values of the checkpoint to int8 by torchao's rule: in the blocks of the live weight, else with one
    scale a row."""
    import torch

    from ckptmap.quantization.blockwise.quantizer import quantize_rows as by_rows
    from ckptmap.quantization.blockwise.rounding_rules import TorchaoInt8

    ((box, _),) = target.windows(target.local)
    values = torch.empty(box.sizes, dtype=target.tensor.dtype, device=device)
    block = _block_to_make(target)
    rule = TorchaoInt8(reduce_range=bool(getattr(target.local, "reduce_range", False)))
    with reader.meter.hold(values.nbytes + box.numel + 4 * box.sizes[0], device):
        reader.decoded(source, box, values)
        made = by_rows(values.view(-1, math.prod(block)), rule)
    if not bool(made.absmax.isfinite().all()):
        raise LoadError(
            "CKM115", f"{source.fqn}: expected finite values, found NaN or infinity",
            "repair it, or make this weight dense before loading",
        )  # fmt: skip
    sharded = is_dtensor(target.tensor)
    scales = made.scales.view(box.sizes[0] // block[0], box.sizes[1] // block[1])
    return _made(made.codes.view(box.sizes), scales, block, values.dtype, sharded)


def _block_to_make(target: LiveTensor) -> list[int]:
    """Return the blocks of this rank's rows that are quantized here: runs of a row, or all of a weight that is not
    cut. The scale of other blocks would need values of other ranks, or tiles."""
    rows, columns = target.local.shape
    block = list(getattr(target.local, "block_size", ()))
    runs = len(block) == 2 and block[0] == 1 and columns % block[1] == 0
    whole = block == [rows, columns] and not is_dtensor(target.tensor)
    return block if runs or whole else [1, columns]
