"""Turn the factors of rotary frequencies, which GGUF files hold as tensors, into the rope_scaling of config.json.

    rope_freqs.weight [d / 2]                  Llama 3.1 to 3.3: made of four numbers, of which three are the same
                                               in all published models
    rope_factors_long.weight, _short [d / 2]   Phi-3 and Phi-4 with long contexts: the factors as they are

Source: llama.cpp, convert_hf_to_gguf.py (`LlamaModel.generate_extra_tensors`, `Phi3MiniModel`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, isclose, pi

LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONG, SHORT, LLAMA = "rope_factors_long.weight", "rope_factors_short.weight", "rope_freqs.weight"
CLOSE = 1e-4


def rope_scaling(
    factors: Mapping[str, Sequence[float]], theta: float
) -> tuple[dict[str, object] | None, str]:
    """Return the rope_scaling and "", or None and which tensor it could not be told from; None and "": there
    are no factors but 1."""
    if LONG in factors and SHORT in factors:
        both = {"long_factor": list(factors[LONG]), "short_factor": list(factors[SHORT])}
        return {"rope_type": "longrope", **both}, ""
    values = factors.get(LLAMA, ())
    if all(value == 1.0 for value in values):
        return None, ""
    factor = float(f"{max(values):.6g}")
    if not (0 < factor < inf and 0 < theta < inf):
        return None, LLAMA
    expected = llama3_factors(theta, 2 * len(values), factor)
    if all(isclose(a, b, rel_tol=CLOSE) for a, b in zip(values, expected, strict=True)):
        return {**LLAMA3, "factor": factor}, ""
    return None, LLAMA


def llama3_factors(
    theta: float, head_dim: int, factor: float, low: float = 1.0, high: float = 4.0, before: float = 8192
) -> list[float]:  # fmt: skip
    """Return what each frequency is divided by: 1 for short waves, `factor` for long ones, in between by how often
    the wave fits into the first context, of `before` tokens: from `low` to `high` times."""
    found = []
    for at in range(0, head_dim, 2):
        wave = 2 * pi * theta ** (at / head_dim)
        fits = before / wave
        if fits > high:
            found.append(1.0)
        elif fits < low:
            found.append(factor)
        else:
            smooth = (fits - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return found
