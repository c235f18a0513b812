"""The steps of a session in their order: what no GPU has answered yet, and what has a goal that is missed, come first."""

from __future__ import annotations

from benchmarks.gpu_session.session import Step

_HERE = "benchmarks.gpu_session"
_RUNS = ("numpy", "xxhash")
"""What every conversion and every save needs beside torch."""

STEPS = (
    Step("facts", "the device, and arithmetic that it does otherwise than the CPU", f"{_HERE}.facts:run", 60),
    Step("unseen", "code that no GPU has run yet: right, and nothing in it waits", f"{_HERE}.unseen:run", 90, _RUNS),
    Step("equality", "every encoder and decoder makes the CPU's bytes, and waits for nothing", f"{_HERE}.equality:run", 120),
    Step("load_apart", "phases of load, and other threads, blocks and ways side by side", f"{_HERE}.load_apart:run", 60, _RUNS),
    Step("first_save", "the first saves of a manager, with memory made ahead", f"{_HERE}.first_save:run", 60, _RUNS),
    Step("save", "save while training goes on, and load", f"{_HERE}.save_load:run", 120, _RUNS),
    Step("rates", "link, staged, kernels, convert", f"{_HERE}.rates:run", 120),
    Step("recode", "NF4 to bf16, NF4 to int8, fp32 to int8, on the CPU and on the device", f"{_HERE}.recode:run", 90, _RUNS),
    Step("fsdp2", "one rank under FSDP2: from meta, CPU offload, translate", f"{_HERE}.fsdp2:run", 60, _RUNS),
    Step("resume", "a run is continued bit for bit, random streams of the device too", f"{_HERE}.resume:run", 60, _RUNS),
    Step("capped", "little device memory: right bytes, or one clear line", f"{_HERE}.capped:run", 60, _RUNS, cuda=True),
    Step("profile", "kernels, how busy the device is, copies beside kernels", f"{_HERE}.profile_convert:run", 60, _RUNS),
    Step("suite", "the tests that have a variant for CUDA", f"{_HERE}.suite:run", 150, needs=("pytest", "hypothesis")),
)  # fmt: skip
