"""Write the parts of a bitsandbytes 4-bit tensor: from values, or from codes that are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from ckptmap.core.formatting import counted
from ckptmap.core.quantized_codes import CoarseScales
from ckptmap.errors import RunError
from ckptmap.protocols import Refusal, Write
from ckptmap.quantization.blockwise import fourbit
from ckptmap.quantization.bnb import double_quant
from ckptmap.quantization.dense import flat
from ckptmap.tensors import TensorInfo

if TYPE_CHECKING:
    import torch


class FourBitForm(Protocol):
    """The part of `FourBit` that its encoders use; it breaks a circular import."""

    @property
    def kind(self) -> str: ...
    @property
    def block(self) -> int: ...
    @property
    def storage(self) -> str: ...
    @property
    def nested(self) -> object | None: ...
    @property
    def state(self) -> str: ...

    def parts(self, info: TensorInfo) -> Mapping[str, TensorInfo] | Refusal: ...
    def blob(self, info: TensorInfo, offset: float = 0.0) -> bytes: ...
    def blocks(self, info: TensorInfo) -> int: ...


def _check_held(absmax: torch.Tensor, decoded: torch.Tensor, dtype: str) -> None:
    """Raise RunError CKM309 where a scale that fits `dtype` overflows it after double quantization.

    Each block has a code of 1 or -1, which decodes to the scale itself.
    """
    import torch

    wanted: torch.dtype = getattr(torch, dtype)
    bad = decoded.to(wanted).isfinite().logical_not_().logical_and_(absmax.to(wanted).isfinite())
    count = int(bad.sum())
    if count:
        raise RunError(
            "CKM309",
            f"{counted(count, 'block scale', 'overflows', 'overflow')} {dtype} in 8 bits, the largest absolute value is"
            f" {float(absmax.amax()):.6g}",
            "store its scales without loss (--exact-scales), or leave the tensor as it is with --no-encode",
        )


def _scale_writes(
    form: FourBitForm,
    info: TensorInfo,
    absmax: torch.Tensor,
    needed: torch.Tensor,
    quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, float]],
) -> Iterator[Write]:
    """Yield every part but the codes, from absmax [blocks] f32.

    `needed` is 0 where the sign of a scale does not matter; `quantize` is the double quantization to use.
    """
    import torch

    offset = 0.0
    if form.nested is None:
        yield Write("absmax", flat(0, absmax.numel()), absmax)
    else:
        codes, scale, offset = quantize(absmax)
        values = double_quant.dynamic_map()
        decoded = double_quant.dequantize(
            codes, scale, values, offset, double_quant.BLOCK, 0, torch.float32
        )
        _check_held(absmax, decoded, info.dtype)
        CoarseScales.check(needed, decoded)
        yield Write("absmax", flat(0, codes.numel()), codes)
        yield Write("nested_absmax", flat(0, scale.numel()), scale)
        yield Write("nested_quant_map", flat(0, 256), values)
    yield from _constants(form, info, offset)


def _constants(form: FourBitForm, info: TensorInfo, offset: float) -> Iterator[Write]:
    import torch

    yield Write("quant_map", flat(0, 16), fourbit.table(form.kind))
    blob = torch.frombuffer(bytearray(form.blob(info, offset)), dtype=torch.uint8)
    yield Write(form.state, flat(0, blob.numel()), blob)


class FourBitEncoder:
    """Writes codes at once and, in `finish`, the absmax, perhaps double quantized."""

    splittable = False

    def __init__(self, form: FourBitForm, info: TensorInfo, device: str) -> None:
        import torch

        refusal = form.parts(info)
        if isinstance(refusal, Refusal):
            raise ValueError(refusal.reason)
        self._form, self._info = form, info
        self.step = form.block
        dtype: torch.dtype = getattr(torch, info.dtype)
        self._quantizer = fourbit.FourBitQuantizer(form.kind, info.numel, form.block, dtype, device)
        self._absmax = torch.empty(form.blocks(info), dtype=torch.float32, device=device)
        self._missing = info.numel
        self.state_nbytes = 4 * self._absmax.numel() + self._quantizer.nbytes

    def feed(self, offset: int, values: torch.Tensor) -> Iterable[Write]:
        """Encode values [m] T -> codes u8 [ceil(m/2)]; `offset` is a multiple of the block, m too but at the end."""
        import torch

        numel, first = values.numel(), offset // self.step
        assert offset % self.step == 0
        packed = torch.empty(-(-numel // 2), dtype=torch.uint8, device=values.device)
        absmax = self._absmax.narrow(0, first, -(-numel // self.step))
        self._quantizer.run(values, absmax, packed)
        self._missing -= numel
        held = packed.view(getattr(torch, self._form.storage))
        start = offset // 2 // held.element_size()
        return (Write("", flat(start, held.numel()), held),)

    def finish(self) -> Iterable[Write]:
        """Yield the other parts.

        Raises RunError CKM309 where an input was not finite or double quantization overflows, CKM311 where
        double quantization would change the sign of a block.
        """
        assert self._missing == 0, f"{self._missing} elements of {self._info} were not fed"
        absmax = self._absmax.cpu()
        fourbit.check_finite(absmax, self.step)
        return _scale_writes(self._form, self._info, absmax, absmax, double_quant.quantize)


class FourBitRecoder:
    """Writes given codes unchanged, and the absmax of given scales."""

    state_nbytes = 0

    def __init__(self, form: FourBitForm, info: TensorInfo, fidelity: str) -> None:
        self._form, self._info = form, info
        self.fidelity = fidelity
        self.step = form.block // 2
        self._zeros = fourbit.ZeroBlocks(form.kind, self.step)

    def feed(self, offset: int, codes: torch.Tensor, scales: torch.Tensor) -> Iterable[Write]:
        if self._form.nested is not None:
            codes = self._zeros.feed(offset, codes, scales)
        return (Write("", flat(offset, codes.numel()), codes),)

    def finish(self, scales: torch.Tensor) -> Iterable[Write]:
        needed = self._zeros.hidden(scales)
        return _scale_writes(self._form, self._info, scales, needed, double_quant.requantize)
