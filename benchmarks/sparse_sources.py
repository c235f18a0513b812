"""Write checkpoints of 100,000 and more quantized tensors whose codes are holes: headers as large as
those of the largest releases, and hardly a byte on the disk.

    python benchmarks/sparse_sources.py FORM FOLDER [LAYERS]

    ct-int4    the form of Kimi-K2-Thinking: 384 experts a layer, int4 in groups of 32, in 64 files
    fp8-block  the form of DeepSeek-V3: float8 with a scale for each tile of 128 x 128
    bnb-nf4    bitsandbytes' 4 bits, with a JSON blob for each weight
    torchao    int8 tensors as torchao flattens them into safetensors, described in the headers
    ct-mxfp4   compressed-tensors' MXFP4: codes and a power of two for each 32, both of dtype uint8

An imitation: names, shapes, dtypes, config and header order (by alignment, then by name) are those of
the real writers, values are 0, save those that a reader must see to know shapes.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

FILES = 64
LAYERS, EXPERTS = 61, 384
HIDDEN, EXPERT_FFN = 7168, 2048
ITEM_NBYTES = {"I64": 8, "F32": 4, "I32": 4, "BF16": 2, "U8": 1, "I8": 1, "F8_E4M3": 1}
"""Bytes of an item, in the order in which safetensors writes the dtypes."""


class Made(NamedTuple):
    """A tensor of a sparse file; `data` is b"" where it is a hole."""

    name: str
    dtype: str
    shape: Sequence[int]
    data: bytes = b""

    @property
    def nbytes(self) -> int:
        nbytes = ITEM_NBYTES[self.dtype]
        for size in self.shape:
            nbytes *= size
        return nbytes


class Source(NamedTuple):
    """How a form keeps one weight, and what it writes beside all of them.

    parts     fqn, rows, columns -> its tensors
    config    the quantization_config of config.json
    metadata  tensors of a file -> the metadata of its header
    layers    of the model, so that 200,000 tensors or more are stored
    """

    parts: Callable[[str, int, int], Iterator[Made]]
    config: Mapping[str, object]
    metadata: Callable[[Sequence[Made]], Mapping[str, str]] = lambda tensors: {"format": "pt"}
    layers: int = LAYERS


# ------------------------------------------------------------------------- forms


def _ct_int4(fqn: str, rows: int, columns: int) -> Iterator[Made]:
    yield Made(f"{fqn}_packed", "I32", (rows, columns // 8))
    yield Made(f"{fqn}_scale", "BF16", (rows, columns // 32))
    yield Made(f"{fqn}_shape", "I64", (2,), struct.pack("<2q", rows, columns))


CT_INT4: Mapping[str, object] = {
    "config_groups": {
        "group_0": {
            "input_activations": None, "output_activations": None, "targets": ["Linear"],
            "weights": {
                "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32,
                "num_bits": 4, "observer": "minmax", "observer_kwargs": {}, "strategy": "group",
                "symmetric": True, "type": "int",
            },
        }
    },
    "format": "pack-quantized", "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
    "kv_cache_scheme": None, "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}  # fmt: skip


def _fp8_block(fqn: str, rows: int, columns: int) -> Iterator[Made]:
    yield Made(fqn, "F8_E4M3", (rows, columns))
    yield Made(f"{fqn}_scale_inv", "F32", (-(-rows // 128), -(-columns // 128)))


FP8_BLOCK: Mapping[str, object] = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
    "weight_block_size": [128, 128],
}  # fmt: skip


def _bnb_nf4(fqn: str, rows: int, columns: int) -> Iterator[Made]:
    blob = json.dumps(
        {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [rows, columns]}
    ).encode()
    yield Made(fqn, "U8", (rows * columns // 2, 1))
    yield Made(f"{fqn}.absmax", "F32", (rows * columns // 64,))
    yield Made(f"{fqn}.quant_map", "F32", (16,), struct.pack("<16f", *NF4))
    yield Made(f"{fqn}.quant_state.bitsandbytes__nf4", "U8", (len(blob),), blob)


BNB_NF4: Mapping[str, object] = {
    "_load_in_4bit": True, "_load_in_8bit": False, "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8", "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": False, "llm_int8_enable_fp32_cpu_offload": False,
    "llm_int8_has_fp16_weight": False, "llm_int8_skip_modules": ["lm_head"],
    "llm_int8_threshold": 6.0, "load_in_4bit": True, "load_in_8bit": False,
    "quant_method": "bitsandbytes",
}  # fmt: skip
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip


def _torchao_int8(fqn: str, rows: int, columns: int) -> Iterator[Made]:
    stem, _, last = fqn.rpartition(".")
    yield Made(f"{stem}._{last}_qdata", "I8", (rows, columns))
    yield Made(f"{stem}._{last}_scale", "F32", (rows, 1))
    yield Made(f"{stem}._{last}_zero_point", "I8", (rows, 1))


def _torchao_metadata(tensors: Sequence[Made]) -> Mapping[str, str]:
    """Return the entries of the tensors of this file; transformers repeats all of them in each."""
    metadata = {"format": "pt"}
    for tensor in tensors:
        stem, _, part = tensor.name.rpartition(".")
        if part.endswith("_qdata"):
            entry = {
                "_type": "Int8Tensor",
                "_data": {
                    "act_quant_kwargs": None, "reduce_range": False,
                    "block_size": [1, tensor.shape[1]],
                    "dtype": {"_type": "torch.dtype", "_data": "bfloat16"},
                },
                "_tensor_data_names": ["zero_point", "qdata", "scale"],
            }  # fmt: skip
            metadata[f"{stem}.{part[1:].removesuffix('_qdata')}"] = json.dumps(entry)
        elif not part.startswith("_"):
            metadata[tensor.name] = json.dumps({"_type": "Tensor"})
    return {**metadata, "tensor_names": json.dumps([*metadata][1:])}


TORCHAO: Mapping[str, object] = {
    "quant_method": "torchao",
    "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}},
}


def _ct_mxfp4(fqn: str, rows: int, columns: int) -> Iterator[Made]:
    yield Made(f"{fqn}_packed", "U8", (rows, columns // 2))
    yield Made(f"{fqn}_scale", "U8", (rows, columns // 32))


CT_MXFP4: Mapping[str, object] = {
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized", "input_activations": None, "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32,
                "num_bits": 4, "observer": "memoryless_minmax", "observer_kwargs": {},
                "scale_dtype": "torch.uint8", "strategy": "group", "symmetric": True,
                "type": "float", "zp_dtype": None,
            },
        }
    },
    "format": "mxfp4-pack-quantized", "ignore": ["lm_head", "re:.*self_attn.*"],
    "kv_cache_scheme": None, "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}  # fmt: skip

FORMS: Mapping[str, Source] = {
    "ct-int4": Source(_ct_int4, CT_INT4),
    "fp8-block": Source(_fp8_block, FP8_BLOCK, layers=88),
    "bnb-nf4": Source(_bnb_nf4, BNB_NF4),
    "torchao": Source(_torchao_int8, TORCHAO, _torchao_metadata),
    "ct-mxfp4": Source(_ct_mxfp4, CT_MXFP4, layers=88),
}


# ------------------------------------------------------------------------- files


def tensors(form: str, layers: int) -> Iterator[Made]:
    """Yield the tensors of a model: the first layer is dense, each other one has EXPERTS experts."""
    parts = FORMS[form].parts
    yield Made("model.embed_tokens.weight", "BF16", (163840, HIDDEN))
    for layer in range(layers):
        at = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield Made(f"{at}.{norm}.weight", "BF16", (HIDDEN,))
        yield Made(f"{at}.self_attn.o_proj.weight", "BF16", (HIDDEN, 8192))
        if not layer:
            continue
        yield Made(f"{at}.mlp.gate.weight", "BF16", (EXPERTS, HIDDEN))
        for expert in range(EXPERTS):
            module = f"{at}.mlp.experts.{expert}"
            yield from parts(f"{module}.down_proj.weight", HIDDEN, EXPERT_FFN)
            yield from parts(f"{module}.gate_proj.weight", EXPERT_FFN, HIDDEN)
            yield from parts(f"{module}.up_proj.weight", EXPERT_FFN, HIDDEN)
    yield Made("model.norm.weight", "BF16", (HIDDEN,))
    yield Made("lm_head.weight", "BF16", (163840, HIDDEN))


def write(form: str, folder: Path, layers: int = 0, files: int = FILES) -> None:
    """Write the checkpoint of a form, about as many tensors in each file, with index and config.

    layers  0: as many as the form has
    """
    folder.mkdir(parents=True)
    layers = layers or FORMS[form].layers
    made = list(tensors(form, layers))
    share = -(-len(made) // files)
    weight_map = {}
    for number in range(files):
        held = made[number * share : (number + 1) * share]
        name = f"model-{number + 1:05}-of-{files:06}.safetensors"
        _write_file(folder / name, held, FORMS[form].metadata(held))
        weight_map |= {tensor.name: name for tensor in held}
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in made)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
                "hidden_size": HIDDEN, "num_hidden_layers": layers, "torch_dtype": "bfloat16",
                "tie_word_embeddings": False, "quantization_config": FORMS[form].config,
            }
        )
    )  # fmt: skip


def _write_file(path: Path, held: Sequence[Made], metadata: Mapping[str, str]) -> None:
    order = list(ITEM_NBYTES)
    held = sorted(held, key=lambda tensor: (order.index(tensor.dtype), tensor.name))
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    end, values = 0, []
    for tensor in held:
        start, end = end, end + tensor.nbytes
        header[tensor.name] = {
            "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end],
        }  # fmt: skip
        if tensor.data:
            values.append((start, tensor.data))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for start, data in values:
            file.seek(8 + len(text) + start)
            file.write(data)
        file.truncate(8 + len(text) + end)


if __name__ == "__main__":
    chosen, where, *more = sys.argv[1:]
    write(chosen, Path(where), *map(int, more))
