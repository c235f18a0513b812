"""bitsandbytes' Params4bit in a live model: NF4 and FP4 weights of a Linear4bit.

    codes u8 [n/2] (the same nibbles, torchao's order is bitsandbytes')   -> data u8 [n/2, 1]
    scales decoded, in float32 [n/64]                                      -> quant_state.absmax
    torchao's table of 16 values                                           -> quant_state.code

Codes of NF4, and bitsandbytes' own, are copied bit for bit. The decoded values are torchao's up to
the rounding of one product: bitsandbytes multiplies in float32, torchao in the weight's dtype. Any
other source is quantized with the settings of the live weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from ckptmap.errors import LoadError
from ckptmap.live.model.live_form import (
    LiveForm,
    LoadContext,
    LoadStep,
    NeedsFrozen,
    StoredForm,
    StoredPart,
)
from ckptmap.live.model.live_tensor import LiveTensor, device_for, is_dtensor
from ckptmap.live.model.load_report import Encoded
from ckptmap.live.model.tensor_reader import TensorReader
from ckptmap.planning.kept_codes import code_grid
from ckptmap.quantization.bnb.fourbit import (
    ABSMAX,
    NESTED_ABSMAX,
    NESTED_MAP,
    FourBit,
    nested_offset,
)
from ckptmap.quantization.nf4 import kernels as nf4_codes
from ckptmap.quantization.nf4.encoding import DATA, FACTOR, MEAN, SCALERS, TABLE
from ckptmap.quantization.nf4.encoding import NF4 as Nf4Encoding
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Box, TensorInfo

if TYPE_CHECKING:
    import torch

LIVE_CLASS = "Params4bit"
NF4 = "nf4"


class BnbQuantState(Protocol):
    """bitsandbytes' QuantState: scales and settings of a Params4bit."""

    shape: Sequence[int]
    absmax: torch.Tensor
    blocksize: int
    quant_type: str
    dtype: torch.dtype
    nested: bool


class BnbForm(LiveForm):
    """bitsandbytes' Params4bit, quantized already or not yet, in a Linear4bit."""

    classes = frozenset({LIVE_CLASS})
    takes_values = True  # a weight that is not quantized yet is dense

    def is_live(self, target: LiveTensor) -> bool:
        return is_live(target)

    def step(
        self, target: LiveTensor, source: LazyTensor, context: LoadContext
    ) -> LoadStep | NeedsFrozen | None:
        wanted = context.options.nf4 == "bnb" or is_live(target)
        state = live_state(target)
        if state is None and not (source.encoding == NF4 and wanted):
            return None
        if source.encoding == NF4 and target.tensor.requires_grad:
            return NeedsFrozen("NF4")
        reason = can_hold(target)
        if reason:
            raise refuse(target, reason)
        _refuse_turned(target, source)
        device = device_for(target, context.fallback)

        def run(reader: TensorReader) -> None:
            with reader.meter.hold(source.nbytes, device):
                put(reader, source, target, device)

        if not keeps_codes(source, target):
            return LoadStep(run, quantizes=True)
        kind = getattr(state, "quant_type", NF4)
        return LoadStep(run, encoded=Encoded(target.fqn, f"bnb-{kind}", 0, 0, source.nbytes))

    def reads_whole(self, source: LazyTensor) -> bool:
        return True

    def stored(self, target: LiveTensor, fqn: str) -> StoredForm | None:
        # A tensor of a state dict has no module, and its scales are entries of their own there.
        if not target.places or not holds_codes(target):
            return None
        parts = []
        for name, values in stored_parts(target).items():
            info = TensorInfo(tuple(values.shape), str(values.dtype).removeprefix("torch."))
            parts.append(StoredPart(f"{fqn}{name}", info, Box.whole(info.shape), values, True))
        return StoredForm(parts)

    def logical(self, target: LiveTensor) -> TensorInfo | None:
        return logical(target)

    def has_rounded_scales(self, target: LiveTensor) -> bool:
        return is_rounded(target)

    def require_in_state_dict(self, target: LiveTensor) -> None:
        raise LoadError(
            "CKM505",
            f"model: {target.fqn} is a {LIVE_CLASS}, which no state dict can hold",
            "load it into the model with ckptmap.load, or ckptmap.hooks.install",
        )


def is_live(target: LiveTensor) -> bool:
    """Return whether the weight is a Params4bit, quantized or not yet."""
    return type(target.tensor).__name__ == LIVE_CLASS


