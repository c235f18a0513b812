"""The protocols for moving quantization codes from one encoding to another, bit for bit.

An encoding that is `Coded` describes the meaning of its codes (a `CodeGrid`) and returns their
scales. An encoding that `Recodes` accepts the codes of a grid that it shares. Planning compares
both without data: if they fit, the plan's fidelity is `codes` (or `exact`), else the tensor is
decoded and encoded anew (`requantize`).

What else an encoding may say of being written anew is here, too, as far as more than one room asks
for it: `EncodesSome`, `WritesAfresh`, `Repairs`. Other abilities stand beside the code that asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ckptmap.core.formatting import counted
from ckptmap.errors import RunError
from ckptmap.protocols import Encoding, Refusal, Write
from ckptmap.tensors import Box, TensorInfo

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CodeGrid:
    """The meaning of quantization codes, whatever way their scales are stored.

    name    `"nf4"`, `"fp4"`, `"int8"`, `"float8_e4m3fn"`: with equal names each code has an equal
            value, except for the rounding of a table
    codes   the canonical codes: nf4 and fp4 u8 [n/2], row-major, the even element in the high
            nibble; int8 i8 [out, in]; float8 in its own dtype [out, in]
    block   the shape of a block that shares one scale, in entries of `codes`: nf4
            (block_size / 2,); int8 by row (1, in), by group (1, g), by tensor (out, in)
    values  the exact table, and how its products are rounded: if this is equal too, equal scales
            decode to equal bits
    axes    the dim of the tensor along which each dim of `codes` runs, where their order differs: (0, 2, 1)
            for the codes of experts that are stored transposed
    zeros   whether each block has a zero point, too: an integer that is subtracted from its codes; the name
            of such a grid is one of its own
    scale_dtype
            the dtype in which the scales are stored, where that of their values would not tell; "" else
    """

    name: str
    codes: TensorInfo
    block: tuple[int, ...]
    values: str = ""
    axes: tuple[int, ...] = ()
    zeros: bool = False
    scale_dtype: str = ""

    @property
    def scales(self) -> tuple[int, ...]:
        """The shape of the scales: one for each block; the last block of a dim may be shorter. With zero
        points it is [2, ...]: the scales, then the zero points."""
        grid = tuple(-(-n // b) for n, b in zip(self.codes.shape, self.block, strict=True))
        return (2, *grid) if self.zeros else grid


@runtime_checkable
class Coded(Protocol):
    """An encoding with one scale for each block of codes, and perhaps one zero point.

    Another encoding of the same grid can take its codes as they are. `grid` and `scale_parts`
    import no torch.
    """

    def grid(self, info: TensorInfo) -> CodeGrid | None:
        """Return the grid of the codes; None if this encoding's parameters have no such grid."""

    def scale_parts(self, info: TensorInfo) -> Sequence[str]:
        """Return the names of the parts that `scales` needs, each read whole."""

    def scales(self, info: TensorInfo, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the scales, fp32, of shape `grid.scales`: value = meaning of the code * scale.

        For nf4 they are the decoded absmax values. With zero points: value = (code - zero) * scale.
        """

    def code_box(self, info: TensorInfo, part: str, box: Box) -> Box | None:
        """Return the box of a part that `codes` needs for `box` of `grid.codes`; None: nothing."""

    def codes(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box, out: torch.Tensor
    ) -> None:
        """Fill `out` (box.sizes, dtype of `grid.codes`) from parts cut by `code_box`."""


@runtime_checkable
class ScalesAmongCodes(Protocol):
    """An encoding whose blocks hold codes and scales side by side, so that no part is read whole for its scales.

    `scales` takes parts that `code_box` cut for whole blocks, and returns the scales of these.
    """

    scales_in_boxes: bool


class Recoder(Protocol):
    """Writes codes as they are, and encodes their scales anew. Creating one imports no torch."""

    fidelity: str
    """`"codes"`, or `"exact"` if every decoded value keeps its bits."""
    step: int
    """Each call of `feed` but the last has a multiple of this many codes, in row-major order."""
    state_nbytes: int

    def feed(self, offset: int, codes: torch.Tensor, scales: torch.Tensor) -> Iterable[Write]:
        """Return the writes of the codes.

        codes    flat and row-major, the first is number `offset` of the tensor
        scales   of the whole tensor: fp32, on the CPU, finite, of shape `grid.scales`
        """

    def finish(self, scales: torch.Tensor) -> Iterable[Write]:
        """Return the writes of the scales; called after the last code.

        Raises RunError CKM309 if the encoding cannot hold them.
        """


@runtime_checkable
class ScalesActivations(Protocol):
    """An encoding with parts that scale the activations of a layer. Its weight does not need them."""

    def activation_keys(self, fqn: str) -> Sequence[str]:
        """Return the stored keys of these parts. They are dropped where the weight is decoded or
        encoded anew."""


@runtime_checkable
class Recodes(Protocol):
    """An encoding that can take codes of a grid as they are."""

    def recoder(self, info: TensorInfo, grid: CodeGrid, device: str) -> Recoder | None:
        """Return the recoder for codes of this grid.

        None if this encoding cannot keep them: the tensor is then decoded and encoded anew.
        """


@runtime_checkable
class KeepsCodes(Protocol):
    """A scheme that can choose its parameters (block size) so that codes can be kept."""

    def keeping(self, info: TensorInfo, grid: CodeGrid, exact: bool) -> Encoding | None:
        """Return the encoding that takes these codes; None if the scheme has none for this grid.

        With `exact` it stores their scales unchanged, if the scheme has a form for that.
        """


@runtime_checkable
class EncodesSome(Protocol):
    """An encoding with forms that it decodes and does not make of values. Without this protocol an
    encoding makes every form that its `parts` describes."""

    def cannot_encode(self, info: TensorInfo) -> Refusal | None:
        """Return why values cannot be encoded with these parameters; None: they can."""


@runtime_checkable
class WritesAfresh(Protocol):
    """An encoding with details of the file that it was read from, which new files do not repeat."""

    def afresh(self) -> Encoding:
        """Return the same codes and blocks in the form that new files have."""


@runtime_checkable
class Repairs(Protocol):
    """An encoding whose stored form may be malformed in a way that can be repaired."""

    def repaired(self) -> Encoding | None:
        """Return the encoding to write the tensor in instead; None if it is well-formed."""

    @property
    def remark(self) -> str:
        """The remark for the user on the stored form; "" if there is none."""
        return ""


@runtime_checkable
class CountsFlips(Protocol):
    """An encoder that counts the scales whose stored form decodes to zero or to another sign.

    `sign_flips` is valid after `finish`.
    """

    sign_flips: int


class CoarseScales(RunError):
    """Some scales would decode to zero or to another sign.

    Scales that are quantized together share a step, and outliers make that step too coarse for the
    others. A scheme that `ScalesExactly` can hold them. `fqns` are the tensors, once known.
    """

    def __init__(self, message: str, fqns: tuple[str, ...] = ()) -> None:
        super().__init__("CKM311", message, "keep its scales exactly with --exact-scales")
        self.fqns = fqns

    def of(self, fqn: str) -> CoarseScales:
        """Return the same error with the name of its tensor."""
        return CoarseScales(f"{fqn}: {self.message}", (fqn,))

    @classmethod
    def together(cls, errors: Sequence[CoarseScales]) -> CoarseScales:
        """Return one error for the errors of several tensors."""
        more = f" (and {counted(len(errors) - 1, 'more tensor')})" if len(errors) > 1 else ""
        fqns = sorted(fqn for error in errors for fqn in error.fqns)
        return cls(f"{errors[0].message}{more}", tuple(fqns))

    @classmethod
    def count(cls, flipped: int) -> CoarseScales:
        return cls(
            f"{counted(flipped, 'block scale')} would decode to zero or to another sign in 8 bits, because of"
            " outliers"
        )

    @classmethod
    def check(cls, scales: torch.Tensor, decoded: torch.Tensor) -> None:
        """Raise CoarseScales if a scale other than zero decodes to zero or to another sign."""
        sign = scales.sign()
        flipped = int((sign * decoded.sign() < sign.abs()).sum())
        if flipped:
            raise cls.count(flipped)
