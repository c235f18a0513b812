"""Find the settings of GPTQ and AWQ: in config.json, or in the file that older releases have in place of it.

    config.json            {"quantization_config": {"quant_method": "gptq", "bits": 4, ...}}
    quantize_config.json   {"bits": 4, "group_size": 128, "desc_act": false, "sym": true, ...}
    quant_config.json      {"w_bit": 4, "q_group_size": 128, "zero_point": true, "version": "GEMM"}

AutoGPTQ wrote the second alone up to its release 0.6, AutoAWQ's first releases the third. Sources: `BaseQuantizeConfig`
(auto_gptq 0.7.1, quantization/config.py), which takes `version` "gemm" for AWQ in either file, and `AwqConfig`
(AutoAWQ at its commit f9b2371, awq/models/_config.py). Where both state something, config.json counts, as for
transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptmap.protocols.file_systems import Mounts
from ckptmap.quantization.blockwise.group_checks import file_of
from ckptmap.quantization.blockwise.read_config import MAX_NBYTES, quantization_config
from ckptmap.storage.json_file import read_json
from ckptmap.tensors import StoredTensor

CONFIG = "config.json"
METHODS: Mapping[str, str] = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files that state the settings alone -> the method of the program that writes them."""
_BITS = ("bits", "w_bit")
"""What every such file of AutoGPTQ and AutoAWQ states; other programs use the same names of files."""


@dataclass(frozen=True)
class Settings:
    """What one file states about all quantized weights beside it.

    name     the name of that file
    weights  the path of a file of weights beside it
    """

    config: Mapping[str, object]
    name: str = CONFIG
    weights: str = ""

    @property
    def section(self) -> str:
        """What holds the settings, as an error names it."""
        return "quantization_config" if self.name == CONFIG else self.name


def settings_beside(codes: StoredTensor, mounts: Mounts) -> Settings:
    """Return the settings beside a tensor's file; without entries where nothing states any."""
    weights = file_of(codes)
    config = quantization_config(codes, mounts)
    if config or not weights:
        return Settings(config, CONFIG, weights)
    for name, method in METHODS.items():
        alone = _read(Path(weights).parent / name, mounts)
        if any(key in alone for key in _BITS):
            return Settings(_with_method(alone, method), name, weights)
    return Settings({}, CONFIG, weights)


def _with_method(alone: Mapping[str, object], method: str) -> Mapping[str, object]:
    """Return settings with the method that a file of its own need not state."""
    if str(alone.get("version")).lower() == "gemm":
        method = "awq"
    return {"quant_method": method, **alone}


def _read(file: Path, mounts: Mounts) -> Mapping[str, object]:
    try:
        found = read_json(file, mounts, max_nbytes=MAX_NBYTES)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, Mapping) else {}
