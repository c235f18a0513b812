"""NVIDIA ModelOpt's exported weights: NVFP4, and float8 with one scale of the tensor. They are read only.

    NVFP4  fc.weight u8 [out, in / 2], fc.weight_scale e4m3 [out, in / 16], fc.weight_scale_2 f32 []; of `W4A8_NVFP4_FP8`
           and `NVFP4_MLP_WEIGHT_ONLY` [out, in / 32]
    FP8    fc.weight e4m3 [out, in],   fc.weight_scale f32 []

    w'[i, j] = T(code * (weight_scale * weight_scale_2))        T(code * weight_scale), in fp32

Source: `NVFP4QTensor.dequantize` (modelopt 0.47, torch/quantization/qtensor/nvfp4_tensor.py), and for FP8 the
same in fp32: modelopt's own `FP8QTensor.dequantize` rounds the scale to T first, vLLM and TensorRT-LLM do not.
The files do not record T: it is that of the dense tensors. A static scale of activations (`input_scale`) moves
with its weight. Weights that were smoothed for AWQ or SVDQuant (`pre_quant_scale`) are left to
`unsupported_schemes`: they mean something only behind their scaled activations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ckptmap.core.columns import each
from ckptmap.core.encoding_records import records_of
from ckptmap.core.stored_parts import StoredParts
from ckptmap.core.weight_columns import Found, Groups
from ckptmap.errors import SourceError
from ckptmap.protocols import Encoding, Refusal
from ckptmap.protocols.encodings import beside
from ckptmap.protocols.file_systems import Mounts, ReadsFiles
from ckptmap.quantization.blockwise.group_checks import (
    DAMAGED,
    NOT_FINITE,
    contradiction,
    file_of,
    group_by_names,
    malformed,
    refuse_kept_modules,
)
from ckptmap.quantization.blockwise.model_dtype import model_dtype
from ckptmap.quantization.blockwise.read_config import MAX_NBYTES, quantization_config
from ckptmap.quantization.blockwise.rounding_rules import RoundingRule, TorchaoFloat8
from ckptmap.quantization.blockwise.scaled_encoding import ScaledEncoding
from ckptmap.quantization.blockwise.scaled_record import ScaledRecord, read_record
from ckptmap.quantization.linear_weights import LinearLayerScheme
from ckptmap.quantization.microscaling.nvfp4 import Nvfp4
from ckptmap.quantization.microscaling.nvfp4_encoder import Nvfp4Rule, TorchaoRule
from ckptmap.quantization.microscaling.packed_fp4 import Extra
from ckptmap.quantization.weight_forms import WeightForms
from ckptmap.storage.json_file import read_json
from ckptmap.tensors import Box, StoredTensor, TensorInfo

if TYPE_CHECKING:
    import torch

METHOD = "modelopt"
CONFIG = "hf_quant_config.json"
"""What older releases write in place of the `quantization_config` in config.json."""
ACTIVATIONS = ("input_scale",)
_SMOOTHED = "pre_quant_scale"


class _Named:
    def part_key(self, key: str, part: str) -> str:
        if part in ACTIVATIONS:
            return beside(key, part)
        return f"{key}_{part}" if part not in ("", "packed") else key


@dataclass(frozen=True)
class ModeloptFp4(_Named, Nvfp4):
    name: ClassVar[str] = "modelopt-nvfp4"
    scheme: ClassVar[str] = "modelopt-nvfp4"
    native: ClassVar[str] = METHOD
    activations: ClassVar[tuple[str, ...]] = ACTIVATIONS
    global_part: ClassVar[str] = "scale_2"
    divides: ClassVar[bool] = False

    def rule(self) -> Nvfp4Rule:
        """Return torchao's rule, of which the scale of the tensor multiplies, too."""
        return TorchaoRule()


@dataclass(frozen=True)
class ModeloptFp4Of32(ModeloptFp4):
    """32 values have one scale."""

    block: ClassVar[int] = 32


def _fp4(block: int, extra: Extra, global_shape: tuple[int, ...]) -> ModeloptFp4:
    made = ModeloptFp4Of32 if block == ModeloptFp4Of32.block else ModeloptFp4
    return made(extra=extra, global_shape=global_shape)


