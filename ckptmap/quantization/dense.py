"""Dense tensors: stored unchanged, or cast to another floating dtype.

    w [...] T  ->  "" [...] T, the bytes as they are;  or  "" [...] U = w.to(U), bit-equal to torch

A flat range of an n-D part is not a rectangle, so encoders work on FLAT row-major coordinates, here and
in every other encoding. `feed(offset, values)` takes 1-D values that start at flat element `offset`. A
`Write` has a 1-D box over the flattened part, `Box((start,), (count,))`, with 1-D values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptmap.core.formatting import counted
from ckptmap.errors import RunError
from ckptmap.protocols import Encoder, Encoding, Group, Refusal, Write
from ckptmap.protocols.encodings import Records
from ckptmap.tensors import FLOATING, Box, Cut, Opaque, StoredTensor, TensorInfo

if TYPE_CHECKING:
    import torch

# It holds powers of two only, no zero: such tensors are scales, and a cast would destroy them.
_EXPONENTS = "float8_e8m0fnu"

_LARGEST: Mapping[str, float] = {
    "float16": 65504.0,
    "bfloat16": 3.3895313892515355e38,
    "float32": 3.4028234663852886e38,
    "float64": 1.7976931348623157e308,
}
_SUFFIXES: Mapping[str, str] = {"bfloat16": "-bf16", "float32": "-fp32"}


def flat(start: int, count: int) -> Box:
    """Return a range of a flattened part."""
    return Box((start,), (count,))


@dataclass(frozen=True)
class Dense:
    """Stores the tensor unchanged, as one part named `""`."""

    name = "dense"

    def parts(self, info: TensorInfo) -> Mapping[str, TensorInfo] | Refusal:
        return {"": info}

    def part_box(self, info: TensorInfo, part: str, box: Box) -> Box | None:
        return box

    def decode(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box, out: torch.Tensor
    ) -> None:
        out.copy_(parts[""])

    def encoder(self, info: TensorInfo, device: str) -> Encoder:
        return DenseEncoder()

    def record(self, info: TensorInfo) -> Mapping[str, object] | None:
        return None


class DenseEncoder:
    """Writes values unchanged."""

    step = 1
    splittable = True
    state_nbytes = 0

    def feed(self, offset: int, values: torch.Tensor) -> Iterable[Write]:
        return (Write("", flat(offset, values.numel()), values),)

    def finish(self) -> Iterable[Write]:
        return ()


def _is_finite(values: torch.Tensor) -> bool:
    """Return whether all values are finite, by a maximum of bits: 10 times faster than `isfinite().all()`."""
    import torch

    integer = torch.int16 if values.element_size() == 2 else torch.int32
    mask = torch.iinfo(integer).max
    infinity = torch.tensor(torch.inf, dtype=values.dtype).view(integer)
    return bool(values.view(integer).bitwise_and(mask).amax() < infinity)


@dataclass(frozen=True)
class DenseAs(Dense):
    """Stores the tensor cast to `dtype`, bit-equal to `torch.Tensor.to`; when read it is `Dense`."""

    dtype: str

    def parts(self, info: TensorInfo) -> Mapping[str, TensorInfo] | Refusal:
        return {"": TensorInfo(info.shape, self.dtype)}

    def encoder(self, info: TensorInfo, device: str) -> Encoder:
        return CastEncoder(info.dtype, self.dtype)


class CastEncoder:
    """Casts box by box; `finish` raises if a finite value became infinite.

    Such values are counted on the device without synchronizing. Several threads may feed one encoder. NaN
    and infinity of the input are kept.
    """

    step = 1
    splittable = True
    state_nbytes = 0

    def __init__(self, source: str, dtype: str) -> None:
        self._dtype = dtype
        self._narrows = _LARGEST.get(source, 0.0) > _LARGEST[dtype]
        self._overflows: list[tuple[torch.Tensor, torch.Tensor]] = []

    def feed(self, offset: int, values: torch.Tensor) -> Iterable[Write]:
        import torch

        cast = values.to(getattr(torch, self._dtype))
        # On the CPU this check is free and saves the count; on a GPU it would wait for the device.
        if self._narrows and values.numel() and not (values.is_cpu and _is_finite(cast)):
            self._note_overflow(values, cast)
        return (Write("", flat(offset, values.numel()), cast),)

    def _note_overflow(self, values: torch.Tensor, cast: torch.Tensor) -> None:
        import torch

        magnitude = values.abs()
        lost = cast.isinf().logical_and_(magnitude != torch.inf)
        if lost.is_cpu and not bool(
            lost.any()
        ):  # nothing is kept of NaN and infinity that were there
            return
        # The count stays where the values are; an append is atomic, an addition would not be.
        self._overflows.append((lost.sum(), magnitude.mul_(lost).nan_to_num_(0.0).amax()))

    def finish(self) -> Iterable[Write]:
        """Raise RunError CKM309 where finite values became infinite; there is nothing to write."""
        import torch

        if not self._overflows:
            return ()
        # One number is waited for, not one a box.
        count = int(torch.stack([lost for lost, _ in self._overflows]).sum())
        if count:
            largest = max(float(peak) for _, peak in self._overflows)
            raise RunError(
                "CKM309",
                f"{counted(count, 'finite value', 'overflows', 'overflow')} {self._dtype}: expected at most "
                f"{_LARGEST[self._dtype]:.6g}, found {largest:.6g}",
                _wider(largest) + "leave this tensor as it is with --no-encode",
            )
        return ()


def _wider(largest: float) -> str:
    """Return the beginning of a hint: which setups hold such a value, "" where none does."""
    found = [suffix for dtype, suffix in _SUFFIXES.items() if largest <= _LARGEST[dtype]]
    return f"take a setup with {' or '.join(found)}, or " if found else ""


class CastScheme:
    """A target that casts every floating tensor to one dtype, which a subclass names."""

    name: str
    suffix: str
    dtype: str
    takes_by_form = True

    def group(
        self, stored: Mapping[str, StoredTensor], records: Records
    ) -> list[tuple[Group, Sequence[str]]]:
        return []

    def adopt(self, fqn: str, leaf: Opaque | Cut) -> Group | None:
        return None

    def target(self, fqn: str, info: TensorInfo) -> Encoding | None:
        """Return `DenseAs` for a floating tensor, fp8 included, else None.

        Where the dtype is the wanted one already it is `Dense`: a quantized tensor is decoded and a dense
        one moves as bytes. bool, integers, complex, float4 and exponent-only float8 stay as they are.
        """
        encoding = self.encoding(info)
        return None if isinstance(encoding, Refusal) else encoding

    def encoding(self, info: TensorInfo) -> Encoding | Refusal:
        if info.dtype not in FLOATING or info.dtype == _EXPONENTS:
            return Refusal(f"{info.dtype} holds no values that a cast to {self.dtype} could keep")
        return Dense() if info.dtype == self.dtype else DenseAs(self.dtype)


class CastBf16(CastScheme):
    name, suffix, dtype = "bf16", "bf16", "bfloat16"


class CastFp32(CastScheme):
    name, suffix, dtype = "fp32", "fp32", "float32"


class CastFp16(CastScheme):
    name, suffix, dtype = "fp16", "fp16", "float16"
