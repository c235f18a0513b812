"""Encodings of merged LoRA weights: each reads a base weight, and adds the adapter's product to it.

    W [out, in] any encoding, A [r, in], B [out, r]  ->  W + s (B @ A)
    DoRA, with a magnitude m [out]                   ->  m / |W + s (B @ A)| (W + s (B @ A))
    W [e, out, in], A [e r, in], B [out, r e]        ->  each W[e] + s (B[:, e::E] @ A[e r:(e + 1) r])

Each is an encoding of base parts and adapter parts, so that a box of the merged weight is read like
any other and nothing is held whole. Formulas: Hu et al. 2021 (LoRA), Liu et al. 2024 (DoRA).

Arithmetic is in fp32 (fp64 over an fp64 base). The product is made of tiles that lie at fixed
places of the weight, so that no bit depends on the boxes that are asked for, and with them on
memory bounds, threads or ranks. The CPU makes them whatever device is given: a GPU's product of
matrices sums in another order (or in TF32, where the process allows that), and `verify` compares a
merge to the bit. Beside the box, its columns of A and its rows of B are held:
rank times what the box measures on either side.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from ckptmap.core.quantized_codes import Repairs, ScalesActivations, WritesAfresh
from ckptmap.errors import RunError
from ckptmap.protocols import Encoder, Encoding, Group, Refusal
from ckptmap.protocols.offers import offers
from ckptmap.storage.box_reader import row_major_boxes
from ckptmap.storage.files import Files
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Box, StoredTensor, TensorInfo

if TYPE_CHECKING:
    import torch

P = TypeVar("P")

A, B, MAGNITUDE, BIAS = "lora A", "lora B", "lora magnitude", "lora bias"
"""Parts beside those of the base; no stored part has a space in its name."""
TILE = (16, 4096)
"""Rows and columns of the base whose change is made at once: 256 KiB."""
NORM_NUMEL = 1 << 18
"""Elements of a weight held at once while the norms of its rows are taken."""


@dataclass(frozen=True)
class ChangedTensor(Repairs, ABC):
    """A tensor of a base in encoding `base` and logical dtype `dtype`, changed by an adapter."""

    base: Encoding
    dtype: str

    lossy = True
    """Its values are not those that the base has stored."""
    decodes_on_host = True

    @property
    def name(self) -> str:
        return "lora" if self.base.name == "dense" else f"{self.base.name}+lora"

    @property
    def quantized(self) -> bool:
        """Whether the base stores the tensor as codes."""
        if isinstance(self.base, ChangedTensor):
            return self.base.quantized
        return self.base.name != "dense"

    def parts(self, info: TensorInfo) -> Mapping[str, TensorInfo] | Refusal:
        return {"": info}

    def part_box(self, info: TensorInfo, part: str, box: Box) -> Box | None:
        return self.base.part_box(self.base_info(info), part, box)

    def decode(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box, out: torch.Tensor
    ) -> None:
        """Write the merged values of the box to `out`. Raises RunError CKM324 if one is not finite."""
        out.copy_(self.changed(info, parts, box))
        bad = int(out.isfinite().logical_not_().sum()) if out.numel() else 0
        if bad:
            raise RunError(
                "CKM324",
                f"expected finite values, found NaN or infinity in {bad} of {out.numel()} merged"
                f" {info.dtype} values",
                "the adapter or the base holds them, or the dtype is too narrow: try --to hf-fp32",
            )

    @abstractmethod
    def changed(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box
    ) -> torch.Tensor:
        """Return the box with the adapter's change added, in fp32 or wider."""

    def base_info(self, info: TensorInfo) -> TensorInfo:
        return TensorInfo(info.shape, self.dtype)

    def base_values(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box
    ) -> torch.Tensor:
        """Return the box of the base, decoded to the base's dtype, then cast to fp32 or wider."""
        import torch

        stored = torch.empty(box.sizes, dtype=getattr(torch, self.dtype), device="cpu")
        self.base.decode(self.base_info(info), _of_base(parts), box, stored)
        return stored.to(torch.promote_types(stored.dtype, torch.float32))

    def activation_keys(self, fqn: str) -> Sequence[str]:
        """Return the stored keys of the scales of activations that the base has."""
        return self.base.activation_keys(fqn) if offers(self.base, ScalesActivations) else ()

    def encoder(self, info: TensorInfo, device: str) -> Encoder:
        raise AssertionError("a merged tensor is written in another encoding")

    def record(self, info: TensorInfo) -> Mapping[str, object] | None:
        return None

    def repaired(self) -> Encoding:
        """Return the encoding that it is written in unless another is asked for: the base's."""
        repaired = self.base.repaired() if offers(self.base, Repairs) else None
        base = repaired or self.base
        return base.afresh() if offers(base, WritesAfresh) else base