@dataclass(frozen=True)
class ModeloptE4m3(_Named, ScaledEncoding):
    """`scale_stored` is the stored shape of the scale."""

    name: ClassVar[str] = "modelopt-fp8"
    scheme: ClassVar[str] = "modelopt-fp8"
    codes_part: ClassVar[str] = ""
    scale_part: ClassVar[str] = "scale"
    codes_dtype: ClassVar[str] = "float8_e4m3fn"
    activations: ClassVar[Collection[str]] = ACTIVATIONS

    scale_stored: tuple[int, ...] = ()

    def scale_shape(self, info: TensorInfo) -> tuple[int, ...]:
        return self.scale_stored

    def decode(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box, out: torch.Tensor
    ) -> None:
        """Decode a box. Raises SourceError CKM115 where the scale is not finite; a device is not waited for."""
        scale = parts["scale"]
        if scale.is_cpu and not bool(scale.isfinite().all()):
            raise SourceError(
                "CKM115",
                f"scale: expected a finite scale, found {float(scale.reshape(-1)[0])}",
                NOT_FINITE,
            )
        super().decode(info, parts, box, out)

    def rule(self, info: TensorInfo) -> RoundingRule:
        """Return the rule of which the scale is absmax / 448, as ModelOpt's."""
        return TorchaoFloat8(self.scale_dtype)

    def more_record(self, info: TensorInfo) -> Mapping[str, object]:
        return {
            "native": METHOD,
            "extra": [[name, dtype, list(shape)] for name, dtype, shape in self.extra],
            "scale_stored": list(self.scale_stored),
        }


class _Scheme(ReadsFiles, LinearLayerScheme):
    """The base of the two.

    codes  the part that holds the codes
    algo   `quant_algo` of its config
    """

    name: str
    suffix = ""
    live = "microscaled"
    codes: ClassVar[str]
    algo: ClassVar[str]

    def takes_layer(self, fqn: str, info: TensorInfo) -> bool:
        return False

    def encoding(self, info: TensorInfo) -> Encoding | Refusal:
        return Refusal(
            "it is read only: ModelOpt calibrates what it writes; choose -ct-nvfp4, -fp8"
        )

    def example(self, info: TensorInfo) -> Encoding:
        """Return an encoding of this form: see `planning.encoding_forms`."""
        raise NotImplementedError

    def quantization_config(
        self, encoded: Mapping[str, TensorInfo], dense: Collection[str]
    ) -> Mapping[str, object]:
        """Return the config of weights that stay as they are beside a config.json that states none."""
        return {
            "quant_method": METHOD,
            "quant_algo": self.algo,
            "ignore": sorted(dense),
            "producer": {"name": METHOD},
        }

    def group(
        self, stored: Mapping[str, StoredTensor], records: Mapping[str, Mapping[str, object]]
    ) -> Groups:
        """Return the groups of this form. Raises SourceError CKM115 where parts do not fit."""
        mine = records_of(records, (self.name,))
        found = [fqn for fqn in self.found(stored) if fqn not in mine]
        if found and not self.stated(stored[found[0]], self.mounts):
            found = []
        if not mine and not found:
            return Groups([], [])
        forms = WeightForms(stored)
        groups = forms.groups(
            mine, lambda fqn, near: self._recorded(fqn, mine[fqn], near), each(mine.values(), repr)
        )
        parts = StoredParts.of(stored)
        scales = parts.table.numbers_of({key for fqn in found for key in _scales(fqn)})
        dtype = model_dtype(parts, scales)
        groups += forms.groups(found, lambda fqn, near: self._made(fqn, dtype, near))
        _require_agreement(groups, self.codes, self.algo, self.mounts)
        return groups

    def found(self, stored: Mapping[str, StoredTensor]) -> Iterator[str]:
        """Yield the FQNs of weights that may be of this form, by names and dtypes."""
        raise NotImplementedError

    def stated(self, codes: StoredTensor, mounts: Mounts) -> bool:
        """Return whether what lies beside a weight states the form, if its names do not."""
        return True

    def _encoding(self, stored: Mapping[str, StoredTensor], fqn: str, extra: Extra) -> _Encoding:
        raise NotImplementedError

    def _logical(self, codes: TensorInfo, dtype: str) -> TensorInfo:
        raise NotImplementedError

    def _of_record(self, read: ScaledRecord) -> _Encoding:
        raise NotImplementedError

    def _made(self, fqn: str, dtype: str, stored: Mapping[str, StoredTensor]) -> Found:
        extra = tuple(
            (name, tensor.info.dtype, tensor.info.shape)
            for name in ACTIVATIONS
            if (tensor := stored.get(beside(fqn, name))) is not None
        )
        info = self._logical(stored[fqn].info, dtype)
        return group_by_names(fqn, info, self._encoding(stored, fqn, extra), stored)

    def _recorded(
        self, fqn: str, record: Mapping[str, object], stored: Mapping[str, StoredTensor]
    ) -> Found:
        read = read_record(fqn, record, self.name)
        return group_by_names(fqn, read.info, self._of_record(read), stored)


_Encoding = ModeloptFp4 | ModeloptE4m3


def _scales(fqn: str) -> tuple[str, ...]:
    return f"{fqn}_scale", f"{fqn}_scale_2", beside(fqn, "input_scale")


def _single(fqn: str, stored: Mapping[str, StoredTensor], key: str) -> tuple[int, ...]:
    """Return the stored shape of a single scale. Raise SourceError CKM115 where it is none."""
    scale = stored[key]
    if scale.info.numel != 1 or scale.info.dtype != "float32":
        raise malformed(
            fqn, f"{key} {scale.info}, expected one scale in float32: {file_of(scale)}", DAMAGED
        )
    return scale.info.shape


