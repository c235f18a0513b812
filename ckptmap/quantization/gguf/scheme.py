"""Recognize tensors in blocks of ggml by their records, which the reader of GGUF files makes."""

from __future__ import annotations

from collections.abc import Mapping

from ckptmap.core.encoding_records import records_of
from ckptmap.core.weight_columns import Found, Groups
from ckptmap.protocols import Encoding, Group
from ckptmap.protocols.encodings import Record, Records
from ckptmap.quantization.blockwise.group_checks import (
    DAMAGED,
    check_parts,
    expected_parts,
    malformed,
    read_sizes,
)
from ckptmap.quantization.gguf.decoders import DECODERS
from ckptmap.quantization.gguf.encoding import SCHEME, VALUES, GgufBlocks
from ckptmap.quantization.read_only import ReadOnlyScheme
from ckptmap.quantization.weight_forms import WeightForms
from ckptmap.tensors import StoredTensor, TensorInfo


class GgufScheme(ReadOnlyScheme):
    """Reads every type of ggml that the `gguf` package decodes. Those that are made here are in `targets`."""

    name = SCHEME
    live = "gguf"
    unmade = "name the type to write: gguf-q8_0"
    more_names = tuple(GgufBlocks(kind).name for kind in DECODERS)

    def group(self, stored: Mapping[str, StoredTensor], records: Records) -> Groups:
        """Return a group for each record. Raise SourceError CKM115 where it and the bytes do not fit."""
        return WeightForms(stored).recorded(records_of(records, (self.name,)), _group)

    def example(self, info: TensorInfo) -> Encoding:
        """Return an encoding of a type that is only read: see `planning.encoding_forms`."""
        return GgufBlocks("Q4_K")


def _group(fqn: str, record: Record, stored: Mapping[str, StoredTensor]) -> Found:
    kind = str(record.get("type"))
    if record.get("version") != 1 or record.get("dtype") != VALUES or kind not in DECODERS:
        raise malformed(
            fqn,
            f"gguf record {str(dict(record))[:120]!r}, expected version 1, {VALUES} and a type such as Q4_K",
            DAMAGED,
        )
    info = TensorInfo(read_sizes(fqn, record.get("shape"), "gguf record: shape"), VALUES)
    encoding = GgufBlocks(kind)
    expected = expected_parts(fqn, encoding, info)
    parts = check_parts(fqn, encoding.name, expected, {"": stored.get(fqn)})
    return Group(fqn, info, encoding, parts), (fqn,)
