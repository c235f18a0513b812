"""Plain NF4 parts to torchao's NF4Tensor and back, and the scaler blocks of its shards."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ckptmap.errors import LoadError
from ckptmap.protocols import Refusal
from ckptmap.quantization.nf4.encoding import FACTOR, NF4, PARTS, TABLE
from ckptmap.storage.lazy_tensor import info_of
from ckptmap.storage.process_guards import quiet_torchao
from ckptmap.tensors import TensorInfo, contiguous_strides

if TYPE_CHECKING:
    import torch

# torchao >= 0.18, then up to 0.17. `import a.b as c` fails on the first: a function of torchao
# hides the package.
_MODULES = (
    "torchao.quantization.quantize_.workflows.nf4.nf4_tensor",
    "torchao.dtypes.nf4tensor",
)


def live_scaler_block(info: TensorInfo, encoding: NF4, world_size: int) -> int | None:
    """Return the largest scaler block with which FSDP2 can cut the tensor over dim 0: that of the
    encoding, or a divisor of it. None: rows do not split evenly, or not at a block."""
    if not info.shape or info.shape[0] % world_size:
        return None
    blocks, rest = divmod(info.numel // world_size, encoding.block_size)
    return math.gcd(encoding.scaler_block_size, blocks) if blocks and not rest else None


def regroup(
    parts: Mapping[str, torch.Tensor], encoding: NF4, scaler_block_size: int
) -> dict[str, torch.Tensor]:
    """Return the parts with a smaller scaler block, which divides the present one. Every factor is
    repeated, `[n/block/s0] -> [n/block/s]`, and the decoded values are the same bits."""
    times, rest = divmod(encoding.scaler_block_size, scaler_block_size)
    if rest:
        raise ValueError(
            f"scaler block {scaler_block_size} does not divide {encoding.scaler_block_size}"
        )
    return {**parts, FACTOR: parts[FACTOR].repeat_interleave(times)}


def _module() -> ModuleType:
    for name in _MODULES:
        try:
            with quiet_torchao():
                return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise LoadError("CKM505", "torchao has no NF4Tensor", "pip install -U torchao")


def to_torchao(
    parts: Mapping[str, torch.Tensor], info: TensorInfo, encoding: NF4, n_blocks: int | None = None
) -> torch.Tensor:
    """Return an NF4Tensor of the installed torchao over these parts, not copied, without gradient.

    For a rank's rows pass their `info`, and the whole tensor's count as `n_blocks`, as torchao's own
    `chunk` does. Raises ValueError where the parts do not fit `info`."""
    import torch

    expected = encoding.parts(info)
    if isinstance(expected, Refusal):
        raise ValueError(expected.reason)
    for name, want in expected.items():
        found = info_of(parts[name])
        if found != want:
            raise ValueError(f"NF4 part {name!r}, expected {want}, found {found}")
    module = _module()
    meta = module.SubclassTensorArgs(
        torch.Size(info.shape),
        contiguous_strides(info.shape, 1),
        0,
        parts[TABLE].dtype,
        parts[TABLE].device,
        False,
    )
    context = {
        "block_size": encoding.block_size,
        "n_blocks": n_blocks or info.numel // encoding.block_size,
        "scaler_block_size": encoding.scaler_block_size,
        "tensor_meta": meta,
    }
    inner = {name: parts[name] for name in PARTS}
    tensor: torch.Tensor = module.NF4Tensor.__tensor_unflatten__(inner, context, None, None)
    return tensor


def from_torchao(tensor: torch.Tensor) -> tuple[TensorInfo, NF4, dict[str, torch.Tensor]]:
    """Return shape, encoding and parts, not copied, of a live NF4Tensor (or a rank's rows of one).

    Raises LoadError CKM115 where the tensor's dtype is not that of its parts: after
    `module.half()` or `.to(dtype)` an NF4Tensor keeps its old parts under a new dtype.
    """
    live: Any = tensor
    dtype, label = live.nf4.dtype, tensor.dtype
    if dtype != label:
        raise LoadError(
            "CKM115",
            f"an NF4Tensor labelled {label} holds {dtype} parts: module.to() or .half() was "
            "called on it",
            "quantize again after casting",
        )
    info = TensorInfo(tuple(tensor.shape), str(dtype).removeprefix("torch."))
    encoding = NF4(live.block_size, live.scaler_block_size)
    return info, encoding, {name: getattr(live, name) for name in PARTS}
