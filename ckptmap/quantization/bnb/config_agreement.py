"""Compare what a bitsandbytes config states about a weight with the weight as it is stored.

    "bnb_4bit_quant_type": "fp4"    and    fc.weight.quant_state.bitsandbytes__nf4    ->  SourceError CKM115

Source of the fields: `BitsAndBytesConfig` in utils/quantization_config.py of transformers 5. Whether absmax is
quantized, too (`bnb_4bit_use_double_quant`), is stated by each tensor for itself, and is no contradiction.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptmap.quantization.blockwise.group_checks import contradiction
from ckptmap.tensors import StoredTensor

METHOD = "bitsandbytes"


def kept_modules(config: Mapping[str, object]) -> tuple[str, ...]:
    """Return the names of the lists of modules that are not quantized, if the config is of this library."""
    return ("llm_int8_skip_modules",) if config.get("quant_method", METHOD) == METHOD else ()


def require_bits(fqn: str, bits: int, config: Mapping[str, object], codes: StoredTensor) -> None:
    """Raise SourceError CKM115 where a config states other bits, 4 or 8."""
    if config.get("quant_method", METHOD) != METHOD:
        return
    other = 12 - bits
    if config.get(f"load_in_{other}bit") is True and config.get(f"load_in_{bits}bit") is not True:
        stated = f"config.json states load_in_{other}bit true"
        raise contradiction(fqn, stated, f"its codes {codes.info} have {bits} bits", codes)


def require_kind(fqn: str, kind: str, config: Mapping[str, object], codes: StoredTensor) -> None:
    """Raise SourceError CKM115 where a config states the other kind of codes, "nf4" or "fp4"."""
    require_bits(fqn, 4, config, codes)
    stated = config.get("bnb_4bit_quant_type")
    if config.get("load_in_4bit") is True and stated in ("nf4", "fp4") and stated != kind:
        raise contradiction(
            fqn,
            f"config.json states bnb_4bit_quant_type {stated!r}",
            f"its codes are {kind}",
            codes,
        )
