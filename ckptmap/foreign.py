"""Quantized tensors of schemes that this release carries as bytes only, recognised by their keys.

Their payload and their scales may move as they are; a cast or another encoding would destroy them
without a word, so a plan that asks for one refuses them by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ckptmap.tensors import TensorInfo

MANY_PACKED = 256
"""Elements from which a column of floats may be packed codes."""


@dataclass(frozen=True)
class Foreign:
    """A scheme by the key that gives it away; `members` are all keys of one tensor, from its stem."""

    name: str
    mark: re.Pattern[str]
    members: tuple[str, ...]


def _scheme(name: str, mark: str, *members: str) -> Foreign:
    return Foreign(name, re.compile(rf"(?P<stem>.*){mark}"), members)


# Keys as written by each library; the stem is what stands before the mark.
SCHEMES = (
    _scheme("bitsandbytes int8", r"\.SCB", ".weight", ".SCB", ".weight_format"),
    _scheme("GPTQ or AWQ", r"\.qweight", ".qweight", ".qzeros", ".scales", ".g_idx"),
    _scheme("compressed-tensors", r"\.weight_packed", ".weight_packed", ".weight_scale",
            ".weight_shape", ".weight_zero_point", ".weight_g_idx"),
    _scheme("scaled int8 or fp8", r"\.weight_scale", ".weight", ".weight_scale",
            ".weight_zero_point", ".input_scale"),
    _scheme("block-scaled fp8", r"_scale_inv", "", "_scale_inv"),
    _scheme("MXFP4", r"_blocks", "_blocks", "_scales"),
    _scheme("torchao safetensors", r"\._weight_qdata", "._weight_qdata", "._weight_scale",
            "._weight_zero_point"),
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
    """What should be said of such payloads."""
    notes = []
    for found, name in ((naked_payloads(infos), NAKED), (naked_int8(infos), NAKED_INT8)):
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            said = f"{found[0]}{more}: {name}: FSDP2 does not save them; --base PATH restores them"
            notes.append(said)
    return notes


def foreign_tensors(infos: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Key -> name of the scheme that it is a part of; `infos` are dense tensors, as stored."""
    found = dict.fromkeys(naked_payloads(infos), NAKED)
    found |= dict.fromkeys(naked_int8(infos), NAKED_INT8)
    for key in infos:
        for scheme in SCHEMES:
            match = scheme.mark.fullmatch(key)
            if match:
                stem = match["stem"]
                members = [stem + member for member in scheme.members if stem + member in infos]
                if len(members) > 1:
                    found.update({member: scheme.name for member in members})
    return found
