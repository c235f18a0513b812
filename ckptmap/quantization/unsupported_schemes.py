"""Recognize quantized tensors of schemes that this release can only carry as bytes, by their keys.

Their codes and scales may move unchanged. A cast or another encoding would silently destroy them, so a
plan that asks for one refuses such tensors by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptmap.core.columns import each, few
from ckptmap.core.formatting import counted, some
from ckptmap.core.stored_parts import may_end
from ckptmap.tensors import TensorInfo

CODES = frozenset(
    {"uint8", "int8", "uint16", "int16", "uint32", "int32", "float8_e4m3fn", "float8_e5m2"}
)
"""The dtypes that codes are stored in; int64 is for counts and indices."""
NO_BUFFERS = frozenset({"float4_e2m1fn_x2", "float8_e8m0fnu", "uint16", "uint32", "uint64"})
"""The dtypes in which no library keeps values, masks or counts of a model."""
COMPANIONS = ("scale", "zero", "codebook", "absmax", "centroids")
"""Words in the last segment of a key that stands beside the codes of some scheme."""
PACKED_INTEGERS = "packed int4 (ModelOpt, Gemma)"
MANY_PARTS = 8
MANY_PACKED = 256
"""A column of floats may be packed codes from this many elements on."""


@dataclass(frozen=True)
class Foreign:
    """One foreign scheme.

    mark     the end of the key that identifies it; the stem is what stands before
    members  the ends of all keys of one tensor, after the stem; without any, everything below the stem but
             the bias belongs to it
    dtypes   dtypes of the marking tensor, where they matter
    payload  dtypes of the first member, where they matter
    single   whether the marking tensor must have one element
    """

    name: str
    mark: str
    members: tuple[str, ...]
    dtypes: tuple[str, ...] = ()
    payload: tuple[str, ...] = ()
    single: bool = False

    def marks(self, key: str, infos: Mapping[str, TensorInfo]) -> bool:
        """Return whether a key that ends in the mark identifies the scheme, by dtypes and sizes."""
        if (self.dtypes and infos[key].dtype not in self.dtypes) or (
            self.single and infos[key].numel != 1
        ):
            return False
        first = infos.get(key.removesuffix(self.mark) + self.members[0]) if self.payload else None
        return not self.payload or (first is not None and first.dtype in self.payload)


def _scheme(
    name: str,
    mark: str,
    *members: str,
    dtypes: tuple[str, ...] = (),
    payload: tuple[str, ...] = (),
    single: bool = False,
) -> Foreign:
    return Foreign(name, mark, members, dtypes, payload, single)


# Keys as written by each library; the stem is what stands before the mark. The first that fits
# names a tensor. Microscaling formats (MX) have exponents for scales, NVFP4 has two scales.
SCHEMES = (
    _scheme("NVFP4", ".weight_global_scale", ".weight_packed", ".weight_scale",
            ".weight_global_scale", ".input_global_scale"),
    _scheme("NVFP4", ".weight_scale_2", ".weight_scale", ".weight", ".weight_scale_2",
            ".input_scale", payload=("float8_e4m3fn",)),
    _scheme("NVFP4 with swizzled scales", ".weight_sf", ".weight", ".weight_sf",
            ".weight_sf_rowmajor", ".weight_global_scale", payload=("uint8",)),
    _scheme("MXFP6", ".weight_scale", ".weight_packed", ".weight",
            ".weight_scale", dtypes=("uint8", "float8_e8m0fnu")),
    _scheme("bitsandbytes int8", ".SCB", ".weight", ".SCB", ".weight_format"),
    _scheme("FP-Quant", ".forward_hadamard_matrix", ".qweight", ".dqweight", ".scales",
            ".forward_hadamard_matrix", ".backward_hadamard_matrix", ".weight_global_scale",
            ".act_global_scale"),
    _scheme("ParoQuant", ".theta", ".qweight", ".qzeros", ".scales", ".theta", ".pairs",
            ".channel_scales", payload=("int32",)),
    _scheme("GPTQ or AWQ", ".qweight", ".qweight", ".qzeros", ".scales", ".g_idx", ".scaled_zeros"),
    _scheme("sparse compressed-tensors", ".bitmask", ".bitmask", ".compressed", ".shape",
            ".row_offsets"),
    _scheme("SINQ", ".meta.scale2"),
    _scheme("HQQ", ".W_q"),
    _scheme("quanto", ".weight._data"),
    _scheme("quanto", ".weight._data._data"),
    _scheme("QQQ", ".s_channel", ".B", ".s_channel", ".s_group", payload=("int32",)),
    _scheme("Marlin", ".B", ".B", ".s", dtypes=("int32",)),
    _scheme("Marlin 2:4", ".scale_packed", ".weight_packed", ".scale_packed", ".meta"),
    _scheme("AQLM", ".codebooks", ".codes", ".codebooks", ".scales"),
    _scheme("VPTQ", ".centroids.weight", ".indices", ".res_indices", ".outlier_indices",
            ".centroids.weight", ".res_centroids.weight", ".outlier_centroids.weight",
            ".weight_scale", ".weight_bias", ".perm"),
    _scheme("HIGGS", ".tables2", ".weight", ".scales", ".tables", ".tables2"),
    _scheme("EETQ int8", ".weight_scales", ".weight", ".weight_scales", payload=("int8",)),
    _scheme("Metal", ".qbiases", ".weight", ".scales", ".qbiases", payload=("uint32",)),
    _scheme("MLX", ".biases", ".weight", ".scales", ".biases", payload=("uint32",)),
    _scheme("MLX", ".scales", ".weight", ".scales", payload=("uint32",)),
    _scheme("EXL2", ".q_weight", dtypes=("int32",)),
    _scheme("EXL3", ".trellis", dtypes=("int16",)),
    _scheme("SpQR", ".dense_weights"),
    _scheme("compressed-tensors", ".weight_packed", ".weight_packed", ".weight_scale",
            ".weight_shape", ".weight_zero_point", ".weight_g_idx"),
    _scheme("scaled uint8", ".weight_zero_point", ".weight", ".weight_scale", ".weight_zero_point",
            payload=("uint8",)),
    _scheme("BitNet", ".weight_scale", ".weight", ".weight_scale", payload=("uint8",), single=True),
    _scheme(PACKED_INTEGERS, ".weight_scale", ".weight", ".weight_scale", ".weight_scale_2",
            ".input_scale", ".pre_quant_scale", payload=("uint8",)),
    _scheme("scaled dense (BitNet, or compressed-tensors not yet compressed)", ".weight_scale",
            ".weight", ".weight_scale", ".weight_zero_point", ".weight_g_idx", ".input_scale",
            ".input_zero_point", ".output_scale", ".output_zero_point",
            payload=("bfloat16", "float16", "float32")),
    _scheme("scaled int8 or fp8", ".weight_scale", ".weight", ".weight_scale",
            ".weight_zero_point", ".input_scale", ".input_zero_point"),
    _scheme("block-scaled fp8", "_scale_inv", "", "_scale_inv"),
    _scheme("MXFP4", "_blocks", "_blocks", "_scales"),
    _scheme("torchao safetensors", "._weight_qdata", "._weight_qdata", "._weight_scale",
            "._weight_zero_point", "._weight_per_tensor_scale", "._weight_act_per_tensor_scale"),
)  # fmt: skip


READERS: Mapping[str, str] = {
    "AQLM": "transformers with the package aqlm runs it",
    "VPTQ": "transformers with the package vptq runs it",
    "EXL2": "exllamav2 runs it",
    "EXL3": "exllamav3 runs it",
    "HIGGS": "transformers with flute-kernel and fast-hadamard-transform runs it on a GPU",
    "FP-Quant": "transformers with the package fp_quant runs it on a GPU",
    "SpQR": "transformers with the package spqr_quant runs it on a GPU",
    "Marlin": "vLLM runs it on a GPU; it was packed from a GPTQ checkpoint, which has the same codes",
    "Marlin 2:4": "vLLM runs it on a GPU",
    "EETQ int8": "transformers with the package eetq runs it on a GPU",
    "Metal": "transformers runs it on an Apple GPU",
    "MLX": "mlx-lm makes it dense, with mlx[cpu] on Linux, too: `mlx_lm.convert --dequantize --hf-path SRC --mlx-path DENSE`",
    "BitNet": "transformers runs it",
    "scaled uint8": "AMD Quark loads it",
    PACKED_INTEGERS: "transformers runs Gemma's, TensorRT-LLM ModelOpt's",
    "GPTQ or AWQ": "its layouts gptq, gptq_v2, gptq_p and gemm are decoded where the config.json, quantize_config.json"
    " or quant_config.json that it was saved with lies beside the weights",
    "HQQ": "hqq loads it, and writes a form that is decoded with `save_to_safetensors`",
    "QQQ": "gptqmodel loads it on a GPU",
    "ParoQuant": "gptqmodel loads it",
    "SINQ": "the package sinq loads it",
    "NVFP4 with swizzled scales": "transformers runs it on a GPU",
    "quanto": "optimum-quanto loads it; put the model's config.json beside the weights",
    "MXINT4": "auto-round runs it",
    "rotated": "the library that wrote it computes with it",
    "sparse compressed-tensors": "compressed-tensors before 0.14 decompresses it",
}
"""Who can read a scheme, as a hint says it. Look for the checkpoint it was made from first: it has the values."""


def who_reads(scheme: str) -> str:
    """Return a sentence of a hint on who reads tensors of a scheme; "" where nobody is named."""
    reader = READERS.get(scheme) or READERS.get(scheme.partition(" (")[0])
    return f"{reader}; convert the dense checkpoint it was made from; or " if reader else ""


WITHOUT_SCALES = "bitsandbytes 4-bit, without its scales"
INT8_WITHOUT_SCALES = "int8, without its scales"
RESTORE = "restore its scales with --base PATH, the quantized checkpoint it was loaded from; or "


def payloads_without_scales(infos: Mapping[str, TensorInfo]) -> list[str]:
    """Return weights that are packed codes without scales, as FSDP2 saves those of bitsandbytes.

    They have one column. In uint8 no other weight has. In floats a linear layer with one input looks the
    same, so only several long columns of even sizes count.
    """
    if all(info.shape[1:] != (1,) for info in few(infos)):
        return []
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


def int8_without_scales(infos: Mapping[str, TensorInfo]) -> list[str]:
    """Return int8 matrices without scales, as FSDP2 saves the weights of LLM.int8."""
    if all(info.dtype != "int8" for info in few(infos)):
        return []
    scaled = {*_coded(infos)}
    return [
        fqn
        for fqn, info in infos.items()
        if info.dtype == "int8" and len(info.shape) == 2 and fqn.endswith("weight")
        if fqn.rpartition(".")[0] not in scaled
    ]


def may_be_codes(info: TensorInfo) -> bool:
    """Return whether a plain tensor may hold codes, by its dtype: buffers are masks, counts and indices in others."""
    return info.dtype in NO_BUFFERS or (info.dtype in ("uint8", "int16") and len(info.shape) == 2)


def missing_scales_note(infos: Mapping[str, TensorInfo]) -> list[str]:
    """Return the notes about codes without scales, empty weights and foreign schemes."""
    notes: list[str] = []
    kinds = few(infos)
    if not any(0 in info.shape or info.shape[1:] == (1,) or info.dtype in CODES for info in kinds):
        return notes  # the usual case
    empty = sum(each(infos.values(), lambda info: 0 in info.shape))
    if empty * 2 > len(infos):
        notes.append(
            f"{empty} of {counted(len(infos), 'weight', 'has', 'have')} no elements: DeepSpeed ZeRO-3 leaves such where"
            " they were not gathered"
        )
    for names, name in (
        (payloads_without_scales(infos), WITHOUT_SCALES),
        (int8_without_scales(infos), INT8_WITHOUT_SCALES),
    ):
        if names:
            said = f"{some(names, 1)}: {name}: FSDP2 does not save them; --base PATH restores them"
            notes.append(said)
    return notes + foreign_notes(infos)


def foreign_notes(infos: Mapping[str, TensorInfo]) -> list[str]:
    """Return a note for each foreign scheme with the names of its parts, as `inspect` prints them."""
    if CODES.isdisjoint(info.dtype for info in few(infos)):
        return []
    schemes: dict[str, list[str]] = {}
    for key, name in foreign_tensors(infos).items():
        if name not in (WITHOUT_SCALES, INT8_WITHOUT_SCALES):
            schemes.setdefault(name, []).append(key)
    notes = []
    for name, keys in schemes.items():
        parts = sorted({key.rpartition(".")[2] for key in keys})
        listed = ", ".join(parts[:MANY_PARTS]) + (", ..." if len(parts) > MANY_PARTS else "")
        notes.append(
            f"{keys[0]}: {name}, {counted(len(keys), 'tensor')}, in parts {listed}: they move as bytes only"
        )
    return notes


def foreign_tensors(infos: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Return key -> name of the foreign scheme it belongs to; `infos` are the dense tensors as stored."""
    schemes: dict[str, str] = {}
    modules: dict[str, str] = {}
    lasts = {key[key.rfind(".") + 1 :] for key in infos}
    for scheme in SCHEMES:
        if not any(may_end(last, scheme.mark.rpartition(".")) for last in lasts):
            continue
        for key in [key for key in infos if key.endswith(scheme.mark)]:
            if not scheme.marks(key, infos):
                continue
            stem = key.removesuffix(scheme.mark)
            if not scheme.members:
                modules.setdefault(stem, scheme.name)
            there = [stem + member for member in scheme.members if stem + member in infos]
            for member in there if len(there) > 1 else ():
                schemes.setdefault(member, scheme.name)
    for stem in _coded(infos):
        if stem.rpartition(".")[0] not in modules:
            modules.setdefault(stem, "foreign quantized")
    without_scales = dict.fromkeys(payloads_without_scales(infos), WITHOUT_SCALES)
    without_scales |= dict.fromkeys(int8_without_scales(infos), INT8_WITHOUT_SCALES)
    return {**without_scales, **_below(modules, infos), **schemes}


