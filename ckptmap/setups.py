"""Parse the value of `--to`, SETUP[-ENCODING], into a registered setup and encoding scheme.

fsdp2-nf4 -> setup fsdp2 (DCP directory, sharded over ranks) with the scheme nf4
hf        -> setup hf; encodings stay as they are
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ckptmap import registry
from ckptmap.errors import PlanError
from ckptmap.protocols import Scheme, Setup

__all__ = ["Aim", "names", "parse"]  # fmt: skip


MEANT = {
    "dcp": "fsdp2",
    "fsdp": "fsdp2",
    "bin": "full",
    "pt": "full",
    "pth": "full",
    "torch": "full",
    "torch-save": "full",
    "hub": "hf",
    "huggingface": "hf",
    "safetensors": "hf",
    "transformers": "hf",
    "verl": "fsdp2-ranks",
    "fsdp1-ranks": "fsdp1-local",
    "torchtitan": "fsdp2",
    "lightning": "fsdp2",
    "vllm": "hf",
    "sglang": "hf",
    "tgi": "hf",
    "llama.cpp": "gguf",
    "llama-cpp": "gguf",
    "ollama": "gguf",
}
"""Words for a format or a framework, as people write them after `--to` -> the setup that they mean."""

LISTS = "`ckptmap doctor` lists"
"""Begins the sentence on the command that lists what may follow `--to`."""
ENCODINGS_MEANT = {
    "4bit": "bnb-nf4", "8bit": "bnb-int8", "bnb": "bnb-nf4", "bitsandbytes": "bnb-nf4",
    "fp4": "bnb-fp4", "qlora": "nf4", "int4": "ct-int4", "w4a16": "ct-int4", "w8a16": "ct-int8",
    "w8a8": "ct-fp8", "nvfp4": "ct-nvfp4", "mxfp8": "ct-mxfp8", "bfloat16": "bf16", "float16": "fp16",
    "half": "fp16", "float32": "fp32", "float": "fp32", "q8": "gguf-q8_0", "q5": "gguf-q5_0",
    "q4": "gguf-q4_0",
}  # fmt: skip
"""Words for an encoding -> the suffix that they mean."""
ONLY_READ = {"gptq": "ct-int4", "awq": "ct-int4", "hqq": "ct-int4", "quanto": "int8"}
"""Forms that are read and not written -> the suffix of a form as wide that is written."""
OTHERS_READ = {
    "megatron": "hf", "deepspeed": "full", "nemo": "hf", "onnx": "hf", "tensorrt": "hf", "openvino": "hf", "mlx": "hf",
    "torch-checkpointing": "hf", "torch_checkpointing": "hf", "coreml": "hf", "flax": "hf", "jax": "hf", "tensorflow": "hf", "keras": "hf",
}  # fmt: skip
"""Programs whose own format is not written -> a setup that they, or their converters, begin with."""
_K_OR_IQ = re.compile(r"(?:gguf-)?(?:q\d_?k|iq\d)")
"""The types of llama.cpp that are read and not written."""


@dataclass(frozen=True)
class Aim:
    """The parsed value of `--to`: a setup, and the scheme to encode with (None: no change)."""

    text: str
    setup: Setup
    scheme: Scheme | None


def parse(text: str) -> Aim:
    """Return the setup and scheme of a `--to` value.

    Raises PlanError CKM201, with the nearest name as its hint, if there is no such setup; for an empty text it names
    `--as`, too.
    """
    name = str(text).strip().lower()
    for setup in sorted(registry.setups_named(name), key=lambda s: -len(s.name)):
        if name == setup.name:
            return Aim(text, setup, None)
        if name.startswith(setup.name + "-"):
            scheme = _scheme(name.removeprefix(setup.name + "-"), setup)
            if scheme is not None:
                return Aim(text, setup, scheme)
    if not name:
        raise PlanError(
            "CKM201",
            f"--to {text!r} and no --as: expected one of them",
            f"a checkpoint that the output is like: --as PATH; {_nearest(name)}",
        )
    raise PlanError("CKM201", f"--to {text!r} is not a setup", _nearest(name))


def _scheme(suffix: str, setup: Setup) -> Scheme | None:
    """Return the scheme of a suffix: `bf16`; one that begins with the setup's name is named without that, too, and
    before others: `--to gguf-q8_0` is the setup gguf with the scheme gguf-q8_0."""
    own = f"{setup.name}-{suffix}"
    found = registry.schemes_named(own, suffix) if suffix else ()
    known = {scheme.suffix: scheme for scheme in reversed(found)}
    return known.get(own) or known.get(suffix)


def names() -> list[str]:
    """Return every value that `--to` accepts, the shortest for each setup with a scheme."""
    suffixes = [scheme.suffix for scheme in registry.schemes() if scheme.suffix]
    return [
        name
        for setup in registry.setups()
        for name in (setup.name, *(full_name(setup, suffix) for suffix in suffixes))
    ]


def full_name(setup: Setup, suffix: str) -> str:
    """Return the value of `--to` for a setup with the scheme of a suffix."""
    return f"{setup.name}-{suffix.removeprefix(f'{setup.name}-')}"


def _nearest(name: str) -> str:
    import difflib

    other = next((word for word in OTHERS_READ if _begins_with(name, word)), "")
    if other:
        return f"{other}'s own format is not written; it, or its converter, begins with --to {OTHERS_READ[other]}"
    word = max((word for word in MEANT if _begins_with(name, word)), key=len, default="")
    meant = f"{MEANT[word]}{name.removeprefix(word)}" if word else name
    near = difflib.get_close_matches(meant, names(), n=1)
    guess = f"did you mean --to {near[0]}? " if near else ""
    if meant in near:
        return guess.rstrip()
    suffixes = [scheme.suffix for scheme in registry.schemes() if scheme.suffix]
    known = [setup.name for setup in registry.setups() if _begins_with(meant, setup.name)]
    named = max(known, key=len, default="")
    suffix = meant.removeprefix(named).lstrip("-")
    if suffix in MEANT:  # hf-bin: files of one kind for a setup of another
        one_file = " It writes one file of torch.save" if MEANT[suffix] == "full" else ""
        return f"did you mean --to {MEANT[suffix]}?{one_file}"
    encoding = _meant_encoding(suffix, named or "hf")
    if encoding:
        return encoding
    if known:
        return (
            f"{guess}{named} goes alone or with an encoding, such as {named}-bf16 or {named}-nf4;"
            f" {LISTS} all {len(suffixes)}"
        )
    setups = ", ".join(setup.name for setup in registry.setups())
    return (
        f"{guess}setups: {setups}; each alone or with an encoding, such as hf-bf16 or fsdp2-nf4;"
        f" {LISTS} them"
    )


def _meant_encoding(word: str, setup: str) -> str:
    """Return the answer to a word for an encoding that has another name here, or is not written; "": it is
    none."""
    word = word.replace("_", "-") if word.replace("_", "-") in ENCODINGS_MEANT else word
    if word in ENCODINGS_MEANT:
        suffix = ENCODINGS_MEANT[word]
        chosen = "gguf" if suffix.startswith("gguf-") and setup == "hf" else setup
        return f"did you mean --to {chosen}-{suffix.removeprefix(f'{chosen}-')}?"
    if _K_OR_IQ.match(word):
        return (
            "K and IQ types of llama.cpp are read, and not written; of 4 bits is --to gguf-q4_0,"
            " of 8 bits --to gguf-q8_0"
        )
    form = next((form for form in ONLY_READ if _begins_with(word, form)), "")
    if form:
        return f"{form} is read, and not written; as wide is --to {setup}-{ONLY_READ[form]}"
    return ""


def _begins_with(name: str, word: str) -> bool:
    return name == word or name.startswith(f"{word}-")
