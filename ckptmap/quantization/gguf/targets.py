"""Store weights in blocks of ggml's, as `--to gguf-q8_0` asks for; `encoders` has the types.

    w [.., rows, width], width a multiple of 32  ->  blocks, encoded from fp32 values
    w of other rows                              ->  fp16, as llama.cpp's converter does
    embedding and head, below 8 bits             ->  Q8_0: llama.cpp keeps the head in more bits than the rest

Norms, biases and what chooses experts are left as they are. Source: llama.cpp, convert_hf_to_gguf.py
(`ModelBase.prepare_tensors`) and src/llama-quant.cpp (`llama_tensor_get_type`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckptmap.formats.gguf.block_types import BY_NAME
from ckptmap.protocols import Encoding, Group, Refusal
from ckptmap.protocols.encodings import Records
from ckptmap.quantization.dense import Dense, DenseAs
from ckptmap.quantization.gguf.encoding import GgufBlocks
from ckptmap.tensors import FLOATING, Cut, Opaque, StoredTensor, TensorInfo

HALF = "float16"
IN_MORE_BITS = ("token_embd", "output", "embed_tokens", "lm_head")
LEFT = ("norm.weight", "norm1.weight", "norm2.weight", "gate_inp.weight", "gate_inp_shexp.weight")


class GgufTarget:
    """A target of one type of block, which a subclass names."""

    name: str
    suffix: str
    live = "gguf"

    @property
    def kind(self) -> str:
        """The name of the type: "Q8_0" of gguf-q8_0."""
        return self.name.removeprefix("gguf-").upper()

    def group(
        self, stored: Mapping[str, StoredTensor], records: Records
    ) -> list[tuple[Group, Sequence[str]]]:
        return []

    def adopt(self, fqn: str, leaf: Opaque | Cut) -> Group | None:
        return None

    def target(self, fqn: str, info: TensorInfo) -> Encoding | None:
        """Return the encoding of a matrix, or of stacked ones; fp16 where its rows are no whole blocks."""
        floating = info.dtype in FLOATING and len(info.shape) > 1 and info.numel
        if not floating or not fqn.endswith(".weight") or fqn.endswith(LEFT):
            return None
        if self._has_partial_blocks(info):
            return _halved(info)
        return GgufBlocks("Q8_0" if fqn.split(".")[-2] in IN_MORE_BITS else self.kind)

    def encoding(self, info: TensorInfo) -> Encoding | Refusal:
        if info.dtype not in FLOATING:
            return Refusal(f"{info.dtype} holds no values to encode")
        if self._has_partial_blocks(info):
            return _halved(info)
        encoding = GgufBlocks(self.kind)
        refused = encoding.parts(TensorInfo(info.shape, encoding.takes))
        return refused if isinstance(refused, Refusal) else encoding

    def fallback(self, encoding: Encoding, info: TensorInfo) -> str:
        """Return why a matrix is fp16: see `planning.weight_encodings.FallsBack`."""
        half = encoding.name == "dense" and getattr(encoding, "dtype", info.dtype) == HALF
        if not half or not self._has_partial_blocks(info):
            return ""
        block = BY_NAME[self.kind].numel
        return f"is stored as {HALF}, since rows of {info.shape[-1]} values are no whole blocks of {block}"

    def _has_partial_blocks(self, info: TensorInfo) -> bool:
        """Return whether it is a matrix, or stacked ones, whose rows are no whole blocks."""
        partial = len(info.shape) > 1 and info.shape[-1] % BY_NAME[self.kind].numel
        return bool(partial and info.numel)


def _halved(info: TensorInfo) -> Encoding:
    return Dense() if info.dtype == HALF else DenseAs(HALF)


class GgufQ8_0(GgufTarget):
    name = suffix = "gguf-q8_0"


class GgufQ5_1(GgufTarget):
    name = suffix = "gguf-q5_1"


class GgufQ5_0(GgufTarget):
    name = suffix = "gguf-q5_0"


class GgufQ4_1(GgufTarget):
    name = suffix = "gguf-q4_1"


class GgufQ4_0(GgufTarget):
    name = suffix = "gguf-q4_0"


class GgufMxfp4(GgufTarget):
    name = suffix = "gguf-mxfp4"