def can_hold(target: LiveTensor) -> str:
    """Return why bitsandbytes cannot hold the weight in its module; empty: it can."""
    if is_dtensor(target.tensor) or target.is_flat:
        return "it is cut over ranks, and Params4bit is loaded whole"
    for module, _ in target.places:
        if not any(cls.__name__ == "Linear4bit" for cls in type(module).__mro__):
            return f"{type(module).__name__} is no bitsandbytes Linear4bit"
    return ""


def refuse(target: LiveTensor, reason: str) -> LoadError:
    """Return the error for a weight that the option nf4="bnb" has no place for."""
    return LoadError(
        "CKM512",
        f"model: {target.fqn} cannot be a bitsandbytes NF4 weight: {reason}",
        "replace its linear layer by bitsandbytes.nn.Linear4bit before loading",
    )


def _refuse_turned(target: LiveTensor, source: LazyTensor) -> None:
    """Raise LoadError CKM505 where the live codes are those of the transpose, and the source's values are not.

    transformers quantizes the transpose of a Conv1D of GPT-2, and its layer says `source_cls`. Only `save` stores
    codes in the order of the live weight: where a weight is square, no shape would tell.
    """
    kinds = (getattr(module, "source_cls", None) for module, _ in target.places)
    is_turned = any(getattr(kind, "__name__", "") == "Conv1D" for kind in kinds)
    encoding = source.encoding_
    if is_turned and not (isinstance(encoding, FourBit) and not encoding.transposed):
        raise LoadError(
            "CKM505",
            f"model: {target.fqn} is a Linear4bit in the place of a Conv1D, whose transpose it holds, expected what"
            " ckptmap.save stored of it",
            "load the checkpoint with from_pretrained; the rest with ckptmap.load, drop= these and strict=False",
        )


def live_state(target: LiveTensor) -> BnbQuantState | None:
    """Return the QuantState of a quantized weight; None: it is not quantized yet."""
    return getattr(target.tensor, "quant_state", None) if is_live(target) else None


def holds_codes(target: LiveTensor) -> bool:
    """Return whether the weight, or this rank's shard of it, is quantized already."""
    if is_dtensor(target.tensor):
        return type(target.local).__name__ == LIVE_CLASS
    return live_state(target) is not None


def is_rounded(target: LiveTensor) -> bool:
    """Return whether a forward on the CPU has reordered the codes and rounded the scales: bitsandbytes
    computes with the rounded scales, and saves them in float32."""
    state = live_state(target)
    if state is None:
        return False
    nested = getattr(state, "state2", None)
    scales = [state.absmax] if nested is None else [nested.absmax]
    packed = getattr(state, "packing_format_for_cpu", False)
    return packed or any(str(scale.dtype) != "torch.float32" for scale in scales)


def logical(target: LiveTensor) -> TensorInfo | None:
    """Return shape and dtype of the weight that the codes stand for; None: it is not quantized yet."""
    state = live_state(target)
    if state is None:
        return None
    return TensorInfo(tuple(state.shape), str(state.dtype).removeprefix("torch."))


def stored_parts(target: LiveTensor) -> dict[str, torch.Tensor]:
    """Return the tensors that bitsandbytes saves of the weight, by the suffix of their names: codes "",
    scales ".absmax", ... Its layer brings codes that a forward on the CPU has reordered back in order.

    Raises LoadError CKM505 where the weight is cut over ranks: each rank has the scales of all of it.
    """
    module, name = target.places[0]
    if is_dtensor(target.tensor):
        raise LoadError(
            "CKM505",
            f"model: {target.fqn} is a Params4bit that is cut over ranks, expected one that is whole",
            "save the adapter alone with peft's save_pretrained, or keep the base in NF4Tensors",
        )
    found: dict[str, torch.Tensor] = {}
    module._save_to_state_dict(found, "", False)
    return {
        key.removeprefix(name): value.detach()
        for key, value in found.items()
        if key == name or key.startswith(f"{name}.")
    }


def keeps_codes(source: LazyTensor, target: LiveTensor) -> bool:
    """Return whether the live weight takes the source's codes bit for bit."""
    grid, state = code_grid(source), live_state(target)
    return source.encoding == NF4 or (
        grid is not None and state is not None and grid.name == state.quant_type
    )


