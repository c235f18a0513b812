"""Quantized tensors of schemes that this release carries as bytes only, recognised by their keys.

Their payload and their scales may move as they are; a cast or another encoding would destroy them
without a word, so a plan that asks for one refuses them by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptmap.tensors import TensorInfo

MANY_PACKED = 256
"""Elements from which a column of floats may be packed codes."""


@dataclass(frozen=True)
class Foreign:
    """A scheme by the end of the key that gives it away, of one of `dtypes` where they are said;
    `members` are all keys of one tensor, from its stem."""

    name: str
    mark: str
    members: tuple[str, ...]
    dtypes: tuple[str, ...] = ()


def _scheme(name: str, mark: str, *members: str, dtypes: tuple[str, ...] = ()) -> Foreign:
    return Foreign(name, mark, members, dtypes)


# Keys as written by each library; the stem is what stands before the mark. The first that fits
# names a tensor. Microscaling formats (MX) have exponents for scales, NVFP4 has two scales.
SCHEMES = (
    _scheme("NVFP4", ".weight_global_scale", ".weight_packed", ".weight_scale",
            ".weight_global_scale", ".input_global_scale"),
    _scheme("NVFP4", ".weight_scale_2", ".weight", ".weight_scale", ".weight_scale_2",
            ".input_scale"),
    _scheme("MXFP4, MXFP6 or MXFP8", ".weight_scale", ".weight_packed", ".weight",
            ".weight_scale", dtypes=("uint8", "float8_e8m0fnu")),
    _scheme("bitsandbytes int8", ".SCB", ".weight", ".SCB", ".weight_format"),
    _scheme("GPTQ or AWQ", ".qweight", ".qweight", ".qzeros", ".scales", ".g_idx"),
    _scheme("compressed-tensors", ".weight_packed", ".weight_packed", ".weight_scale",
            ".weight_shape", ".weight_zero_point", ".weight_g_idx"),
    _scheme("scaled int8 or fp8", ".weight_scale", ".weight", ".weight_scale",
            ".weight_zero_point", ".input_scale"),
    _scheme("block-scaled fp8", "_scale_inv", "", "_scale_inv"),
    _scheme("MXFP4", "_blocks", "_blocks", "_scales"),
    _scheme("torchao safetensors", "._weight_qdata", "._weight_qdata", "._weight_scale",
            "._weight_zero_point", "._weight_per_tensor_scale", "._weight_act_per_tensor_scale"),
)  # fmt: skip


NAKED = "bitsandbytes 4-bit, without its scales"
NAKED_INT8 = "int8, without its scales"
RESTORE = "restore its scales with --base PATH, the quantized checkpoint it was loaded from; or "


def naked_payloads(infos: Mapping[str, TensorInfo]) -> list[str]:
    """Weights that are nothing but packed codes, as FSDP2 saves those of bitsandbytes: one column.

    In uint8 no other weight is; in floats, where a linear layer of one input would look the same,
    only several of them that are long and of even sizes count.
    """
    columns = [
        (fqn, info)
        for fqn, info in infos.items()
        if len(info.shape) == 2 and info.shape[1] == 1 and fqn.endswith("weight")
    ]
    packed = [fqn for fqn, info in columns if info.dtype == "uint8"]
    floats = [
        fqn
        for fqn, info in columns
        if info.dtype in ("bfloat16", "float16", "float32")
        and info.shape[0] >= MANY_PACKED
        and info.nbytes % 32 == 0
    ]
    return packed + (floats if len(floats) > 1 else [])


def naked_int8(infos: Mapping[str, TensorInfo]) -> list[str]:
    """Matrices of int8 alone, as FSDP2 saves the weights of LLM.int8: no other weight is."""
    return [
        fqn
        for fqn, info in infos.items()
        if info.dtype == "int8" and len(info.shape) == 2 and fqn.endswith("weight")
    ]


def naked_note(infos: Mapping[str, TensorInfo]) -> list[str]:
    """What should be said of such payloads, and of weights that are not here at all."""
    notes = []
    empty = sum(0 in info.shape for info in infos.values())
    if empty * 2 > len(infos):
        notes.append(
            f"{empty} of {len(infos)} weights have no elements: DeepSpeed ZeRO-3 leaves such where"
            " they were not gathered"
        )
    for found, name in ((naked_payloads(infos), NAKED), (naked_int8(infos), NAKED_INT8)):
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            said = f"{found[0]}{more}: {name}: FSDP2 does not save them; --base PATH restores them"
            notes.append(said)
    return notes


def foreign_tensors(infos: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Key -> name of the scheme that it is a part of; `infos` are dense tensors, as stored."""
    found: dict[str, str] = {}
    for scheme in SCHEMES:
        for key in [key for key in infos if key.endswith(scheme.mark)]:
            if scheme.dtypes and infos[key].dtype not in scheme.dtypes:
                continue
            stem = key.removesuffix(scheme.mark)
            there = [stem + member for member in scheme.members if stem + member in infos]
            for member in there if len(there) > 1 else ():
                found.setdefault(member, scheme.name)
    naked = dict.fromkeys(naked_payloads(infos), NAKED)
    return {**naked, **dict.fromkeys(naked_int8(infos), NAKED_INT8), **found}
