"""Take torchao's MXTensor and NVFP4Tensor apart: flattened in safetensors files, pickled, or from our record.

    fc.weight: MXTensor -> fc._weight_qdata, fc._weight_scale
    {"_type": "MXTensor", "_data": {"elem_dtype", "block_size", "orig_dtype", "is_swizzled_scales", ...}}

Source: torchao 0.17 and 0.18, prototype/mx_formats/mx_tensor.py, nvfp4_tensor.py and prototype/safetensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ckptmap.formats.safetensors.torchao_metadata import SCHEME, part_key
from ckptmap.protocols.encodings import Record
from ckptmap.quantization.blockwise.group_checks import DAMAGED, malformed
from ckptmap.quantization.torchao.subclass_reader import as_json, state_of
from ckptmap.tensors import ITEMSIZE, Opaque, StoredTensor, TensorInfo

OPTIONAL = ("per_tensor_scale", "act_per_tensor_scale")
_ATTRIBUTES = {
    "MXTensor": (
        "elem_dtype", "block_size", "orig_dtype", "kernel_preference", "act_quant_kwargs",
        "is_swizzled_scales",
    ),
    "NVFP4Tensor": (
        "is_swizzled_scales", "use_triton_kernel", "act_quant_kwargs", "block_size", "orig_dtype",
    ),
}  # fmt: skip
KINDS = tuple(_ATTRIBUTES)
FP4 = "float4_e2m1fn_x2"


@dataclass(frozen=True)
class MicroscaledParts:
    """One object, taken apart.

    kind   torchao's class
    data   its attributes, as torchao writes them to JSON
    parts  its tensors by their names
    """

    fqn: str
    kind: str
    data: Mapping[str, object]
    parts: Mapping[str, StoredTensor]

    def dtype(self, key: str) -> str:
        """Return a dtype among the attributes. Raise SourceError CKM115 where there is none."""
        value = self.data.get(key)
        name = value.get("_data") if isinstance(value, Mapping) else None
        if not isinstance(name, str) or (name not in ITEMSIZE and name != FP4):
            raise malformed(self.fqn, f"{self.kind}: {key} is {str(value)[:60]}", DAMAGED)
        return name

    @property
    def elements(self) -> str:
        """The dtype of its codes; "" for codes of 6 bits, which have none."""
        if self.kind == "NVFP4Tensor":
            return FP4
        return "" if isinstance(self.data.get("elem_dtype"), str) else self.dtype("elem_dtype")

    @property
    def block(self) -> object:
        return self.data.get("block_size")

    @property
    def is_swizzled(self) -> bool:
        value = self.data.get("is_swizzled_scales", False)
        if not isinstance(value, bool):
            raise malformed(self.fqn, f"is_swizzled_scales is {str(value)[:40]}", DAMAGED)
        return value

    @property
    def info(self) -> TensorInfo:
        """The logical shape and dtype."""
        codes = self.parts.get("qdata")
        if codes is None or not codes.info.shape or "scale" not in self.parts:
            raise malformed(self.fqn, f"{self.kind} of {sorted(self.parts)}, no qdata and scale")
        *rows, width = codes.info.shape
        return TensorInfo(
            (*rows, width * 2 if self.elements == FP4 else width), self.dtype("orig_dtype")
        )


def described(fqn: str, record: Record) -> MicroscaledParts:
    """Return what a record with `kind` and `data` says, without parts. Raise SourceError CKM115."""
    data = record.get("data")
    if not isinstance(data, Mapping):
        raise malformed(fqn, f"malformed torchao metadata {str(dict(record))[:120]}", DAMAGED)
    return MicroscaledParts(fqn, str(record.get("kind")), data, {})


def flattened(fqn: str, record: Record, stored: Mapping[str, StoredTensor]) -> MicroscaledParts:
    """Return the parts of a record that has `names`, too. Raise SourceError CKM115."""
    names = record.get("names")
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise malformed(fqn, f"malformed torchao metadata {str(dict(record))[:120]}", DAMAGED)
    parts = {}
    for name in names:
        part = stored.get(part_key(fqn, name))
        if part is None:
            raise malformed(
                fqn, f"torchao's part {name!r} is missing, expected {part_key(fqn, name)!r}"
            )
        parts[name] = part
    return replace(described(fqn, record), parts=parts)


def is_flattened(record: Record) -> bool:
    """Return whether a record is torchao's entry of one of these classes."""
    return record.get("scheme") == SCHEME and record.get("kind") in KINDS


def pickled(fqn: str, leaf: Opaque) -> MicroscaledParts | None:
    """Return the parts of a pickled object; None: it is of another class."""
    if leaf.name not in KINDS or not leaf.module.startswith("torchao."):
        return None
    state = state_of(leaf)
    data = {name: as_json(state.get(name)) for name in _ATTRIBUTES[leaf.name]}
    names = ("qdata", "scale", *OPTIONAL)
    parts = {name: part for name in names if isinstance(part := state.get(name), StoredTensor)}
    made = MicroscaledParts(fqn, leaf.name, data, parts)
    if made.elements and leaf.info is not None and leaf.info != made.info:
        raise malformed(
            fqn, f"its {leaf.name} is {leaf.info}, but its qdata holds {made.info}",
            "save it before transposing it, or save it again",
        )  # fmt: skip
    return made
