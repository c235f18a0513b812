"""Read torchao's pickled tensor subclasses with 8-bit codes, of releases 0.7 to 0.18, as their parts.

    Int8Tensor, IntxUnpackedToInt8Tensor, Float8Tensor                 since 0.14
    IntxUnpackedTensor                                                 0.13, renamed since
    AffineQuantizedTensor > PlainAQTTensorImpl, Float8AQTTensorImpl    up to 0.17
    AffineQuantizedTensor > QDQTensorImpl, of IntxWeightOnlyConfig     0.11 to 0.14
    LinearActivationQuantizedTensor > any of the others                up to 0.17
    Int8QuantizedTrainingLinearWeight                                  prototype: int_data, scale [out]

Classes are recognized by name and by a module of torchao; they are never imported. Scales and zero points
get the shape of their grid: [out] becomes [out, 1].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptmap.errors import SourceError
from ckptmap.quantization.blockwise import block_geometry
from ckptmap.quantization.blockwise.group_checks import DAMAGED, malformed, read_sizes
from ckptmap.tensors import Opaque, StoredTensor, TensorInfo

_ENUMS: Mapping[tuple[str, object], str] = {
    ("MappingType", 1): "SYMMETRIC",
    ("MappingType", 2): "SYMMETRIC_NO_CLIPPING_ERR",
    ("MappingType", 3): "ASYMMETRIC",
}
OPTIONAL = ("act_quant_scale", "act_quant_zero_point")
SMOOTHING = "act_pre_scale"
"""What each column's activations are multiplied by first, as SmoothQuant wants it: the values of the weight are those of
its codes times it."""
PARTS = ("qdata", "scale", "zero_point", *OPTIONAL, SMOOTHING)
"""The tensors that an object of these classes may hold."""
_ATTRIBUTES = {
    "Int8Tensor": ("act_quant_kwargs", "reduce_range"),
    "IntxUnpackedToInt8Tensor": ("target_dtype", "activation_quantization"),
    "Float8Tensor": ("mm_config", "act_quant_kwargs", "kernel_preference"),
}
_RENAMED = {"IntxUnpackedTensor": "IntxUnpackedToInt8Tensor"}
"""Of 0.13, which had no `activation_quantization`."""
TRAINED = "Int8QuantizedTrainingLinearWeight"
TRAINED_DENSE: Mapping[str, str] = {
    "Int8MixedPrecisionTrainingLinearWeight": "_data",
    "BitNetTrainingLinearWeight": "_data",
    "WeightWithDynamicFloat8CastTensor": "_tensor",
    "ScaledGroupedMMTensor": "_data",
    "Float8TrainingWeightWrapperTensor": "_data",
    "MXFP8TrainingWeightWrapperTensor": "_data",
}
"""torchao's weights that each forward quantizes and that are kept dense, and the attribute that holds
them: int8 and BitNet training, float8 with a float8 all-gather, and that of experts (0.13 to 0.18)."""
_WRAPPER = "LinearActivationQuantizedTensor"
_MAX_DEPTH = 8


@dataclass(frozen=True)
class TorchaoParts:
    """One object, taken apart.

    kind        torchao's present class that holds the same
    attributes  of that class, as torchao writes them to JSON
    activation  how a class that is gone quantized activations; empty: not at all
    """

    kind: str
    info: TensorInfo
    block: tuple[int, ...]
    codes: StoredTensor
    scale: StoredTensor
    zero: StoredTensor | None
    extra: Mapping[str, StoredTensor]
    attributes: Mapping[str, object]
    activation: str = ""


def kind_of(leaf: Opaque) -> str:
    """Return the name of the class that holds the codes, inside its wrapper, "" for any other class."""
    inner = _within(leaf)
    if inner is None or not inner.module.startswith("torchao."):
        return ""
    if inner.name == "AffineQuantizedTensor":
        impl = state_of(inner).get("tensor_impl")
        return impl.name if isinstance(impl, Opaque) else ""
    kind = _RENAMED.get(inner.name, inner.name)
    return kind if kind in (*_ATTRIBUTES, TRAINED) else ""


def _within(leaf: Opaque) -> Opaque | None:
    """Return the tensor inside the wrapper that quantizes activations, None where there is none."""
    if leaf.name != _WRAPPER:
        return leaf
    inner = state_of(leaf).get("original_weight_tensor")
    return inner if isinstance(inner, Opaque) and inner.name != _WRAPPER else None


def state_of(leaf: Opaque) -> Mapping[str, Any]:
    """Return the attributes of a pickled object, empty where it has none."""
    return leaf.state if isinstance(leaf.state, Mapping) else {}


def unpack(fqn: str, leaf: Opaque) -> TorchaoParts:
    """Return the parts of one object. Raises SourceError CKM115 where they are missing or do not fit."""
    state = leaf.state
    if leaf.info is None or not isinstance(state, Mapping):
        raise malformed(fqn, f"{leaf.class_name} without shape or state", "the pickle is damaged")
    if leaf.name == _WRAPPER:
        func, within = state.get("input_quant_func"), _within(leaf)
        assert within is not None, f"{fqn}: adopted by its kind, which it does not have"
        _require_same(fqn, leaf, within)
        inner = unpack(fqn, within)
        name = func.name if isinstance(func, Opaque) else "unknown"
        return TorchaoParts(**{**vars(inner), "activation": name})
    if leaf.name == "AffineQuantizedTensor":
        return _affine(fqn, leaf, state)
    if leaf.name == TRAINED:
        block = block_geometry.per_row(leaf.info.shape)
        return _made(fqn, "Int8Tensor", leaf.info, block, state, "int_data", {})
    block = block_geometry.clamped(_block(fqn, leaf.info, state), leaf.info.shape)
    kind = _RENAMED.get(leaf.name, leaf.name)
    attributes = {name: as_json(state.get(name)) for name in _ATTRIBUTES[kind]}
    return _made(fqn, kind, leaf.info, block, state, "qdata", attributes)


def _require_same(fqn: str, outer: Opaque, inner: Opaque) -> None:
    """Raise SourceError CKM115 where a wrapper is of another shape or dtype than the tensor inside."""
    if inner.info is not None and inner.info != outer.info:
        raise _differs(fqn, outer, inner)


def _differs(fqn: str, outer: Opaque, inner: Opaque) -> SourceError:
    return malformed(
        fqn, f"its {outer.name} is {outer.info}, but the {inner.name} inside is {inner.info}",
        "the pickle is damaged; save it again",
    )  # fmt: skip


def _block(fqn: str, info: TensorInfo, state: Mapping[str, object]) -> tuple[int, ...]:
    """Return torchao's block size; an empty or absent one means the whole tensor."""
    given = state.get("block_size")
    if not given:
        return info.shape
    block = read_sizes(fqn, given, "block_size")
    if len(block) != len(info.shape):
        raise malformed(fqn, f"block_size {list(block)} of shape {list(info.shape)}", DAMAGED)
    return block


