"""Find ModelOpt's exported weights: NVFP4, float8, int8 and packed int4, whose forms `encodings` has.

They are read, and written back in the form of a checkpoint (`--as`). NVFP4 is recognized by its second scale, the
others where what lies beside them states ModelOpt, because other libraries use the same names. The files do not record
T: it is that of the dense tensors. Static scales of activations (`input_scale`) move with their weights. Weights beside
a product of two small ones (SVDQuant) are left to `unsupported_schemes`: without it they are not those of the layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import ClassVar, TypeAlias

from ckptmap.core.encoding_records import records_of
from ckptmap.core.stored_parts import StoredParts
from ckptmap.core.weight_columns import Found, Groups
from ckptmap.protocols import Encoding
from ckptmap.protocols.encodings import Encoded, Record, Records, beside
from ckptmap.protocols.file_systems import Mounts, ReadsFiles
from ckptmap.quantization.blockwise.block_geometry import grid_shape
from ckptmap.quantization.blockwise.group_checks import (
    DAMAGED,
    contradiction,
    file_of,
    group_by_names,
    malformed,
    refuse_kept_modules,
)
from ckptmap.quantization.blockwise.model_dtype import model_dtype
from ckptmap.quantization.blockwise.read_config import MAX_NBYTES, quantization_config
from ckptmap.quantization.blockwise.scaled_record import ScaledRecord, read_record
from ckptmap.quantization.extra_parts import Extra, extra_parts
from ckptmap.quantization.modelopt.encodings import (
    METHOD,
    OF_LAYER,
    Encodings,
    ModeloptE4m3,
    ModeloptFp4,
    ModeloptI4,
    ModeloptI8,
    fp4_of,
)
from ckptmap.quantization.read_only import ReadOnlyScheme
from ckptmap.quantization.weight_forms import WeightForms
from ckptmap.storage.json_file import read_json
from ckptmap.tensors import StoredTensor, TensorInfo

CONFIG = "hf_quant_config.json"
"""What older releases write in place of the `quantization_config` in config.json."""
TILE = (128, 128)
_Parts: TypeAlias = Mapping[str, StoredTensor]
_SMALL = (
    "svdquant_lora_a",
    "weight_quantizer.svdquant_lora_a",
    "weight_quantizer._svdquant_lora_a",
)


class _Scheme(ReadsFiles, ReadOnlyScheme, ABC):
    """The base of all.

    codes  the part that holds the codes
    form   the form, as errors name it
    algos  what one of must be in the `quant_algo` of its config
    more   names of parts that move with the codes
    """

    name: str
    live = "microscaled"
    unmade = "it is read only: ModelOpt calibrates what it writes; choose -ct-nvfp4, -fp8"
    codes: ClassVar[str]
    form: ClassVar[str]
    algos: ClassVar[Collection[str]]
    more: ClassVar[Collection[str]] = OF_LAYER
    declares = ("modelopt-nvfp4", "modelopt-fp8", "modelopt-int8", "modelopt-int4")

    @abstractmethod
    def example(self, info: TensorInfo) -> Encoding:
        """Return an encoding of this form: see `planning.encoding_forms`."""

    def quantization_config_of(
        self,
        encoded: Mapping[str, Encoded],
        dense: Collection[str],
        beyond: Mapping[str, object],
    ) -> Mapping[str, object]:
        """Return the config of weights that stay as they are beside a config.json that states none."""
        algos = {
            encoding.algo(info)
            for encoding, info in encoded.values()
            if isinstance(encoding, Encodings)
        }
        return {
            "quant_method": METHOD,
            "quant_algo": algos.pop() if len(algos) == 1 else "MIXED_PRECISION",
            "ignore": sorted(dense),
            "producer": {"name": METHOD},
        }

    def beyond_weights(
        self, config: Mapping[str, object], names: Collection[str]
    ) -> Mapping[str, object]:
        return {}

    def group(self, stored: Mapping[str, StoredTensor], records: Records) -> Groups:
        """Return the groups of this form. Raises SourceError CKM115 where parts do not fit."""
        mine = records_of(records, (self.name,))
        found = [fqn for fqn in self.found(stored) if fqn not in mine and not _is_rest(fqn, stored)]
        if found and not self.stated(stored[found[0]], self.mounts):
            found = []
        if not mine and not found:
            return Groups([], [])
        forms = WeightForms(stored)
        groups = forms.recorded(mine, self._recorded)
        parts = StoredParts.of(stored)
        beside_them = {key for fqn in found for key in (f"{fqn}_scale", f"{fqn}_scale_2")}
        beside_them |= {beside(fqn, name) for fqn in found for name in OF_LAYER}
        dtype = model_dtype(parts, parts.table.numbers_of(beside_them))
        groups += forms.groups(found, lambda fqn, near: self._made(fqn, dtype, near))
        self._require_agreement(groups)
        return groups

    @abstractmethod
    def found(self, stored: Mapping[str, StoredTensor]) -> Iterator[str]:
        """Yield the FQNs of weights that may be of this form, by names and dtypes."""

    @abstractmethod
    def stated(self, codes: StoredTensor, mounts: Mounts) -> bool:
        """Return whether what lies beside a weight states the form, if its names do not."""

    @abstractmethod
    def _encoding(self, fqn: str, parts: _Parts, extra: Extra) -> Encodings: ...

    def _logical(self, codes: TensorInfo, dtype: str) -> TensorInfo:
        return TensorInfo(codes.shape, dtype)

    @abstractmethod
    def _of_record(self, read: ScaledRecord) -> Encodings: ...

    def _made(self, fqn: str, dtype: str, stored: Mapping[str, StoredTensor]) -> Found:
        keys = {name: beside(fqn, name) for name in OF_LAYER} | {"scale_2": f"{fqn}_scale_2"}
        extra = extra_parts({name: keys[name] for name in self.more}, stored)
        encoding = self._encoding(fqn, stored, extra)
        info = self._logical(stored[fqn].info, dtype)
        width = info.shape[-1]
        smoothing = stored.get(keys["pre_quant_scale"])
        if smoothing is not None and (smoothing.info.shape != (width,)):
            said = f"pre_quant_scale {smoothing.info}, expected one for each of {width} inputs: {file_of(smoothing)}"
            raise malformed(fqn, said, DAMAGED)
        return group_by_names(fqn, info, encoding, stored)

    def _recorded(self, fqn: str, record: Record, stored: Mapping[str, StoredTensor]) -> Found:
        read = read_record(fqn, record, self.name)
        return group_by_names(fqn, read.info, self._of_record(read), stored)

    def _require_agreement(self, groups: Groups) -> None:
        """Raise SourceError CKM115 where a config states another algorithm, or that a weight is not quantized.

        Entries of its lists that are patterns or parents are not matched, and algorithms that mix forms agree.
        """
        codes = groups[0][0].parts[self.codes]
        own = _own_config(codes, self.mounts).get("quantization")
        configs = {"config.json": quantization_config(codes, self.mounts), CONFIG: own}
        for file, config in configs.items():
            if not isinstance(config, Mapping):
                continue
            said = config.get("quant_algo")
            agreeing = (*self.algos, "MIXED")
            if isinstance(said, str) and not any(algo in said.upper() for algo in agreeing):
                shown = f"the weight is stored as {self.form}, {codes.info}"
                raise contradiction(
                    groups.fqns[0], f"{file} states quant_algo {said!r}", shown, codes
                )
            refuse_kept_modules(groups, self.codes, ("ignore", "exclude_modules"), config, file)


def _is_rest(fqn: str, stored: Mapping[str, StoredTensor]) -> bool:
    """Return whether SVDQuant has taken a product of two small weights out of this one."""
    return any(beside(fqn, name) in stored for name in _SMALL)


def _codes_and_scale(fqn: str, parts: _Parts) -> tuple[TensorInfo, TensorInfo]:
    return parts[fqn].info, parts[f"{fqn}_scale"].info


class ModeloptNvfp4(_Scheme):
    """NVFP4, recognized by its second scale."""

    name = "modelopt-nvfp4"
    codes = "packed"
    form = "NVFP4"
    algos = ("NVFP4",)

    def found(self, stored: Mapping[str, StoredTensor]) -> Iterator[str]:
        parts = StoredParts.of(stored)
        for key in parts.ending("weight_scale_2"):
            fqn = key.removesuffix("_scale_2")
            codes, scale = parts.info(fqn), parts.info(f"{fqn}_scale")
            if codes is None or scale is None or codes.dtype != "uint8" or not codes.shape:
                continue
            if scale.dtype == "float8_e4m3fn":
                yield fqn

    def stated(self, codes: StoredTensor, mounts: Mounts) -> bool:
        return True

    def example(self, info: TensorInfo) -> Encoding:
        return ModeloptFp4()

    def _logical(self, codes: TensorInfo, dtype: str) -> TensorInfo:
        *rows, width = codes.shape
        return TensorInfo((*rows, width * 2), dtype)

    def _encoding(self, fqn: str, parts: _Parts, extra: Extra) -> Encodings:
        codes, scale = _codes_and_scale(fqn, parts)
        overall = parts[f"{fqn}_scale_2"]
        if overall.info.numel != 1 or overall.info.dtype != "float32":
            said = (
                f"{fqn}_scale_2 {overall.info}, expected one scale in float32: {file_of(overall)}"
            )
            raise malformed(fqn, said, DAMAGED)
        block = codes.shape[-1] * 2 // scale.shape[-1] if scale.numel else 0
        return fp4_of(block, extra, overall.info.shape)

    def _of_record(self, read: ScaledRecord) -> Encodings:
        return fp4_of(read.block[-1], read.extra(), read.sizes("global_shape"))


class _NamedAlike(_Scheme):
    """The base of forms whose names other libraries use, too: a config must state ModelOpt.

    made  the class of its encodings
    """

    made: ClassVar[type[ModeloptE4m3 | ModeloptI8 | ModeloptI4]]

    def found(self, stored: Mapping[str, StoredTensor]) -> Iterator[str]:
        parts = StoredParts.of(stored)
        infos = parts.table.infos
        pairs = parts.pairs("_scale", "", "", dtypes=("float32",))
        for number, fqn, other in zip(*pairs, strict=True):
            if fqn.endswith("weight") and self.fits(infos[other], infos[number]):
                yield fqn

    @abstractmethod
    def fits(self, codes: TensorInfo, scale: TensorInfo) -> bool:
        """Return whether codes and scales may be of this form, by dtypes and shapes."""

    def stated(self, codes: StoredTensor, mounts: Mounts) -> bool:
        if quantization_config(codes, mounts).get("quant_method") == METHOD:
            return True
        config = _own_config(codes, mounts)
        producer = config.get("producer")
        return isinstance(producer, Mapping) and producer.get("name") == METHOD

    def _of_record(self, read: ScaledRecord) -> Encodings:
        single = read.sizes("scale_stored")
        return self.made(read.block, read.scale_dtype, extra=read.extra(), scale_stored=single)


class ModeloptFp8(_NamedAlike):
    """Float8 with one scale, one a row, or one a tile."""

    name = "modelopt-fp8"
    made = ModeloptE4m3
    codes = ""
    form = "FP8"
    algos = ("FP8",)

    def fits(self, codes: TensorInfo, scale: TensorInfo) -> bool:
        if codes.dtype != "float8_e4m3fn":
            return False
        return scale.numel == 1 or _block(codes, scale) is not None

    def example(self, info: TensorInfo) -> Encoding:
        return ModeloptE4m3(info.shape)

    def _encoding(self, fqn: str, parts: _Parts, extra: Extra) -> Encodings:
        codes, scale = _codes_and_scale(fqn, parts)
        block = _block(codes, scale) if scale.numel > 1 else None
        single = scale.shape if block is None else ()
        return ModeloptE4m3(block or codes.shape, "float32", extra=extra, scale_stored=single)


def _block(codes: TensorInfo, scale: TensorInfo) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale [out], or [tiles, 1, tiles, 1]; None for other scales."""
    if len(codes.shape) != 2 or not codes.numel:
        return None
    rows, width = codes.shape
    if scale.shape == (rows,):
        return 1, width
    if len(scale.shape) != 4 or scale.shape[1::2] != (1, 1) or not scale.numel:
        return None
    high, wide = scale.shape[0::2]
    sides = [TILE, (-(-rows // high), -(-width // wide))]
    return next((side for side in sides if grid_shape(codes.shape, side) == (high, wide)), None)


class ModeloptInt8(_NamedAlike):
    """Int8 with one scale a row, or one."""

    name = "modelopt-int8"
    made = ModeloptI8
    codes = ""
    form = "INT8"
    algos = ("W8A", "INT8")

    def fits(self, codes: TensorInfo, scale: TensorInfo) -> bool:
        is_matrix = codes.dtype == "int8" and len(codes.shape) == 2
        return is_matrix and (scale.numel == 1 or scale.shape == codes.shape[:1])

    def example(self, info: TensorInfo) -> Encoding:
        return ModeloptI8((1, info.shape[-1]))

    def _encoding(self, fqn: str, parts: _Parts, extra: Extra) -> Encodings:
        codes, scale = _codes_and_scale(fqn, parts)
        if scale.numel == 1:
            return ModeloptI8(codes.shape, extra=extra, scale_stored=scale.shape)
        return ModeloptI8((1, codes.shape[1]), extra=extra)


class ModeloptInt4(_NamedAlike):
    """Two rows of codes in a row of bytes, and a scale for each group of columns."""

    name = "modelopt-int4"
    made = ModeloptI4
    codes = "packed"
    form = "INT4"
    algos = ("W4A16", "W4A8_AWQ", "INT4")
    more = (*OF_LAYER, "scale_2")

    def fits(self, codes: TensorInfo, scale: TensorInfo) -> bool:
        if codes.dtype != "uint8" or len(codes.shape) != 2 or len(scale.shape) != 2:
            return False
        rows, groups = scale.shape
        return rows == 2 * codes.shape[0] and groups > 0 and codes.shape[1] % groups == 0

    def example(self, info: TensorInfo) -> Encoding:
        return ModeloptI4((1, 128))

    def _logical(self, codes: TensorInfo, dtype: str) -> TensorInfo:
        return TensorInfo((2 * codes.shape[0], codes.shape[1]), dtype)

    def _encoding(self, fqn: str, parts: _Parts, extra: Extra) -> Encodings:
        codes, scale = _codes_and_scale(fqn, parts)
        return ModeloptI4((1, codes.shape[1] // scale.shape[1]), extra=extra)


def _own_config(codes: StoredTensor, mounts: Mounts) -> Mapping[str, object]:
    """Return the hf_quant_config.json beside a tensor's file; empty where there is none."""
    file = file_of(codes)
    try:
        config = read_json(Path(file).parent / CONFIG, mounts, max_nbytes=MAX_NBYTES)
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, Mapping) else {}