def put(reader: TensorReader, source: LazyTensor, target: LiveTensor, device: torch.device) -> None:
    """Set the weight in every module that shares it: codes bit for bit where the source has such codes,
    else quantized with the live weight's settings. Reads the whole tensor. The dtype that stores the codes
    stays: FSDP flattens weights of one dtype only."""
    import bitsandbytes
    import torch

    if source.encoding == NF4:
        codes, state = _from_nf4(reader, source, device)
    else:
        live = live_state(target)
        assert live is not None, f"{target.fqn} has no settings to quantize with"
        if keeps_codes(source, target):
            codes, state = _from_codes(reader, source, live, device)
        else:
            codes, state = _quantized(reader, source, live, device)
    storage = getattr(target.tensor, "quant_storage", torch.uint8)
    codes = codes.view(-1).view(storage).view(-1, 1)
    for module, name in target.places:
        weight = bitsandbytes.nn.Params4bit(
            codes, requires_grad=False, quant_state=state,
            blocksize=state.blocksize, compress_statistics=state.nested, quant_storage=storage,
            quant_type=state.quant_type, module=module, bnb_quantized=True,
        )  # fmt: skip
        setattr(module, name, weight)
        module.quant_state = state  # type: ignore[assignment]


def _from_nf4(
    reader: TensorReader, source: LazyTensor, device: torch.device
) -> tuple[torch.Tensor, BnbQuantState]:
    from bitsandbytes.functional import QuantState

    encoding = source.encoding_
    assert isinstance(encoding, Nf4Encoding), "asked before"
    parts = {
        name: reader.part(source, name, Box.whole(part.info.shape), device)
        for name, part in source.parts.items()
    }
    scales = nf4_codes.scales(
        parts[SCALERS], parts[FACTOR], parts[MEAN], encoding.scaler_block_size, 0
    )
    state = QuantState(
        absmax=scales.float(), shape=_size(source), code=parts[TABLE].float(),
        blocksize=encoding.block_size, quant_type=NF4, dtype=source.torch_dtype,
    )  # fmt: skip
    return parts[DATA], state


def _from_codes(
    reader: TensorReader, source: LazyTensor, live: BnbQuantState, device: torch.device
) -> tuple[torch.Tensor, BnbQuantState]:
    """Return bitsandbytes' own codes, and a state with the decoded scales in float32: with the stored ones, where
    both double quantize them."""
    import torch
    from bitsandbytes.functional import QuantState, get_4bit_type

    grid = code_grid(source)
    assert grid is not None, "asked before"
    codes = torch.empty(grid.codes.shape, dtype=torch.uint8, device=device)
    reader.codes(source, Box.whole(grid.codes.shape), codes)
    scales = _nested_scales(reader, source, device) if live.nested else {}
    if not scales:
        scales = {"absmax": source.read_scales().view(-1).to(device)}
    state = QuantState(
        shape=_size(source), code=get_4bit_type(grid.name, device=str(device)),
        blocksize=2 * grid.block[0], quant_type=grid.name, dtype=live.dtype, **scales,
    )  # fmt: skip
    return codes, state


def _nested_scales(
    reader: TensorReader, source: LazyTensor, device: torch.device
) -> dict[str, object]:
    """Return the arguments of a QuantState for scales that are double quantized in the source; none where they are
    not."""
    import torch
    from bitsandbytes.functional import QuantState

    encoding = source.encoding_
    nested = encoding.nested if isinstance(encoding, FourBit) else None
    if nested is None or not isinstance(encoding, FourBit):
        return {}
    absmax, inner, table, text = (
        reader.part(source, name, Box.whole(source.parts[name].info.shape), device)
        for name in (ABSMAX, NESTED_ABSMAX, NESTED_MAP, encoding.state)
    )
    second = QuantState(
        absmax=inner, code=table, blocksize=nested.block, dtype=getattr(torch, nested.dtype)
    )
    offset = torch.tensor(nested_offset(text), device=device)
    return {"absmax": absmax, "offset": offset, "state2": second}


def _quantized(
    reader: TensorReader, source: LazyTensor, live: BnbQuantState, device: torch.device
) -> tuple[torch.Tensor, BnbQuantState]:
    """Quantize by bitsandbytes, with the live weight's settings."""
    import torch
    from bitsandbytes.functional import quantize_4bit

    values = torch.empty(source.shape, dtype=live.dtype, device=device)
    with reader.meter.hold(values.nbytes, device):
        reader.decoded(source, Box.whole(source.shape), values)
        made: tuple[torch.Tensor, BnbQuantState] = quantize_4bit(
            values, blocksize=live.blocksize, compress_statistics=live.nested,
            quant_type=live.quant_type,
        )  # fmt: skip
    return made


def _size(source: LazyTensor) -> torch.Size:
    import torch

    return torch.Size(source.shape)