def _is_smoothed(fqn: str, stored: Mapping[str, StoredTensor]) -> bool:
    return beside(fqn, _SMOOTHED) in stored


class ModeloptNvfp4(_Scheme):
    """NVFP4, recognized by its second scale."""

    name = "modelopt-nvfp4"
    codes = "packed"
    algo = "NVFP4"

    def found(self, stored: Mapping[str, StoredTensor]) -> Iterator[str]:
        parts = StoredParts.of(stored)
        for key in parts.ending("weight_scale_2"):
            fqn = key.removesuffix("_scale_2")
            codes, scale = parts.info(fqn), parts.info(f"{fqn}_scale")
            if codes is None or scale is None or codes.dtype != "uint8" or not codes.shape:
                continue
            if scale.dtype == "float8_e4m3fn" and not _is_smoothed(fqn, stored):
                yield fqn

    def example(self, info: TensorInfo) -> Encoding:
        return ModeloptFp4()

    def _logical(self, codes: TensorInfo, dtype: str) -> TensorInfo:
        *rows, width = codes.shape
        return TensorInfo((*rows, width * 2), dtype)

    def _encoding(self, stored: Mapping[str, StoredTensor], fqn: str, extra: Extra) -> _Encoding:
        codes, scale = stored[fqn].info.shape, stored[f"{fqn}_scale"].info.shape
        block = codes[-1] * 2 // scale[-1] if scale and scale[-1] else 0
        return _fp4(block, extra, _single(fqn, stored, f"{fqn}_scale_2"))

    def _of_record(self, read: ScaledRecord) -> _Encoding:
        return _fp4(read.block[-1], read.extra(), read.sizes("global_shape"))


class ModeloptFp8(_Scheme):
    """Float8 with one scale, where what lies beside it states ModelOpt: other libraries name it so, too."""

    name = "modelopt-fp8"
    codes = ""
    algo = "FP8"

    def found(self, stored: Mapping[str, StoredTensor]) -> Iterator[str]:
        parts = StoredParts.of(stored)
        infos = parts.table.infos
        pairs = parts.pairs("_scale", "", "", dtypes=("float32",))
        for number, fqn, other in zip(*pairs, strict=True):
            if not fqn.endswith("weight") or infos[number].numel != 1:
                continue
            if infos[other].dtype == "float8_e4m3fn" and not _is_smoothed(fqn, stored):
                yield fqn

    def stated(self, codes: StoredTensor, mounts: Mounts) -> bool:
        if quantization_config(codes, mounts).get("quant_method") == METHOD:
            return True
        config = _own_config(codes, mounts)
        producer = config.get("producer")
        return isinstance(producer, Mapping) and producer.get("name") == METHOD

    def example(self, info: TensorInfo) -> Encoding:
        return ModeloptE4m3(info.shape)

    def _logical(self, codes: TensorInfo, dtype: str) -> TensorInfo:
        return TensorInfo(codes.shape, dtype)

    def _encoding(self, stored: Mapping[str, StoredTensor], fqn: str, extra: Extra) -> _Encoding:
        shape = _single(fqn, stored, f"{fqn}_scale")
        return ModeloptE4m3(stored[fqn].info.shape, "float32", extra=extra, scale_stored=shape)

    def _of_record(self, read: ScaledRecord) -> _Encoding:
        shape = read.sizes("scale_stored")
        return ModeloptE4m3(read.block, read.scale_dtype, extra=read.extra(), scale_stored=shape)


def _require_agreement(groups: Groups, part: str, algo: str, mounts: Mounts) -> None:
    """Raise SourceError CKM115 where a config states another algorithm, or that a weight is not quantized.

    Entries of its lists that are patterns or parents are not matched, and algorithms that mix forms agree.
    """
    codes = groups[0][0].parts[part]
    own = _own_config(codes, mounts).get("quantization")
    configs = {"config.json": quantization_config(codes, mounts), CONFIG: own}
    for file, config in configs.items():
        if not isinstance(config, Mapping):
            continue
        said = config.get("quant_algo")
        if isinstance(said, str) and algo not in said.upper() and "MIXED" not in said.upper():
            shown = f"the weight is stored as {algo}, {codes.info}"
            raise contradiction(groups.fqns[0], f"{file} states quant_algo {said!r}", shown, codes)
        refuse_kept_modules(groups, part, ("ignore", "exclude_modules"), config, file)


def _own_config(codes: StoredTensor, mounts: Mounts) -> Mapping[str, object]:
    """Return the hf_quant_config.json beside a tensor's file; empty where there is none."""
    file = file_of(codes)
    try:
        config = read_json(Path(file).parent / CONFIG, mounts, max_nbytes=MAX_NBYTES)
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, Mapping) else {}