def _affine(fqn: str, leaf: Opaque, state: Mapping[str, object]) -> TorchaoParts:
    impl, info = state["tensor_impl"], leaf.info
    assert isinstance(impl, Opaque) and info is not None, "kind_of has seen both"
    if impl.info is not None and impl.info.shape != info.shape:
        raise _differs(fqn, leaf, impl)
    inner = state_of(impl)
    block = block_geometry.clamped(_block(fqn, info, state), info.shape)
    if impl.name == "Float8AQTTensorImpl":
        if inner.get("transposed"):
            raise malformed(
                fqn, "a transposed Float8AQTTensorImpl", "save it before transposing it"
            )
        return _made(fqn, "Float8Tensor", info, block, inner, "float8_data", {})
    domain = state.get("zero_point_domain")
    if isinstance(domain, Opaque) and domain.args[:1] not in ((1,), (3,)):
        raise malformed(
            fqn,
            "an AffineQuantizedTensor whose zero point is in the floating point domain",
            "decode it with the torchao that wrote it",
        )
    return _made(fqn, "Int8Tensor", info, block, inner, "int_data", {})


def _made(
    fqn: str,
    kind: str,
    info: TensorInfo,
    block: tuple[int, ...],
    state: Mapping[str, object],
    codes_name: str,
    attributes: Mapping[str, object],
) -> TorchaoParts:
    codes, scale, zero = state.get(codes_name), state.get("scale"), state.get("zero_point")
    grid = block_geometry.grid_shape(info.shape, block)
    named = {codes_name: codes, "scale": scale} | ({} if zero is None else {"zero_point": zero})
    for name, part in named.items():
        if not isinstance(part, StoredTensor):
            raise malformed(fqn, f"{kind} part {name!r} is missing or no plain tensor")
        shape, is_codes = part.info.shape, name == codes_name
        if not (shape == info.shape if is_codes else block_geometry.fits(shape, grid)):
            want = list(info.shape if is_codes else grid)
            raise malformed(fqn, f"{kind} part {name!r}, expected shape {want}, found {part.info}")
    assert isinstance(codes, StoredTensor) and isinstance(scale, StoredTensor)
    assert zero is None or isinstance(zero, StoredTensor)
    return TorchaoParts(
        kind, info, block, codes, block_geometry.reshaped(scale, grid),
        None if zero is None else block_geometry.reshaped(zero, grid),
        {k: v for k in (*OPTIONAL, SMOOTHING) if isinstance(v := state.get(k), StoredTensor)}, attributes,
    )  # fmt: skip


def as_json(value: object, depth: int = 0) -> object:
    """Return an attribute as torchao's safetensors flattening writes it (prototype/safetensors).

    Return None for what is nested deeper than any attribute of torchao's: a pickle can contain itself.
    """
    if depth > _MAX_DEPTH:
        return None
    if isinstance(value, Opaque):
        if value.module == "torch":
            return {"_type": "torch.dtype", "_data": value.name}
        if isinstance(value.state, Mapping):
            return {
                "_type": value.name,
                "_data": {str(k): as_json(v, depth + 1) for k, v in value.state.items()},
            }
        if len(value.args) == 1 and isinstance(value.args[0], int | str):
            shown = str(value.args[0]).upper()
            return {"_type": value.name, "_data": _ENUMS.get((value.name, value.args[0]), shown)}
        return {"_type": value.name, "_data": {}}
    if isinstance(value, list | tuple):
        return [as_json(item, depth + 1) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    name = getattr(value, "name", None)  # a dtype
    return {"_type": "torch.dtype", "_data": name} if isinstance(name, str) else None
