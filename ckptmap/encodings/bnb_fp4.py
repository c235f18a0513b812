"""bitsandbytes FP4 as schemes: single quantized and, with `-dq`, double quantized."""

from __future__ import annotations

from ckptmap.encodings.bnb_scheme import FourBitScheme


class BnbFP4(FourBitScheme):
    name = suffix = "bnb-fp4"
    kind, double = "fp4", False


class BnbFP4Double(FourBitScheme):
    name = suffix = "bnb-fp4-dq"
    kind, double = "fp4", True
