"""GPTQ and AWQ: read, and written back in the form of a checkpoint (`--as`).

    fc.qweight, fc.qzeros, fc.scales, fc.g_idx  ->  fc.weight [out, in] in the dtype of the model

The dtype of the model is the one that config.json states, else that of the dense tensors. Other layouts of the same
parts (AWQ's "gemv", Marlin's repacked words) and weights without a config stay as their bytes, as does a `Conv1D`
of GPT-2, whose weight lies the other way: see `unsupported_schemes`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar

from ckptmap.core.encoding_records import records_of
from ckptmap.core.stored_parts import StoredParts
from ckptmap.core.weight_columns import Found, Groups
from ckptmap.protocols import Encoding
from ckptmap.protocols.encodings import Encoded, Record, Records
from ckptmap.protocols.file_systems import Mounts, ReadsFiles
from ckptmap.quantization.blockwise.group_checks import (
    group_by_names,
    malformed,
    refuse_kept_modules,
)
from ckptmap.quantization.blockwise.model_dtype import model_dtype
from ckptmap.quantization.blockwise.read_config import model_type, stated_dtype
from ckptmap.quantization.blockwise.scaled_record import read_record
from ckptmap.quantization.gptq.columns import LISTED, ORDERED, UNORDERED, GroupedColumns
from ckptmap.quantization.gptq.encodings import Awq, Gptq, GptqPlanes, GptqV2
from ckptmap.quantization.gptq.settings import settings_beside
from ckptmap.quantization.gptq.statement import Kind, Statement, declared, encoding_of, statement_of
from ckptmap.quantization.linear_weights import CONV1D, CONV1D_MODELS
from ckptmap.quantization.read_only import ReadOnlyScheme
from ckptmap.quantization.weight_forms import WeightForms
from ckptmap.tensors import StoredTensor, TensorInfo

_PARTS = ("qweight", "qzeros", "scales", "g_idx")
KEPT = ("modules_to_not_convert",)


class _Scheme(ReadsFiles, ReadOnlyScheme):
    """The base of the two.

    kinds  its encodings; the first is that of an example
    """

    name: str
    live = "microscaled"
    unmade = (
        "it is read, and written back in the form of a checkpoint (--as PATH), because calibration"
        " chooses its codes; choose -ct-int4"
    )
    kinds: ClassVar[tuple[Kind, ...]]

    def example(self, info: TensorInfo) -> Encoding:
        """Return an encoding of this form: see `planning.encoding_forms`."""
        return self.kinds[0](4, 128)

    @property
    def declares(self) -> Collection[str]:
        return (self.name,)

    def quantization_config_of(
        self,
        encoded: Mapping[str, Encoded],
        dense: Collection[str],
        beyond: Mapping[str, object],
    ) -> Mapping[str, object]:
        """Return the config of weights that stay as they are beside a config.json that states none."""
        return declared(self.name, encoded, dense)

    def beyond_weights(
        self, config: Mapping[str, object], names: Collection[str]
    ) -> Mapping[str, object]:
        return {}

    def group(self, stored: Mapping[str, StoredTensor], records: Records) -> Groups:
        """Return the groups of this form. Raise SourceError CKM115 where parts or the config contradict."""
        kinds = {kind.scheme: kind for kind in self.kinds}
        mine = records_of(records, kinds)
        found = [fqn for fqn in _found(stored, self.mounts) if fqn not in records]
        forms = WeightForms(stored)
        groups = forms.recorded(mine, lambda fqn, record, near: _recorded(fqn, record, kinds, near))
        if not found:
            return groups
        codes = stored[_key(found[0], "qweight")]
        settings = settings_beside(codes, self.mounts)
        said = statement_of(settings)
        if said is None or said.kind not in self.kinds:
            return groups
        parts = StoredParts.of(stored)
        scales = parts.table.numbers_of({_key(fqn, "scales") for fqn in found})
        dtype = stated_dtype(codes, self.mounts) or model_dtype(parts, scales)
        read = forms.groups(
            found,
            lambda fqn, near: _made(fqn, said, dtype, near),
            [_ending(fqn, said) for fqn in found],
        )
        refuse_kept_modules(read, "qweight", KEPT, settings.config, settings.name)
        return groups + read


class GptqScheme(_Scheme):
    name = "gptq"
    kinds = (Gptq, GptqV2, GptqPlanes)


class AwqScheme(_Scheme):
    name = "awq"
    kinds = (Awq,)


def _key(fqn: str, part: str) -> str:
    return fqn.removesuffix("weight") + part


def _found(stored: Mapping[str, StoredTensor], mounts: Mounts) -> list[str]:
    """Return the FQNs of weights that have codes and scales, but those of `Conv1D` modules."""
    stems = [
        key.removesuffix("qweight")
        for key in StoredParts.of(stored).ending(".qweight", dtypes=("int32",))
    ]
    whole = [stem for stem in stems if f"{stem}scales" in stored and f"{stem}weight" not in stored]
    turned = [stem for stem in whole if CONV1D.intersection(stem.split(".")[-2:-1])]
    if turned and model_type(stored[f"{turned[0]}qweight"], mounts) in CONV1D_MODELS:
        whole = [stem for stem in whole if stem not in turned]
    return [f"{stem}weight" for stem in whole]


def _ending(fqn: str, said: Statement) -> str:
    """Return the end of a name that decides whether it may be quantized."""
    return fqn if said.modules else ""


def _made(fqn: str, said: Statement, dtype: str, stored: Mapping[str, StoredTensor]) -> Found:
    keys = {part: _key(fqn, part) for part in _PARTS}
    parts = {part: stored[key] for part, key in keys.items() if key in stored}
    encoding, info = encoding_of(fqn, said, parts, dtype)
    return group_by_names(fqn, info, encoding, stored)


def _recorded(
    fqn: str,
    record: Record,
    kinds: Mapping[str, Kind],
    stored: Mapping[str, StoredTensor],
) -> Found:
    read = read_record(fqn, record, "gptq or awq")
    order = read.text("order")
    if order not in (UNORDERED, LISTED, ORDERED) or len(read.block) != 2:
        raise malformed(fqn, f"order {order[:20]!r} and block {list(read.block)} of its record")
    encoding: GroupedColumns = kinds[str(record["scheme"])](
        read.count("bits", 4),
        read.block[1],
        read.scale_dtype,
        record.get("symmetric") is True,
        order,
    )
    return group_by_names(fqn, read.info, encoding, stored)
