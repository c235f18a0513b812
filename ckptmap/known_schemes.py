"""The encodings of this package, in the order in which they are asked, and what shows that one may be in a checkpoint.

Importing all of them takes a third of the time in which the headers of 200,000 tensors are parsed. So each line
says by which keys or records its weights are found; `ckptmap.registry` imports those that may find some.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class KnownScheme(NamedTuple):
    """Where the class of an encoding is, and what is in every checkpoint in which it finds weights: one of these.

    ends     how the last segment of a stored key ends
    records  the schemes of its encoding records
    """

    spec: str
    ends: tuple[str, ...] = ()
    records: tuple[str, ...] = ()

    def may_read(self, lasts: Collection[str], stated: Collection[object]) -> bool:
        """Return whether it must be asked for the weights of a checkpoint with such keys and records."""
        if any(name in stated for name in self.records):
            return True
        return bool(self.ends) and any(last.endswith(self.ends) for last in lasts)


SCHEMES = (
    KnownScheme("ckptmap.quantization.nf4.scheme:NF4Scheme", ("nf4",), ("nf4",)),
    KnownScheme("ckptmap.quantization.bnb.fourbit_schemes:BnbNF4", ("bitsandbytes__nf4",)),
    KnownScheme("ckptmap.quantization.bnb.fourbit_schemes:BnbNF4Double", ("bitsandbytes__nf4",)),
    KnownScheme("ckptmap.quantization.bnb.fourbit_schemes:BnbFP4", ("bitsandbytes__fp4",)),
    KnownScheme("ckptmap.quantization.bnb.fourbit_schemes:BnbFP4Double", ("bitsandbytes__fp4",)),
    KnownScheme("ckptmap.quantization.torchao.int8:Int8Scheme", records=("torchao", "int8")),
    KnownScheme("ckptmap.quantization.torchao.float8:Float8Scheme", records=("torchao", "float8")),
    KnownScheme(
        "ckptmap.quantization.torchao.float8:Float8E5m2Scheme", records=("torchao", "float8-e5m2")
    ),
    KnownScheme(
        "ckptmap.quantization.torchao.microscaled:AoMxfp8Scheme",
        records=("torchao", "torchao-mxfp8"),
    ),
    KnownScheme(
        "ckptmap.quantization.torchao.microscaled:AoMxE5m2Scheme",
        records=("torchao", "torchao-mxfp8-e5m2"),
    ),
    KnownScheme(
        "ckptmap.quantization.torchao.microscaled:AoMxfp4Scheme",
        records=("torchao", "torchao-mxfp4"),
    ),
    KnownScheme(
        "ckptmap.quantization.torchao.microscaled:AoNvfp4Scheme",
        records=("torchao", "torchao-nvfp4"),
    ),
    KnownScheme("ckptmap.quantization.bnb.int8:BnbInt8Scheme", ("SCB",), ("bnb-int8",)),
    KnownScheme(
        "ckptmap.quantization.modelopt:ModeloptNvfp4", ("weight_scale_2",), ("modelopt-nvfp4",)
    ),
    KnownScheme("ckptmap.quantization.modelopt:ModeloptFp8", ("_scale",), ("modelopt-fp8",)),
    KnownScheme(
        "ckptmap.quantization.compressed_tensors.microscaled:CompressedNvfp4",
        ("_packed",),
        ("ct-nvfp4",),
    ),
    KnownScheme(
        "ckptmap.quantization.compressed_tensors.microscaled:CompressedMxfp4",
        ("_packed",),
        ("ct-mxfp4",),
    ),
    KnownScheme(
        "ckptmap.quantization.compressed_tensors.microscaled:CompressedMxfp8",
        ("_scale",),
        ("ct-mxfp8",),
    ),
    KnownScheme(
        "ckptmap.quantization.compressed_tensors.scheme:CompressedInt8",
        ("_packed",),
        ("ct-packed",),
    ),
    KnownScheme("ckptmap.quantization.compressed_tensors.scheme:CompressedInt4"),
    KnownScheme(
        "ckptmap.quantization.compressed_tensors.scheme:CompressedFp8",
        ("_scale",),
        ("ct-int8-plain", "ct-fp8"),
    ),
    KnownScheme(
        "ckptmap.quantization.deepseek_fp8:Fp8Scheme",
        ("_scale_inv", "qscale_weight", "scale"),
        ("fp8",),
    ),
    KnownScheme(
        "ckptmap.quantization.deepseek_fp8:Fp8ExponentScheme",
        ("_scale_inv", "qscale_weight", "scale"),
        ("fp8",),
    ),
    KnownScheme(
        "ckptmap.quantization.microscaling.deepseek_fp4:DeepseekFp4Scheme",
        ("scale", "weight_scale_inv"),
        ("fp8-fp4",),
    ),
    KnownScheme("ckptmap.quantization.microscaling.gpt_oss:GptOssMxfp4", ("_blocks",), ("mxfp4",)),
    KnownScheme("ckptmap.quantization.gptq.scheme:GptqScheme", ("qweight",), ("gptq", "gptq-v2")),
    KnownScheme("ckptmap.quantization.gptq.scheme:AwqScheme", ("qweight",), ("awq",)),
    KnownScheme("ckptmap.quantization.gguf.scheme:GgufScheme", records=("gguf",)),
    KnownScheme("ckptmap.quantization.gguf.targets:GgufQ8_0"),
    KnownScheme("ckptmap.quantization.gguf.targets:GgufQ5_1"),
    KnownScheme("ckptmap.quantization.gguf.targets:GgufQ5_0"),
    KnownScheme("ckptmap.quantization.gguf.targets:GgufQ4_1"),
    KnownScheme("ckptmap.quantization.gguf.targets:GgufQ4_0"),
    KnownScheme("ckptmap.quantization.gguf.targets:GgufMxfp4"),
    KnownScheme("ckptmap.quantization.striped.hqq:HqqScheme", ("W_q",)),
    KnownScheme("ckptmap.quantization.striped.quanto:Quanto8Scheme", ("_data",)),
    KnownScheme(
        "ckptmap.quantization.striped.quanto:QuantoPackedScheme", ("_data",), ("quanto-packed",)
    ),
    KnownScheme("ckptmap.quantization.torchao.training_weights:TrainedDense"),
    KnownScheme("ckptmap.optim.lowbit_torchao:Adam8bit", records=("adam8bit",)),
    KnownScheme("ckptmap.optim.lowbit_torchao:Adam4bit", records=("adam4bit",)),
    KnownScheme("ckptmap.optim.lowbit_torchao:AdamFp8", records=("adamfp8",)),
    KnownScheme("ckptmap.optim.lowbit_bnb:Bnb8bit", records=("bnb8bit",)),
    KnownScheme("ckptmap.quantization.dense:CastBf16"),
    KnownScheme("ckptmap.quantization.dense:CastFp32"),
    KnownScheme("ckptmap.quantization.dense:CastFp16"),
)