def codes_of_method(infos: Mapping[str, TensorInfo], method: str) -> dict[str, str]:
    """Return key -> the name of a method, for what may be codes, and for all that is in the same module but the bias.

    infos  tensors of which no scheme decodes one, though a config states the method
    """
    codes = [key for key, info in infos.items() if info.dtype in CODES and len(info.shape) > 1]
    codes += [key for key, info in infos.items() if info.dtype in NO_BUFFERS]
    name = f"quant_method {method[:40]!r}"
    stems = {stem: name for key in codes if (stem := key.rpartition(".")[0])}
    return dict.fromkeys(codes, name) | _below(stems, infos)


def _coded(infos: Mapping[str, TensorInfo]) -> list[str]:
    """Return modules that hold codes of any scheme: a matrix in a dtype of codes with scales beside it."""
    if all(len(i.shape) < 2 or i.dtype not in CODES for i in few(infos)):
        return []  # the usual case
    stems = {
        key.rpartition(".")[0]
        for key, info in infos.items()
        if len(info.shape) > 1 and info.dtype in CODES
    }
    return [
        stem
        for stem, _, last in (key.rpartition(".") for key in infos if stems)
        if stem in stems and stem and any(word in last for word in COMPANIONS)
    ]


def _below(modules: Mapping[str, str], infos: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Return every key below these modules but the biases, which no library quantizes."""
    below = {}
    for key in infos if modules else ():
        stem, _, last = key.rpartition(".")
        while stem and stem not in modules:
            stem = stem.rpartition(".")[0]
        if stem and not last.endswith("bias"):
            below[key] = modules[stem]
    return below
