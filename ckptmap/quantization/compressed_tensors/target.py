"""What every target that compressed-tensors loads says of itself in `config.json`."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ckptmap.protocols import Encoding
from ckptmap.protocols.encodings import Encoded
from ckptmap.protocols.file_systems import ReadsFiles
from ckptmap.quantization.compressed_tensors.config_json import DECLARES, beyond_weights, declared
from ckptmap.quantization.compressed_tensors.stacked_experts import misread
from ckptmap.quantization.linear_weights import LinearLayerScheme, is_embedding
from ckptmap.tensors import TensorInfo


class CompressedTarget(ReadsFiles, LinearLayerScheme):
    """The base of all targets of this library."""

    name: str
    suffix: str
    declares = DECLARES

    def takes(self, fqn: str) -> bool:
        """Return whether transformers can load the tensor: the library puts no codes into embeddings there."""
        return not is_embedding(fqn)

    def misread(self, fqn: str, encoding: Encoding, info: TensorInfo) -> str:
        return misread(fqn, encoding, info)

    def quantization_config_of(
        self,
        encoded: Mapping[str, Encoded],
        dense: Collection[str],
        beyond: Mapping[str, object],
    ) -> Mapping[str, object]:
        return declared(encoded, dense, beyond)

    def beyond_weights(
        self, config: Mapping[str, object], names: Collection[str]
    ) -> Mapping[str, object]:
        return beyond_weights(config, names)
