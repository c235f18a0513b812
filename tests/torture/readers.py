"""The reference readers: what the formats' own libraries make of a path, as dense tensors by name.

Nothing here knows ckptmap. A reader raises where its library refuses.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.corpus.case import WRAPPER_SEGMENTS
from tests.corpus.loaders import dcp_blobs, load_dcp, load_ranks, load_torch, raw_bytes

Named = Mapping[str, Tensor]
Content = Counter[tuple[str, str, tuple[int, ...], str]]
"""Every tensor as (name, dtype, shape, digest of its bytes), with how often it occurs."""
WRAPPERS = WRAPPER_SEGMENTS | {"module"}


def content(tensors: Named, wide: bool = False, close: bool = False) -> Content:
    """Return what the tensors are, under names without wrappers and roots.

    Optimizer state is keyed by index or by FQN; so only the last part of its name counts. `wide`:
    floats of any dtype as float32; `close`: means and deviations alone, of few digits.
    """
    values = {name: _wide(value) if wide else value for name, value in tensors.items()}
    digest = _about if close else _digest
    return Counter(
        (_plain(name), str(value.dtype), tuple(value.shape), digest(value))
        for name, value in values.items()
    )


def _wide(value: Tensor) -> Tensor:
    """Return floats as float32 with one NaN: arithmetic does not keep the payload of another."""
    if not value.is_floating_point():
        return value
    return torch.where(value.isnan(), torch.nan, value.float())


def _about(value: Tensor) -> str:
    """Return the sums of halves of a tensor with three digits: a merge is rounded in other places."""
    return " ".join(f"{part.double().abs().mean():.3g}" for part in value.reshape(-1).chunk(2))


def _plain(name: str) -> str:
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    if parts[:1] == ["optimizer"]:
        return f"optimizer.{parts[-1]}"
    while parts[:1] in (["model"], ["state"]):
        parts = parts[1:]
    return ".".join(parts)


def _digest(value: Tensor) -> str:
    return hashlib.blake2b(raw_bytes(value).numpy().tobytes(), digest_size=8).hexdigest()


# ------------------------------------------------------------------------------- containers


def read_torch(path: Path) -> Named:
    """A torch.save file, whose stored CRC-32 must be right: torch.load does not look at them."""
    check_crcs(path)
    return dict(flat(load_torch(path)))


def read_ranks(path: Path) -> Named:
    for file in path.glob("*.pt"):
        check_crcs(file)
    return dict(flat(load_ranks(path)))


def read_dcp(path: Path) -> Named:
    check_items(path)
    return dict(flat(load_dcp(path)))


def read_dcp_blobs(path: Path) -> Named:
    """A DCP of torchao's tensors, which dcp.load refuses: each item by itself."""
    check_items(path)
    found: dict[str, Tensor] = {}
    for name, (item,) in dcp_blobs(path).items():
        found |= flat(item, name)
    return found


def read_safetensors(path: Path) -> Named:
    from safetensors.torch import load_file

    return load_file(path)


def read_gguf(path: Path) -> Named:
    """A GGUF file, decoded by the `gguf` package."""
    import numpy as np
    from gguf import GGUFReader, dequantize

    found = {}
    for each in GGUFReader(str(path)).tensors:
        plain = each.data.dtype != np.uint8
        with np.errstate(all="ignore"):
            values = each.data if plain else dequantize(each.data, each.tensor_type)
        found[each.name] = torch.from_numpy(np.array(values))
    return found


def read_hf(path: Path) -> Named:
    """A directory of safetensors, as transformers reads it: all of each file that the index names."""
    index = path / "model.safetensors.index.json"
    if not index.exists():
        return read_safetensors(path / "model.safetensors")
    named: Mapping[str, str] = json.loads(index.read_text())["weight_map"]
    files = {file: read_safetensors(path / file) for file in sorted(set(named.values()))}
    for name, file in named.items():
        if name not in files[file]:
            raise ValueError(f"{name}: is not in {file}")
    return {name: value for tensors in files.values() for name, value in tensors.items()}


