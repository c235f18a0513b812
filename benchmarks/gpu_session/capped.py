"""A conversion on a device that has little memory writes the right bytes, or says one clear line."""

from __future__ import annotations

from pathlib import Path

from benchmarks.gpu_session.encoders import NAME
from benchmarks.gpu_session.session import StepRun
from benchmarks.gpu_session.timing import weight

CAPS = (1024, 256, 96, 48, 32, 24, 16, 8, 4, 2)
"""MiB that torch may take of the device."""
WAYS = (("bf16", "full-nf4"), ("full-nf4", "full-bf16"), ("bf16", "full-int8"))


def run(step: StepRun) -> None:
    """Convert under ever smaller caps."""
    import torch

    import ckptmap

    side = 256 if step.is_tiny else 4096
    torch.save({NAME: weight(side, "bfloat16")}, step.work / "bf16")
    total = torch.cuda.get_device_properties(step.device).total_memory
    for source, to in WAYS:
        expected = step.work / to
        ckptmap.convert(step.work / source, expected, to=to, sync=False, overwrite=True)
        for cap in CAPS:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.set_per_process_memory_fraction((cap << 20) / total)
            said = outcome(step.work / source, step.work / "capped", to, step.device, expected)
            peak = torch.cuda.max_memory_reserved() >> 20
            what = f"{source} -> {to} with {cap} MiB"
            step.result.figure(what, said.splitlines()[0][:160] if said else "")
            step.result.figure(f"{what}: reserved at most", peak, "MiB")
            good = said == "the CPU's bytes" or (said.startswith("CKM") and "\n" not in said)
            step.result.check(what, good, said)
            (step.work / "capped").unlink(missing_ok=True)
    torch.cuda.set_per_process_memory_fraction(1.0)


def outcome(source: Path, out: Path, to: str, device: str, expected: Path) -> str:
    """Return "the CPU's bytes", "other bytes", or the error: its code and text, or a foreign one's."""
    import ckptmap

    try:
        ckptmap.convert(source, out, to=to, device=device, sync=False, overwrite=True)
    except ckptmap.CkptmapError as error:
        return f"{error.code}: {error.message}; hint: {error.hint}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "the CPU's bytes" if out.read_bytes() == expected.read_bytes() else "other bytes"