@dataclass(frozen=True)
class Merged(ChangedTensor):
    """A matrix with the product of two low-rank halves added.

    rank     the dim that A and B share
    scale    what the product is multiplied with
    flip     the base is stored [in, out]: GPT-2's Conv1D, embeddings
    norms    DoRA: of the rows of W + s (B @ A), computed when first needed
    """

    rank: int
    scale: float
    flip: bool = False
    norms: Norms | None = field(default=None, compare=False)

    def part_box(self, info: TensorInfo, part: str, box: Box) -> Box | None:
        if part not in (A, B, MAGNITUDE):
            return super().part_box(info, part, box)
        rows, columns = self._aligned(info, box)
        if part == A:
            return Box((0, columns[0]), (self.rank, columns[1]))
        if part == B:
            return Box((rows[0], 0), (rows[1], self.rank))
        at, count = _turned(box.offsets, self.flip)[0], _turned(box.sizes, self.flip)[0]
        return Box((at,), (count,))

    def changed(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box
    ) -> torch.Tensor:
        values = self.base_values(info, parts, box)
        turned = values.t() if self.flip else values  # [out, in], whatever the base's order
        self._add(turned, info, parts, box)
        if self.norms is not None:
            at, count = _turned(box.offsets, self.flip)[0], _turned(box.sizes, self.flip)[0]
            factor = parts[MAGNITUDE].float() / self.norms.values()[at : at + count]
            turned.mul_(factor.view(-1, 1))
        return values

    def _add(
        self, turned: torch.Tensor, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box
    ) -> None:
        """Add the product to the box, computed in whole tiles so that no bit depends on the box."""
        a, b = parts[A].float(), parts[B].float()
        (row, rows), (column, columns) = self._aligned(info, box)
        (top, left), (high, wide) = _turned(box.offsets, self.flip), _turned(TILE, self.flip)
        for i in range(0, rows, high):
            for j in range(0, columns, wide):
                tile = (b[i : i + high] @ a[:, j : j + wide]).mul_(self.scale)
                y, x = row + i - top, column + j - left  # where the tile lies in the box
                tile = tile[max(0, -y) : turned.shape[0] - y, max(0, -x) : turned.shape[1] - x]
                y, x = max(0, y), max(0, x)
                turned[y : y + tile.shape[0], x : x + tile.shape[1]] += tile

    def _aligned(self, info: TensorInfo, box: Box) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return (start, count) of the rows of B and of the columns of A that whole tiles need."""
        shape = _turned(info.shape, self.flip)
        spans = []
        offsets, sizes = _turned(box.offsets, self.flip), _turned(box.sizes, self.flip)
        tiles = _turned(TILE, self.flip)
        for offset, size, limit, tile in zip(offsets, sizes, shape, tiles, strict=True):
            start = offset // tile * tile
            stop = min(limit, -(-(offset + size) // tile) * tile) if size else start
            spans.append((start, stop - start))
        return spans[0], spans[1]


def _turned(pair: tuple[int, ...], flip: bool) -> tuple[int, int]:
    first, second = pair
    return (second, first) if flip else (first, second)


@dataclass(frozen=True)
class Stacked(Merged):
    """A stack of matrices, each with a product of its own halves added.

    experts  how many; A holds one's rows beside each other, B one's columns that many apart
    """

    experts: int = field(default=1, kw_only=True)

    def part_box(self, info: TensorInfo, part: str, box: Box) -> Box | None:
        if part not in (A, B):
            return ChangedTensor.part_box(self, info, part, box)
        rows, columns = self._aligned(*_matrix_of_stack(info, box))
        if part == A:
            first, count = box.offsets[0] * self.rank, box.sizes[0] * self.rank
            return Box((first, columns[0]), (count, columns[1]))
        return Box((rows[0], 0), (rows[1], self.rank * self.experts))

    def changed(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box
    ) -> torch.Tensor:
        values = self.base_values(info, parts, box)
        a = parts[A].view(box.sizes[0], self.rank, -1)
        for i, matrix in enumerate(values):
            b = parts[B][:, box.offsets[0] + i :: self.experts]
            turned = matrix.t() if self.flip else matrix
            one, of_one = _matrix_of_stack(info, box)
            self._add(turned, one, {A: a[i], B: b.contiguous()}, of_one)
        return values


def _matrix_of_stack(info: TensorInfo, box: Box) -> tuple[TensorInfo, Box]:
    """Return the shape and the box of one matrix of the stack."""
    return TensorInfo(info.shape[1:], info.dtype), Box(box.offsets[1:], box.sizes[1:])


@dataclass(frozen=True)
class Biased(ChangedTensor):
    """A bias with that of an adapter's second half added: b + s c."""

    scale: float

    def part_box(self, info: TensorInfo, part: str, box: Box) -> Box | None:
        return box if part == BIAS else super().part_box(info, part, box)

    def changed(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box
    ) -> torch.Tensor:
        values = self.base_values(info, parts, box)
        return values.add_(parts[BIAS].float() * self.scale)


