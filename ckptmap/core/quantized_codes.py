"""Quantization codes that move from one encoding to another bit for bit.

An encoding that is `Coded` says what its codes mean (a `CodeGrid`) and what their scales are; one that
`Recodes` takes the codes of a grid that it shares. Planning asks both, without data: if they fit, the
plan says `codes` (or `exact`), else the tensor is decoded and encoded anew (`requantize`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ckptmap.errors import RunError
from ckptmap.protocols import Encoding, Write
from ckptmap.tensors import Box, TensorInfo

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CodeGrid:
    """What quantization codes mean, apart from how their scales are stored.

    name    `"nf4"`, `"fp4"`, `"int8"`, `"float8_e4m3fn"`: equal names, equal value of each code,
            but for the rounding of a table
    codes   the canonical codes: nf4 and fp4 u8 [n/2], row-major, the even element in the high
            nibble; int8 i8 [out, in]; float8 in its own dtype [out, in]
    block   codes that share a scale, one size a dim of `codes`: nf4 (block_size / 2,), int8 of
            rows (1, in), of groups (1, g), of the tensor (out, in)
    values  which table, exactly, and how its products are rounded: where two grids agree in this,
            too, equal scales give equal bits
    """

    name: str
    codes: TensorInfo
    block: tuple[int, ...]
    values: str = ""

    @property
    def scales(self) -> tuple[int, ...]:
        """Shape of the scales: one for each block, the last in a dim may be short."""
        return tuple(-(-n // b) for n, b in zip(self.codes.shape, self.block, strict=True))


@runtime_checkable
class Coded(Protocol):
    """An encoding whose codes lie on a grid with one scale a block and no zero point: another
    encoding of the same grid can take them as they are. `grid` and `scale_parts` import no torch."""

    def grid(self, info: TensorInfo) -> CodeGrid | None:
        """None: not so with these parameters."""

    def scale_parts(self, info: TensorInfo) -> Sequence[str]:
        """The parts that `scales` needs, each read whole."""

    def scales(self, info: TensorInfo, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """fp32 `grid.scales`: value = what the code stands for * scale (nf4: the decoded absmax)."""

    def code_box(self, info: TensorInfo, part: str, box: Box) -> Box | None:
        """The box of a part that `box` of `grid.codes` needs; None: `codes` does without it."""

    def codes(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box, out: torch.Tensor
    ) -> None:
        """Fill `out` (box.sizes, dtype of `grid.codes`) from parts cut by `code_box`."""


class Recoder(Protocol):
    """Takes codes as they are and stores their scales anew. Making one imports no torch."""

    fidelity: str
    """`"codes"`, or `"exact"` where every decoded value stays the same bits."""
    step: int
    """Codes fed at once are a multiple of this, counted row-major (the last may not be)."""
    state_nbytes: int

    def feed(self, offset: int, codes: torch.Tensor, scales: torch.Tensor) -> Iterable[Write]:
        """`codes`: flat, row-major, starting at flat code `offset`; `scales`: of the whole tensor,
        fp32, on the CPU, finite, of shape `grid.scales`."""

    def finish(self, scales: torch.Tensor) -> Iterable[Write]:
        """The scales, after the last code. Raises RunError CKM309 where they cannot be held."""


@runtime_checkable
class Recodes(Protocol):
    """An encoding that can be given codes of a grid."""

    def recoder(self, info: TensorInfo, grid: CodeGrid, device: str) -> Recoder | None:
        """None: these codes cannot be kept here, the tensor is decoded and encoded anew."""


@runtime_checkable
class KeepsCodes(Protocol):
    """A scheme that chooses its parameters (block size) by the codes that it could keep."""

    def keeping(self, info: TensorInfo, grid: CodeGrid, exact: bool) -> Encoding | None:
        """The encoding that takes these codes; `exact`: with its scales unchanged, where the
        scheme has a form for that. None: not this grid, or not these blocks."""


@runtime_checkable
class TakesModules(Protocol):
    """A scheme of a library that quantizes some kinds of modules only, and loads no others."""

    def takes(self, fqn: str) -> bool:
        """May the weight of this name be of such a module?"""


@runtime_checkable
class Repairs(Protocol):
    """An encoding that may have been found malformed in a way that can be put right."""

    def repaired(self) -> Encoding | None:
        """What the tensor is written as instead; None: it is well-formed."""

    @property
    def remark(self) -> str:
        """What should be said about it; "" where there is nothing."""


@runtime_checkable
class ScalesExactly(Protocol):
    """A scheme with a form whose scales are stored without loss, at the cost of some bits."""

    def exactly(self, encoding: Encoding, info: TensorInfo) -> Encoding:
        """That form of the encoding, which `target` or `encoding` of this scheme gave."""


@runtime_checkable
class CountsFlips(Protocol):
    """An encoder that may find, after `finish`, that scales came out as zero or negative."""

    sign_flips: int


class CoarseScales(RunError):
    """Scales that share a step, which outliers have made so coarse that others would decode to
    zero or to another sign: `ScalesExactly` can hold them. `fqns` are the tensors, once known."""

    def __init__(self, message: str, fqns: tuple[str, ...] = ()) -> None:
        super().__init__("CKM311", message, "keep its scales exactly with --exact-scales")
        self.fqns = fqns

    def of(self, fqn: str) -> CoarseScales:
        """The same, of that tensor."""
        return CoarseScales(f"{fqn}: {self.message}", (fqn,))

    @classmethod
    def together(cls, found: Sequence[CoarseScales]) -> CoarseScales:
        """One error for several tensors."""
        more = f" (and {len(found) - 1} more tensors)" if len(found) > 1 else ""
        fqns = sorted(fqn for error in found for fqn in error.fqns)
        return cls(f"{found[0].message}{more}", tuple(fqns))

    @classmethod
    def count(cls, flipped: int) -> CoarseScales:
        return cls(
            f"{flipped} block scales would decode to zero or to another sign in 8 bits, because of"
            " outliers"
        )

    @classmethod
    def check(cls, scales: torch.Tensor, decoded: torch.Tensor) -> None:
        """Raises where a scale that is not zero decodes to zero or to another sign."""
        sign = scales.sign()
        flipped = int((sign * decoded.sign() < sign.abs()).sum())
        if flipped:
            raise cls.count(flipped)
