"""`LazyTensor`: a logical tensor of a checkpoint whose values are read, and decoded, on demand.

Only the stored bytes that a requested box needs are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import index, mul
from typing import TYPE_CHECKING, TypeAlias

from ckptmap.core import requirements
from ckptmap.core.devices import tensors_on_cpu
from ckptmap.core.quantized_codes import Coded, ScalesAmongCodes
from ckptmap.core.short_repr import short
from ckptmap.errors import ArgumentError, SourceError
from ckptmap.protocols import Group
from ckptmap.protocols.encodings import DecodesOnHost, KeepsOnHost
from ckptmap.protocols.offers import offers
from ckptmap.storage.file_records import DamagedRecord
from ckptmap.storage.files import Files
from ckptmap.tensors import Box, StoredTensor, TensorInfo

if TYPE_CHECKING:
    from types import EllipsisType

    import numpy as np
    import torch
    from numpy.typing import DTypeLike

    Index: TypeAlias = int | slice | EllipsisType

SCALES_AT_ONCE = 1 << 16
"""Scales of which the blocks are read at once, where codes lie between them."""


def info_of(tensor: torch.Tensor) -> TensorInfo:
    return TensorInfo(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


class LazyTensor:
    """One logical tensor of a checkpoint: `.shape .dtype .encoding .nbytes`, `[...]`, `.read()`.

    `dtype` is torch's name of the dtype as a string, so that it needs no torch; `torch_dtype`
    imports torch.
    """

    __slots__ = ("encoding_", "files", "fqn", "group", "info", "parts")

    @property
    def lossy(self) -> bool:
        """Return True if its values differ from those of the stored tensors that it is read
        from."""
        return bool(getattr(self.encoding_, "lossy", False))

    @property
    def quantized(self) -> bool:
        """Return True if its parts hold quantization codes."""
        return bool(getattr(self.encoding_, "quantized", self.encoding_.name != "dense"))

    @property
    def beneath(self) -> Iterable[StoredTensor]:
        """Return the stored tensors that this tensor is read from."""
        return self.parts.values()

    def __init__(self, fqn: str, group: Group, files: Files) -> None:
        self.fqn = fqn
        self.group = group
        self.info = group.info
        self.encoding_ = group.encoding
        self.parts: Mapping[str, StoredTensor] = group.parts
        self.files = files

    def named(self, fqn: str) -> LazyTensor:
        """Return the same tensor under another FQN."""
        return LazyTensor(fqn, self.group, self.files)

    def as_stored(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of the tensor in the dtype in which it is stored, or comes from."""
        return values.to(self.torch_dtype)

    @property
    def sources(self) -> Iterable[LazyTensor]:
        """Return the tensors of the checkpoint that this tensor is read through: itself, if it is
        stored."""
        return (self,)

    @property
    def form(self) -> tuple[int, ...]:
        """Return what tensors of one shape, dtype and encoding have in common while their checkpoint is
        open, from the objects that describe them; empty: it is unlike any other."""
        if type(self) is not LazyTensor:
            return ()
        return id(self.info), id(self.encoding_), *[id(p.info) for p in self.parts.values()]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape

    @property
    def ndim(self) -> int:
        """Return the number of dims."""
        return len(self.info.shape)

    def numel(self) -> int:
        """Return the number of elements; a method, as `torch.Tensor.numel` is."""
        return self.info.numel

    def __len__(self) -> int:
        """Return the size of the first dim. Raises TypeError for a scalar, as torch does."""
        if not self.info.shape:
            raise TypeError(f"{self.fqn}: len() of a tensor without dims")
        return self.info.shape[0]

    def __bool__(self) -> bool:
        """Return True: there is a tensor, however many elements it has. No value is read."""
        return True

    @property
    def dtype(self) -> str:
        return self.info.dtype

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, self.info.dtype)
        return dtype

    @property
    def encoding(self) -> str:
        """Return the name of the encoding: `"dense"`, `"nf4"`, ..."""
        return self.encoding_.name

    @property
    def nbytes(self) -> int:
        """Return the number of stored bytes of all parts, without replicas."""
        total = 0
        for part in self.parts.values():
            total += part.info.nbytes
        return total

    @tensors_on_cpu()
    def read(
        self,
        offsets: Sequence[int] | None = None,
        sizes: Sequence[int] | None = None,
        device: str | torch.device = "cpu",
    ) -> torch.Tensor:
        """Return the box of `sizes` at `offsets` (default: all), decoded, in the logical dtype.

        Only the stored bytes that the box needs are read. Raises ValueError if the box leaves the
        tensor, PlanError CKM210 if the device cannot be used, RunError CKM310 if ranks have saved
        different values of the same part, SourceError CKM105 if the bytes complete a record of a
        file whose stated checksum is another. A tensor that is read whole completes all of its
        records.
        """
        import torch

        requirements.require_device(device, f"device={str(device)!r}")
        box = self._box(offsets, sizes)
        self.require_replicas([box])
        out = torch.empty(box.sizes, dtype=self.torch_dtype, device=device)
        try:
            self.read_into(box, out)
            if box.sizes == self.shape:
                for stored in self.beneath:
                    self.files.settle_tensor(stored)
        except DamagedRecord as error:
            raise error.naming((self.fqn, stored) for stored in self.beneath) from error
        return out

    def require_replicas(self, boxes: Iterable[Box] | None = None) -> None:
        """Raise RunError CKM310 if ranks have saved different values of the same part.

        That happens, for one, with experts to which every rank gave the same names. Where the bytes
        must be read to compare replicas, only those in `boxes` of a dense tensor are (default:
        all).
        """
        from ckptmap.storage.replicas import require_alike

        for stored in self.beneath:
            within = None
            if stored.replicas and boxes is not None and stored is self.parts.get(""):
                within = tuple(boxes) if self.encoding == "dense" else None
            require_alike(self.files, self.fqn, stored, within)

    def read_into(self, box: Box, out: torch.Tensor) -> None:
        """Fill `out` (box.sizes, logical dtype, contiguous, any device) with the decoded box."""
        if out.device.type != "cpu" and offers(self.encoding_, DecodesOnHost):
            out.copy_(self._read_on_host(box))
            return
        on_host = self.encoding_.host_parts if offers(self.encoding_, KeepsOnHost) else ()
        parts = {
            name: self.read_part(name, cut, "cpu" if name in on_host else out.device)
            for name, cut in self._cuts(box)
        }
        with self._naming_errors():
            self.encoding_.decode(self.info, parts, box, out)

    @contextmanager
    def _naming_errors(self) -> Iterator[None]:
        """Put the tensor's name before the text of an error that an encoding raises."""
        try:
            yield
        except SourceError as error:
            if type(error) is not SourceError or error.message.startswith(self.fqn):
                raise
            raise SourceError(error.code, f"{self.fqn}: {error.message}", error.hint) from error

    def _read_on_host(self, box: Box) -> torch.Tensor:
        """Return the decoded box, computed by the CPU."""
        import torch

        here = torch.empty(box.sizes, dtype=self.torch_dtype, device="cpu")
        self.read_into(box, here)
        return here

    def _cuts(self, box: Box) -> list[tuple[str, Box]]:
        cuts = []
        for name in self.parts:
            cut = self.encoding_.part_box(self.info, name, box)
            if cut is None:
                raise ValueError(
                    f"{self.fqn}: {self.encoding} part {name!r} cannot be cut at {box}"
                )
            cuts.append((name, cut))
        return cuts

    def read_scales(self) -> torch.Tensor:
        """Return the scales of its quantization codes, fp32; only for an encoding that is
        `Coded`."""
        coded = self.encoding_
        assert isinstance(coded, Coded), f"{self.fqn}: {self.encoding} has no codes"
        if offers(self.encoding_, ScalesAmongCodes):
            return self._scales_among_codes(coded)
        parts = {
            name: self.read_part(name, Box.whole(self.parts[name].info.shape))
            for name in coded.scale_parts(self.info)
        }
        with self._naming_errors():
            return coded.scales(self.info, parts)

    def _scales_among_codes(self, coded: Coded) -> torch.Tensor:
        import torch

        from ckptmap.storage.box_reader import row_major_boxes

        grid = coded.grid(self.info)
        assert grid is not None, f"{self.fqn}: {self.encoding} has no grid"
        out = torch.empty(grid.scales, dtype=torch.float32)
        for box in row_major_boxes(Box.whole(grid.scales), SCALES_AT_ONCE):
            codes = Box(*(tuple(map(mul, at, grid.block)) for at in (box.offsets, box.sizes)))
            cuts = {name: coded.code_box(self.info, name, codes) for name in self.parts}
            parts = {name: self.read_part(name, cut) for name, cut in cuts.items() if cut}
            part = out
            for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                part = part.narrow(dim, offset, size)
            part.copy_(coded.scales(self.info, parts))
        return out

    def read_codes(self, box: Box, out: torch.Tensor) -> None:
        """Fill `out` (any device) with a box of its canonical codes; only for an encoding that is
        `Coded`."""
        coded = self.encoding_
        assert isinstance(coded, Coded), f"{self.fqn}: {self.encoding} has no codes"
        cuts = {name: coded.code_box(self.info, name, box) for name in self.parts}
        parts = {
            name: self.read_part(name, cut, out.device)
            for name, cut in cuts.items()
            if cut is not None
        }
        coded.codes(self.info, parts, box, out)

    def read_part(self, part: str, box: Box, device: str | torch.device = "cpu") -> torch.Tensor:
        """Return a box of one stored part, in the stored dtype."""
        import torch

        from ckptmap.storage.device_copies import fill_tensor

        stored = self.parts[part]
        out = torch.empty(box.sizes, dtype=getattr(torch, stored.info.dtype), device=device)
        fill_tensor(self.files, stored, box, out)
        return out

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        """Return the values as a NumPy array, for `numpy.asarray(tensor)`.

        NumPy has no bfloat16, float8 or complex32: such values become float32 (complex64), which
        holds each of them exactly. Every other dtype is NumPy's of the same name. Raises
        ValueError for `copy=False`: the values are read anew at every call.
        """
        import torch

        if copy is False:
            raise ValueError(f"{self.fqn}: is read from a file, which copy=False does not allow")
        values = self.read()
        if values.dtype == torch.complex32:
            values = values.to(torch.complex64)
        elif values.dtype.is_floating_point and values.dtype.itemsize < 4:
            values = values if values.dtype == torch.float16 else values.float()
        array = values.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __getitem__(self, key: Index | tuple[Index, ...]) -> torch.Tensor:
        """Return the values at an index, as of a tensor: `w[3]`, `w[0:128]`, `w[:, 5]`, `w[...,
        0]`.

        Raises IndexError for an index out of range or a step other than 1, TypeError for an index
        that is neither an integer nor a slice.
        """
        offsets, sizes, squeeze = [], [], []
        for dim, item in enumerate(self._indices(key if isinstance(key, tuple) else (key,))):
            size = self.shape[dim]
            if isinstance(item, slice):
                start, stop, step = item.indices(size)
                if step != 1:
                    raise IndexError(f"{self.fqn}: step {step} is not supported, only 1")
                offsets.append(start)
                sizes.append(max(0, stop - start))
            else:
                if not -size <= item < size:
                    raise IndexError(f"{self.fqn}: index {item} is out of range for size {size}")
                offsets.append(item % size)
                sizes.append(1)
                squeeze.append(dim)
        values = self.read(offsets, sizes)
        return values.reshape([n for dim, n in enumerate(values.shape) if dim not in squeeze])

    def _indices(self, keys: tuple[Index, ...]) -> list[int | slice]:
        """Return one index for each dim; an ellipsis, or a missing index, is a full slice."""
        given: list[int | slice] = [key for key in keys if key is not Ellipsis]
        if len(given) > len(self.shape) or len(keys) - len(given) > 1:
            raise IndexError(f"{self.fqn}: {len(keys)} indices for shape {list(self.shape)}")
        at = next((i for i, key in enumerate(keys) if key is Ellipsis), len(keys))
        given[at:at] = [slice(None)] * (len(self.shape) - len(given))
        return [key if isinstance(key, slice) else self._whole(key) for key in given]

    def _whole(self, key: object) -> int:
        try:
            truth = isinstance(key, bool) or str(getattr(key, "dtype", "")).endswith("bool")
            # A tensor of shape [1] has an index(), but as an index of a tensor it keeps the dim.
            if not truth and not getattr(key, "ndim", 0):
                return index(key)  # type: ignore[arg-type]
        except TypeError:
            pass
        raise TypeError(
            f"{self.fqn}: index {key!r} is a {type(key).__name__}, expected int or slice"
        )

    def _box(self, offsets: Sequence[int] | None, sizes: Sequence[int] | None) -> Box:
        offsets = (0,) * len(self.shape) if offsets is None else self._integers("offsets", offsets)
        if sizes is None:
            sizes = [n - o for n, o in zip(self.shape, offsets, strict=False)]
        else:
            sizes = self._integers("sizes", sizes)
        if len(offsets) != len(self.shape) or len(sizes) != len(self.shape):
            raise ValueError(f"{self.fqn}: box needs {len(self.shape)} offsets and sizes")
        for offset, size, limit in zip(offsets, sizes, self.shape, strict=True):
            if offset < 0 or size < 0 or offset + size > limit:
                raise ValueError(
                    f"{self.fqn}: box {list(offsets)}+{list(sizes)} leaves shape {list(self.shape)}"
                )
        return Box(tuple(offsets), tuple(sizes))

    def _integers(self, name: str, values: Sequence[int]) -> list[int]:
        try:
            return [index(value) for value in values]
        except TypeError:
            raise ArgumentError(
                "CKM516",
                f"{self.fqn}: {name}={values!r}, expected integers",
                f"pass one a dim of {list(self.shape)}",
            ) from None

    def __repr__(self) -> str:
        return f"LazyTensor({short(self.fqn)}, {self.info}, {self.encoding})"
