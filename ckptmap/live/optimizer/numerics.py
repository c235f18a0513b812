"""Settings of torch, of the whole process, that decide which kernels compute and with which bits.

`save` records those that are not torch's defaults, `load(exact=True)` compares them. Two are not compared: the default
dtype, which programs set for as long as they build a model, and what an optimizer's constructor was given as defaults,
which no step reads, for the groups have values of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

PRECISION = "float32 matmul precision"
SETTINGS = "settings of torch"
"""Names of settings of a run."""

Read = Callable[[Any], object]
"""Returns a setting of the module torch."""

ANYWHERE: dict[str, tuple[Read, object]] = {
    "deterministic algorithms": (lambda torch: torch.are_deterministic_algorithms_enabled(), False),
    "mkldnn.enabled": (lambda torch: torch.backends.mkldnn.enabled, True),
    "mkldnn.deterministic": (lambda torch: torch.backends.mkldnn.deterministic, False),
    "mkldnn.conv.fp32_precision": (lambda t: t.backends.mkldnn.conv.fp32_precision, "none"),
    "mkldnn.rnn.fp32_precision": (lambda t: t.backends.mkldnn.rnn.fp32_precision, "none"),
    "flash_sdp": (lambda torch: torch.backends.cuda.flash_sdp_enabled(), True),
    "mem_efficient_sdp": (lambda torch: torch.backends.cuda.mem_efficient_sdp_enabled(), True),
    "math_sdp": (lambda torch: torch.backends.cuda.math_sdp_enabled(), True),
}
ON_CUDA: dict[str, tuple[Read, object]] = {
    "cudnn.enabled": (lambda torch: torch.backends.cudnn.enabled, True),
    "cudnn.benchmark": (lambda torch: torch.backends.cudnn.benchmark, False),
    "cudnn.deterministic": (lambda torch: torch.backends.cudnn.deterministic, False),
    "cudnn.conv.fp32_precision": (lambda t: t.backends.cudnn.conv.fp32_precision, "tf32"),
    "cudnn.rnn.fp32_precision": (lambda t: t.backends.cudnn.rnn.fp32_precision, "tf32"),
    "cudnn_sdp": (lambda torch: torch.backends.cuda.cudnn_sdp_enabled(), True),
    "allow_fp16_reduced_precision_reduction": (
        lambda torch: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        True,
    ),
    "allow_bf16_reduced_precision_reduction": (
        lambda torch: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        True,
    ),
}
"""Setting -> (what reads it, torch's default). Those of matrix products in float32 are one word, below."""


def described(devices: Sequence[str]) -> dict[str, object]:
    """Return the settings as plain values, for a model on these devices."""
    import torch

    known = {**ANYWHERE, **(ON_CUDA if "cuda" in devices else {})}
    values = {name: (_read(read), default) for name, (read, default) in known.items()}
    texts = [f"{name}={value}" for name, (value, default) in values.items() if value != default]
    found: dict[str, object] = {PRECISION: _float32_precision(torch)}
    if texts:
        found[SETTINGS] = ", ".join(texts)
    return found


def _read(read: Read) -> object:
    """Return a setting; None in a release of torch that has none of that name."""
    import torch

    try:
        return read(torch)
    except (AttributeError, RuntimeError):
        return None


def _float32_precision(torch: Any) -> str:
    """Return torch's word for it; where a program has set it by backend, which torch has no word for, that
    of each backend."""
    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:  # set by torch.backends.*.fp32_precision
        backends = torch.backends
        return f"cuda {backends.cuda.matmul.fp32_precision}, mkldnn {backends.mkldnn.matmul.fp32_precision}"
