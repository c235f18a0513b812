"""bitsandbytes NF4 as schemes: single quantized and, with `-dq`, double quantized.

transformers loads what is written so: `config.json` says how, each tensor its block size.
"""

from __future__ import annotations

from ckptmap.encodings.bnb_scheme import FourBitScheme


class BnbNF4(FourBitScheme):
    name = suffix = "bnb-nf4"
    kind, double = "nf4", False


class BnbNF4Double(FourBitScheme):
    name = suffix = "bnb-nf4-dq"
    kind, double = "nf4", True