@dataclass(frozen=True)
class Replaced(ChangedTensor):
    """A tensor that was trained as a whole, stored in another dtype than the base's."""

    @property
    def name(self) -> str:
        return "trained"

    def part_box(self, info: TensorInfo, part: str, box: Box) -> Box | None:
        return box

    def changed(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box
    ) -> torch.Tensor:
        return parts[""]


class Norms:
    """|W + s (B @ A)| for each of the `out` rows, fp32, taken once in a pass over the weight."""

    def __init__(self, group: Group, files: Files) -> None:
        self._group, self._files = group, files
        self._lock = threading.Lock()
        self._norms: torch.Tensor | None = None

    def values(self) -> torch.Tensor:
        with self._lock:
            if self._norms is None:
                self._norms = self._computed()
            return self._norms

    def _computed(self) -> torch.Tensor:
        """Return the norm of every row, from whole rows as torch computes it.

        Where a row is a column of the base, its squares are summed in fp64.
        """
        import torch

        encoding = self._group.encoding
        assert isinstance(encoding, Merged), "made by `dora`"
        info = TensorInfo(self._group.info.shape, "float32")
        lazy = LazyTensor(self._group.fqn, self._group._replace(info=info), self._files)
        if encoding.flip:
            squares = torch.zeros(info.shape[1], dtype=torch.float64)
            for part in row_major_boxes(Box.whole(info.shape), NORM_NUMEL):
                at = part.offsets[1]
                values = lazy.read(part.offsets, part.sizes).double()
                squares[at : at + part.sizes[1]] += values.square_().sum(dim=0)
            return squares.sqrt_().float()
        rows = max(1, NORM_NUMEL // max(1, info.shape[1]))
        norms = [
            torch.linalg.norm(lazy[at : at + rows], dim=1) for at in range(0, info.shape[0], rows)
        ]
        return torch.cat(norms) if norms else torch.empty(0)


def dora(group: Group, magnitude: StoredTensor, files: Files) -> Group:
    """Return the merged matrix with its rows scaled to these magnitudes."""
    encoding = group.encoding
    assert isinstance(encoding, Merged), f"{group.fqn}: {encoding.name} is no merged matrix"
    scaled = replace(encoding, norms=Norms(group, files))
    return group._replace(encoding=scaled, parts={**group.parts, MAGNITUDE: magnitude})


def without_adapter(lazy: LazyTensor) -> LazyTensor:
    """Return the base of a merged tensor, without the adapter."""
    encoding = lazy.encoding_
    assert isinstance(encoding, ChangedTensor), f"{lazy.fqn}: {lazy.encoding} is not merged"
    group = Group(lazy.fqn, encoding.base_info(lazy.info), encoding.base, _of_base(lazy.parts))
    return LazyTensor(lazy.fqn, group, lazy.files)


def _of_base(parts: Mapping[str, P]) -> dict[str, P]:
    """Return the parts that are none of the adapter's."""
    return {name: part for name, part in parts.items() if name not in (A, B, MAGNITUDE, BIAS)}


def codes_part(lazy: LazyTensor) -> str:
    """Return the name of the part that takes most of the bytes."""
    return max(lazy.parts, key=lambda part: lazy.parts[part].info.nbytes)


def with_replica(base: Group, part: str, copy: StoredTensor) -> Group:
    """Return the base with a copy of one of its parts as a replica, which must hold the same bytes.

    `copy` is from the adapter's checkpoint, which repeats codes of the base.
    """
    packed = base.parts[part]
    replicas = (*packed.replicas, *copy.chunks)
    same = StoredTensor(packed.info, packed.place, replicas, packed.share)
    return base._replace(parts={**base.parts, part: same})
