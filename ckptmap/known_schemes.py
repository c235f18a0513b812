"""The encodings of this package, in the order in which they are asked, and what shows that one may be in a checkpoint.

Importing all of them takes a third of the time in which the headers of 200,000 tensors are parsed. So each line
says by which keys or records its weights are found, and by which name it is a target; `ckptmap.registry` imports
those that are needed.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class KnownScheme(NamedTuple):
    """Where the class of an encoding is, and what is in every checkpoint in which it finds weights: one of these.

    suffix   its name after a setup in `--to`; "": it is no target
    ends     how the last segment of a stored key ends
    records  the schemes of its encoding records
    method   the `quant_method` of configs that declare more than weights, which it carries over; "": of none
    """

    spec: str
    suffix: str = ""
    ends: tuple[str, ...] = ()
    records: tuple[str, ...] = ()
    method: str = ""

    def may_read(self, lasts: Collection[str], stated: Collection[object]) -> bool:
        """Return whether it must be asked for the weights of a checkpoint with such keys and records."""
        if any(name in stated for name in self.records):
            return True
        return bool(self.ends) and any(last.endswith(self.ends) for last in lasts)


SCHEMES = (
    KnownScheme("ckptmap.quantization.nf4.scheme:NF4Scheme", "nf4", ("nf4",), ("nf4",)),
    KnownScheme(
        "ckptmap.quantization.bnb.fourbit_schemes:BnbNF4", "bnb-nf4", ("bitsandbytes__nf4",)
    ),
    KnownScheme(
        "ckptmap.quantization.bnb.fourbit_schemes:BnbNF4Double",
        "bnb-nf4-dq",
        ("bitsandbytes__nf4",),
    ),
    KnownScheme(
        "ckptmap.quantization.bnb.fourbit_schemes:BnbFP4", "bnb-fp4", ("bitsandbytes__fp4",)
    ),
    KnownScheme(
        "ckptmap.quantization.bnb.fourbit_schemes:BnbFP4Double",
        "bnb-fp4-dq",
        ("bitsandbytes__fp4",),
    ),
    KnownScheme(
        "ckptmap.quantization.torchao.int8:Int8Scheme", "int8", records=("torchao", "int8")
    ),
    KnownScheme(
        "ckptmap.quantization.torchao.float8:Float8Scheme", "float8", records=("torchao", "float8")
    ),
    KnownScheme(
        "ckptmap.quantization.torchao.float8:Float8E5m2Scheme", records=("torchao", "float8-e5m2")
    ),
    KnownScheme(
        "ckptmap.quantization.torchao.microscaled:AoMxfp8Scheme",
        "torchao-mxfp8",
        records=("torchao", "torchao-mxfp8"),
    ),
    KnownScheme(
        "ckptmap.quantization.torchao.microscaled:AoMxE5m2Scheme",
        records=("torchao", "torchao-mxfp8-e5m2"),
    ),
    KnownScheme(
        "ckptmap.quantization.torchao.microscaled:AoMxfp4Scheme",
        "torchao-mxfp4",
        records=("torchao", "torchao-mxfp4"),
    ),
    KnownScheme(
        "ckptmap.quantization.torchao.microscaled:AoNvfp4Scheme",
        "torchao-nvfp4",
        records=("torchao", "torchao-nvfp4"),
    ),
    KnownScheme("ckptmap.quantization.bnb.int8:BnbInt8Scheme", "bnb-int8", ("SCB",), ("bnb-int8",)),
    KnownScheme(
        "ckptmap.quantization.modelopt.scheme:ModeloptNvfp4",
        ends=("weight_scale_2",),
        records=("modelopt-nvfp4",),
    ),
    *(
        KnownScheme(
            f"ckptmap.quantization.modelopt.scheme:Modelopt{form}",
            ends=("_scale",),
            records=(f"modelopt-{form.lower()}",),
        )
        for form in ("Fp8", "Int8", "Int4")
    ),
    KnownScheme(
        "ckptmap.quantization.compressed_tensors.microscaled:CompressedNvfp4",
        "ct-nvfp4",
        ("_packed",),
        ("ct-nvfp4",),
        method="compressed-tensors",
    ),
    KnownScheme(
        "ckptmap.quantization.compressed_tensors.microscaled:CompressedMxfp4",
        "ct-mxfp4",
        ("_packed",),
        ("ct-mxfp4",),
        method="compressed-tensors",
    ),
    KnownScheme(
        "ckptmap.quantization.compressed_tensors.microscaled:CompressedMxfp8",
        "ct-mxfp8",
        ("_scale",),
        ("ct-mxfp8",),
        method="compressed-tensors",
    ),
    KnownScheme(
        "ckptmap.quantization.compressed_tensors.scheme:CompressedInt8",
        "ct-int8",
        ("_packed",),
        ("ct-packed",),
        method="compressed-tensors",
    ),
    KnownScheme(
        "ckptmap.quantization.compressed_tensors.scheme:CompressedInt4",
        "ct-int4",
        method="compressed-tensors",
    ),
    KnownScheme(
        "ckptmap.quantization.compressed_tensors.scheme:CompressedFp8",
        "ct-fp8",
        ("_scale",),
        ("ct-int8-plain", "ct-fp8"),
        method="compressed-tensors",
    ),
    KnownScheme(
        "ckptmap.quantization.deepseek_fp8:Fp8Scheme",
        "fp8",
        ("_scale_inv", "qscale_weight", "scale"),
        ("fp8",),
    ),
    KnownScheme(
        "ckptmap.quantization.deepseek_fp8:Fp8ExponentScheme",
        "fp8-ue8m0",
        ("_scale_inv", "qscale_weight", "scale"),
        ("fp8",),
    ),
    KnownScheme(
        "ckptmap.quantization.microscaling.deepseek_fp4:DeepseekFp4Scheme",
        ends=("scale", "weight_scale_inv"),
        records=("fp8-fp4",),
    ),
    KnownScheme(
        "ckptmap.quantization.microscaling.deepseek_fp4:QuarkMxfp4Scheme",
        ends=("_scale",),
        records=("quark-mxfp4",),
    ),
    *(
        KnownScheme(
            f"ckptmap.quantization.quark:Quark{form}Scheme",
            ends=("_scale",),
            records=(f"quark-{form.lower()}",),
        )
        for form in ("Fp8", "Int8", "Int4")
    ),
    KnownScheme(
        "ckptmap.quantization.microscaling.gpt_oss:GptOssMxfp4", "mxfp4", ("_blocks",), ("mxfp4",)
    ),
    KnownScheme(
        "ckptmap.quantization.gptq.scheme:GptqScheme",
        ends=("qweight",),
        records=("gptq", "gptq-v2", "gptq-p"),
    ),
    KnownScheme("ckptmap.quantization.gptq.scheme:AwqScheme", ends=("qweight",), records=("awq",)),
    KnownScheme("ckptmap.quantization.gguf.scheme:GgufScheme", records=("gguf",)),
    KnownScheme("ckptmap.quantization.gguf.targets:GgufQ8_0", "gguf-q8_0"),
    KnownScheme("ckptmap.quantization.gguf.targets:GgufQ5_1", "gguf-q5_1"),
    KnownScheme("ckptmap.quantization.gguf.targets:GgufQ5_0", "gguf-q5_0"),
    KnownScheme("ckptmap.quantization.gguf.targets:GgufQ4_1", "gguf-q4_1"),
    KnownScheme("ckptmap.quantization.gguf.targets:GgufQ4_0", "gguf-q4_0"),
    KnownScheme("ckptmap.quantization.gguf.targets:GgufMxfp4", "gguf-mxfp4"),
    KnownScheme("ckptmap.quantization.striped.hqq:HqqScheme", ends=("W_q",)),
    KnownScheme("ckptmap.quantization.striped.quanto:Quanto8Scheme", ends=("_data",)),
    KnownScheme(
        "ckptmap.quantization.striped.quanto:QuantoPackedScheme",
        ends=("_data",),
        records=("quanto-packed",),
    ),
    KnownScheme("ckptmap.quantization.torchao.training_weights:TrainedDense"),
    KnownScheme("ckptmap.optim.lowbit_torchao:Adam8bit", records=("adam8bit",)),
    KnownScheme("ckptmap.optim.lowbit_torchao:Adam4bit", records=("adam4bit",)),
    KnownScheme("ckptmap.optim.lowbit_torchao:AdamFp8", records=("adamfp8",)),
    KnownScheme("ckptmap.optim.lowbit_bnb:Bnb8bit", records=("bnb8bit",)),
    KnownScheme("ckptmap.quantization.dense:CastBf16", "bf16"),
    KnownScheme("ckptmap.quantization.dense:CastFp32", "fp32"),
    KnownScheme("ckptmap.quantization.dense:CastFp16", "fp16"),
)
