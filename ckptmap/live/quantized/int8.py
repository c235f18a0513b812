"""int8 in a live model: this rank's rows of a checkpoint's int8 tensor as torchao's Int8Tensor.

    codes i8 [out, in], scales f32 [out, in / g]
        -> rows of this rank as Int8Tensor, frozen        plain models, DDP, compiled
        -> the same with an all-gather, in a DTensor      fully_shard

Whatever int8 the checkpoint holds (torchao, bitsandbytes, compressed-tensors), the codes are kept.
torchao's class cannot be cut by FSDP2 (0.18: aten.split is missing), so that the shard is one of a
subclass made here, which gathers codes and scales. An
integer tensor would fail as a parameter of its own: only floating ones can require gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from ckptmap import registry
from ckptmap.core.code_grids import Coded, Grid, KeepsCodes
from ckptmap.errors import LoadError, RunError
from ckptmap.live.model.reader import Reader
from ckptmap.live.model.row_sharding import row_shard
from ckptmap.live.model.target import INT8_CLASSES, Target, held, is_dtensor
from ckptmap.live.quantized.nf4 import StoredPart
from ckptmap.protocols import Encoding, Refusal, part_key
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.storage.process_state import quiet_torchao
from ckptmap.tensors import Box, TensorInfo

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Rows:
    """The rows of one rank: their box in the whole tensor, and how scales lie over them.

    dtype     of the live weight, which torchao's tensor appears to have
    sharded   cut by fully_shard
    """

    grid: Grid
    box: Box
    dtype: torch.dtype
    sharded: bool

    @property
    def nbytes(self) -> int:
        """Of codes and scales."""
        blocks = 1
        for size, block in zip(self.box.sizes, self.grid.block, strict=True):
            blocks *= -(-size // block)
        return self.box.numel + 4 * blocks


def is_int8(source: LazyTensor) -> bool:
    return _grid(source) is not None


def _grid(source: LazyTensor) -> Grid | None:
    """That of codes and scales alone; None: another encoding, or one with zero points."""
    coded = source.encoding_
    grid = coded.grid(source.info) if isinstance(coded, Coded) else None
    return grid if grid is not None and grid.name == "int8" else None


def is_live(tensor: torch.Tensor) -> bool:
    return type(tensor).__name__ in INT8_CLASSES


def rows_of(target: Target, source: LazyTensor) -> Rows | str:
    """This rank's rows as they will be held; a text: why they are decoded instead."""
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
    return Rows(grid, box, target.tensor.dtype, is_dtensor(target.tensor))


def _unfit(target: Target, grid: Grid) -> str:
    if target.tensor.requires_grad:
        return "the live weight is trainable, and int8 codes cannot be"
    if target.is_buffer or target.is_flat:
        return "a buffer, or a flat parameter of FSDP1, cannot be an Int8Tensor"
    if len(grid.codes.shape) != 2 or any(
        n % b for n, b in zip(grid.codes.shape, grid.block, strict=True)
    ):
        return f"torchao has no blocks of {list(grid.block)} for {list(grid.codes.shape)}"
    for module, _ in target.places:
        if not any("Linear" in cls.__name__ for cls in type(module).__mro__):
            return f"{type(module).__name__} cannot compute with an Int8Tensor"
    return "" if _torchao() is not None else "torchao 0.15 or later is not installed"


# ------------------------------------------------------------------------------- read