def read_flattened(path: Path) -> Named:
    """torchao's tensors, flattened into safetensors by torchao."""
    from safetensors import safe_open
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    with safe_open(path, "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata: Any = file.metadata()
    tensors, left = unflatten_tensor_state_dict(stored, metadata)
    return dict(flat({**tensors, **left}))


def read_bnb(path: Path) -> Named:
    """4-bit weights of bitsandbytes, decoded by its generic formula."""
    from bitsandbytes.functional import QuantState

    from tests.support.bnb_cases import decoded

    stored = dict(read_safetensors(path))
    found: dict[str, Tensor] = {}
    for key in [key for key in stored if ".quant_state." in key]:
        name = key.partition(".quant_state.")[0]
        parts = {k: stored.pop(k) for k in list(stored) if k.startswith(f"{name}.")}
        state = QuantState.from_dict(parts, torch.device("cpu"))
        if not key.endswith(state.quant_type):
            raise ValueError(f"{key}: holds {state.quant_type}")
        found[name] = decoded(stored.pop(name), state)
    return stored | found


def read_compressed(path: Path) -> Named:
    """What compressed-tensors decompresses, module by module, as the only group of its config says."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    document = json.loads((path / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(document)
    (scheme,) = config.config_groups.values()
    if scheme.targets != ["Linear"] or config.quantization_status != "compressed":
        raise ValueError(f"targets {scheme.targets}, status {config.quantization_status}")
    compressor: Any = BaseCompressor.get_value_from_registry(scheme.format or config.format)
    names = compressor.compression_param_names(scheme)
    stored = dict(read_hf(path))
    parts = [key.rpartition(".") for key in stored]
    modules = {module for module, _, name in parts if name in names and name != "weight"}
    for module in sorted(modules):
        if module in config.ignore:
            raise ValueError(f"{module}: is quantized and ignored")
        keys = {name: f"{module}.{name}" for name in names if f"{module}.{name}" in stored}
        state = {name: stored.pop(key) for name, key in keys.items()}
        stored[f"{module}.weight"] = compressor.decompress(state, scheme)["weight"]
    return stored


def read_int8(path: Path) -> Named:
    """LLM.int8 of a float16 model as bitsandbytes decodes it: code * absmax of the row / 127."""
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    if config["quant_method"] != "bitsandbytes" or config["load_in_8bit"] is not True:
        raise ValueError(f"{config['quant_method']}, load_in_8bit {config['load_in_8bit']}")
    stored = dict(read_hf(path))
    for key in [key for key in stored if key.endswith(".SCB")]:
        module = key.removesuffix("SCB")
        codes, absmax = stored.pop(f"{module}weight"), stored.pop(key)
        form = stored.pop(
            f"{module}weight_format", 0
        )  # bitsandbytes takes rows where it is missing
        if codes.dtype != torch.int8 or absmax.shape != codes.shape[:1] or int(form) != 0:
            raise ValueError(f"{module}: {codes.dtype} {codes.shape}, {absmax.shape}, {form}")
        values = (codes * absmax.float()[:, None]) * 7.874015718698502e-3
        stored[f"{module}weight"] = values.half()
    return stored


def read_fp8(path: Path) -> Named:
    """FP8 by blocks of a bfloat16 model as transformers decodes it: code * the scale of its block."""
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    rows, columns = config["weight_block_size"]
    if config["quant_method"] != "fp8" or min(rows, columns) < 1:
        raise ValueError(str(config))
    stored = dict(read_hf(path))
    for key in [key for key in stored if key.endswith(".weight_scale_inv")]:
        name = key.removesuffix("_scale_inv")
        codes, scale = stored.pop(name), stored.pop(key)
        grid = torch.Size([-(-codes.shape[0] // rows), -(-codes.shape[1] // columns)])
        if codes.dtype != torch.float8_e4m3fn or scale.shape != grid:
            raise ValueError(f"{name}: {codes.dtype}, scales {scale.shape}, expected {grid}")
        spread = scale.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        stored[name] = (codes.float() * spread[: codes.shape[0], : codes.shape[1]]).bfloat16()
    return stored


def read_mxfp4(path: Path) -> Named:
    """gpt-oss' experts as transformers decodes them to bfloat16; an exponent of 255 is NaN."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = json.loads((path / "config.json").read_text())["quantization_config"]
    if config["quant_method"] != "mxfp4":
        raise ValueError(str(config))
    stored = dict(read_hf(path))
    for key in [key for key in stored if key.endswith("_blocks")]:
        name = key.removesuffix("_blocks")
        blocks, scales = stored.pop(key), stored.pop(f"{name}_scales")
        if (
            blocks.dtype != torch.uint8
            or scales.dtype != torch.uint8
            or bool((scales == 255).any())
        ):
            raise ValueError(f"{name}: {blocks.dtype}, {scales.dtype}")
        stored[name] = convert_moe_packed_tensors(blocks, scales)
    return stored


def read_adapter(base: Path, path: Path) -> Named:
    """A LoRA adapter, merged into its base by peft, which must find every weight of it."""
    import warnings

    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        wrapped = PeftModel.from_pretrained(model, path)
    wrong = [str(warning.message) for warning in told if "missing" in str(warning.message)]
    if wrong:
        raise ValueError(wrong[0])
    return dict(wrapped.merge_and_unload().state_dict())


def read_files(path: Path) -> Content:
    """The files at and below a path, byte for byte, the manifest's statistics of the run aside."""
    found: Content = Counter()
    for file in [path, *sorted(path.rglob("*"))]:
        kind = (
            "link"
            if file.is_symlink()
            else "file"
            if file.is_file()
            else "folder"
            if file.is_dir()
            else "other"
        )
        data = file.read_bytes() if kind == "file" and file.stat().st_nlink == 1 else b""
        digest = hashlib.blake2b(data, digest_size=8).hexdigest()
        found[str(file.relative_to(path)), kind, (len(data),), digest] += 1
    return found


def flat(tree: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a tree by dotted path; torchao's tensors are decoded in float32."""
    if isinstance(tree, Tensor):
        yield name, _dense(tree)
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from flat(value, f"{name}.{key}" if name else str(key))
    elif isinstance(tree, Sequence) and not isinstance(tree, str):
        for number, value in enumerate(tree):
            yield from flat(value, f"{name}.{number}")


def _dense(value: Any) -> Tensor:
    if hasattr(value, "get_original_weight"):
        return value.get_original_weight()  # type: ignore[no-any-return]
    if type(value).__module__.startswith("torchao"):
        return value.dequantize()  # type: ignore[no-any-return]
    return value.detach()  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------- checksums


def check_crcs(path: Any) -> None:
    """Raise where a record of a zip is not that of its CRC-32; of 0, none was computed."""
    with zipfile.ZipFile(path) as archive:
        if any(info.CRC for info in archive.infolist()) and archive.testzip() is not None:
            raise ValueError(f"{path}: {archive.testzip()} is not that of its CRC-32")


def check_items(path: Path) -> None:
    """The same for each item of a DCP, which is a zip inside a file."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    for info in FileSystemReader(path).read_metadata().storage_data.values():
        with (path / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            item = file.read(info.length)
        if item[:2] == b"PK":
            check_crcs(io.BytesIO(item))