def read_rows(reader: Reader, source: LazyTensor, rows: Rows, device: torch.device) -> torch.Tensor:
    """The rows as torchao's tensor: their codes, and of the scales, which are read whole, theirs."""
    import torch

    codes = torch.empty(rows.box.sizes, dtype=torch.int8, device=device)
    width = rows.box.sizes[1]
    step = max(1, reader.max_memory // (2 * max(1, width)))
    for first in range(0, rows.box.sizes[0], step):
        count = min(step, rows.box.sizes[0] - first)
        box = Box((rows.box.offsets[0] + first, 0), (count, width))
        place = codes.narrow(0, first, count)
        if device.type == "cpu":
            source.read_codes(box, place)
            continue
        with reader.meter.hold(count * width, torch.device("cpu")):
            read = torch.empty(box.sizes, dtype=torch.int8)
            source.read_codes(box, read)
            place.copy_(read)
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
    cls = _sharded_class() if sharded else _torchao()
    made: torch.Tensor = cls(codes, scales, block, dtype)
    return made


def computing_as(old: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """`made` with activations quantized as those of `old` are: the live model says how it computes."""
    for name in ("act_quant_kwargs", "reduce_range"):
        if hasattr(old, name):
            setattr(made, name, getattr(old, name))
    return made


@cache
def _torchao() -> Any:
    """torchao's Int8Tensor; None where there is none."""
    try:
        with quiet_torchao():
            from torchao.quantization import Int8Tensor
    except ImportError:
        return None
    return Int8Tensor


# ------------------------------------------------------------------------------- under FSDP2


@cache
def _sharded_class() -> Any:
    """Int8Tensor with what FSDP2 asks of a shard: views of itself, and an all-gather."""
    import torch

    base, aten = _torchao(), torch.ops.aten
    same = {
        aten.detach.default, aten.alias.default, aten.view.default, aten.as_strided.default,
    }  # fmt: skip

    class ShardedInt8(base):  # type: ignore[misc, valid-type]
        """Views that FSDP2 takes of a shard (`view(-1)`, `as_strided`) are the shard itself: it
        keeps them only to compare and to free memory."""

        def __reduce_ex__(self, protocol: Any) -> Any:
            """Pickled as torchao's own: no file should need this class."""
            plain = base(self.qdata, self.scale, self.block_size, self.dtype)
            return plain.__reduce_ex__(protocol)

        def fsdp_pre_all_gather(
            self, mesh: Any, outer_size: Any = None, outer_stride: Any = None, module: Any = None,
            mp_policy: Any = None,
        ) -> tuple[tuple[torch.Tensor, ...], Any]:  # fmt: skip
            whole = self.scale.shape[0] == 1 and self.qdata.shape[0] == self.block_size[0]
            block = [outer_size[0] if whole else self.block_size[0], self.block_size[1]]
            inner = (self.qdata,) if whole else (self.qdata, self.scale)
            return inner, (block, self.scale if whole else None, self.dtype)

        def fsdp_post_all_gather(
            self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
        ) -> Any:
            block, scale, dtype = metadata
            if out is not None:
                return None
            scale = outputs[1] if scale is None else scale
            return type(self)(outputs[0], scale, block, dtype), outputs

        @classmethod
        def __torch_dispatch__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            first = args[0] if args else None
            if func in same and isinstance(first, cls):
                return cls(first.qdata, first.scale, first.block_size, first.dtype)
            if func is aten.slice.Tensor and isinstance(first, cls) and _is_all(first, args[1:]):
                return cls(first.qdata, first.scale, first.block_size, first.dtype)
            return super().__torch_dispatch__(func, types, args, kwargs or {})

    return ShardedInt8


def _is_all(tensor: torch.Tensor, args: Any) -> bool:
    """Is `slice(dim, start, end)` the whole tensor?"""
    dim, start, end = (*args, *(0, 0, tensor.shape[0])[len(args) :])[:3]
    return not start and (end is None or end >= tensor.shape[dim])


def problem() -> str:
    """What is wrong with shards of int8 here, for `doctor`; empty: they can be made."""
    import torch

    if _torchao() is None:
        return "torchao has no Int8Tensor"
    try:
        shard = _sharded_class()(torch.zeros(2, 4).char(), torch.ones(2, 1), [1, 4], torch.bfloat16)
        same = shard.view(-1).narrow(0, 0, 2).detach()
    except (AttributeError, NotImplementedError, TypeError) as error:
        return f"torchao's Int8Tensor: {error}"
    return "" if same.shape == (2, 4) else "a view of a shard is not the shard"


# ------------------------------------------------------------------------------- to be saved


def stored_parts(target: Target, fqn: str) -> tuple[Mapping[str, Any], list[StoredPart]]:
    """The record of a live int8 weight, and what this rank holds of each part, not copied; parts
    by the names that are stored for `fqn`, `fc._weight_qdata` for one.

    Raises LoadError CKM505 where its zero points are not zero.
    """
    codes, scale, block = _taken_apart(target)
    dtype = str(target.tensor.dtype).removeprefix("torch.")
    whole = TensorInfo(tuple(target.tensor.shape), dtype)
    everywhere = scale.shape[0] == 1 and block[0] == codes.shape[0]
    rows = whole.shape[0] if everywhere else block[0]
    encoding = _encoding(fqn, whole, (rows, *block[1:]), scale.dtype)
    expected = encoding.parts(whole)
    record = encoding.record(whole)
    assert not isinstance(expected, Refusal) and record is not None
    ((box, _),) = held(target)
    found = []
    for part, values in (("qdata", codes), ("scale", scale)):
        where = encoding.part_box(whole, part, box)
        assert where is not None
        alone = not is_dtensor(target.tensor) or (part == "scale" and everywhere)
        key = part_key(encoding, fqn, part)
        found.append(StoredPart(key, expected[part], where, values, alone))
    return record, found


def _taken_apart(target: Target) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """Codes, scales in the shape of their grid, and blocks of a live weight."""
    local: Any = target.local
    if hasattr(local, "int_data"):  # torchao's training weight: a scale a row
        return local.int_data, local.scale.unsqueeze(1), (1, local.shape[1])
    if local.zero_point is not None and bool(local.zero_point.count_nonzero()):
        raise LoadError(
            "CKM505",
            f"model: {target.fqn} is int8 with zero points, expected symmetric codes",
            "quantize it symmetrically, or decode it before saving",
        )
    return local.qdata, local.scale, tuple(local.block_size)


def _encoding(fqn: str, info: TensorInfo, block: tuple[int, ...], scale: torch.dtype) -> Encoding:
    """How torchao's int8 of such blocks and scales is stored."""
    grid = Grid("int8", TensorInfo(info.shape, "int8"), block)
    scheme = next(scheme for scheme in registry.schemes() if scheme.name == "int8")
    made: Any = scheme.keeping(info, grid, exact=True) if isinstance(scheme, KeepsCodes) else None
    assert made is not None, f"{fqn}: {info} in blocks of {block}"
    encoding: Encoding = replace(made, scale_dtype=str(scale).removeprefix("torch."))
    return encoding


# ------------------------------------------------------------------------------- from dense


def quantize_rows(
    reader: Reader, source: LazyTensor, target: Target, device: torch.device
) -> torch.Tensor:
    """Values of the checkpoint as int8 by rows, for a live weight that is int8."""
    import torch

    from ckptmap.quantization.blockwise.quantizer import quantize_rows as by_rows
    from ckptmap.quantization.blockwise.rounding_rules import TorchaoInt8

    old: Any = target.local
    boxes = target.windows(old)
    ((box, _),) = boxes
    values = torch.empty(box.sizes, dtype=target.tensor.dtype, device=device)
    with reader.meter.hold(values.nbytes + box.numel + 4 * box.sizes[0], device):
        reader.decoded(source, box, values)
        made = by_rows(values, TorchaoInt8())
    if not bool(made.absmax.isfinite().all()):
        raise LoadError(
            "CKM115", f"{source.fqn}: expected finite values, found NaN or infinity",
            "repair it, or make this weight dense before loading",
        )  # fmt: skip
    sharded = is_dtensor(target.tensor)
    return _made(made.codes, made.scales.unsqueeze(1), [1, box.sizes[1]], values.dtype, sharded)
