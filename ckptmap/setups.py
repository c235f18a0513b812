"""Parse the value of `--to`, SETUP[-ENCODING], into a registered setup and encoding scheme.

fsdp2-nf4 -> setup fsdp2 (DCP directory, sharded over ranks) with the scheme nf4
hf        -> setup hf; encodings stay as they are
"""

from __future__ import annotations

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
}
"""Words for a format or a framework, as people write them after `--to` -> the setup that they mean."""


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
    for setup in sorted(registry.setups(), key=lambda s: -len(s.name)):
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
    known = {scheme.suffix: scheme for scheme in reversed(registry.schemes()) if scheme.suffix}
    return known.get(f"{setup.name}-{suffix}") or known.get(suffix)


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

    word = max((word for word in MEANT if _begins_with(name, word)), key=len, default="")
    meant = f"{MEANT[word]}{name.removeprefix(word)}" if word else name
    near = difflib.get_close_matches(meant, names(), n=1)
    guess = f"did you mean --to {near[0]}? " if near else ""
    if meant in near:
        return guess.rstrip()
    suffixes = " ".join(f"-{scheme.suffix}" for scheme in registry.schemes() if scheme.suffix)
    known = [setup.name for setup in registry.setups() if _begins_with(meant, setup.name)]
    if known:
        return f"{guess}{max(known, key=len)} goes alone or with an encoding: {suffixes}"
    setups = ", ".join(setup.name for setup in registry.setups())
    return f"{guess}setups: {setups}; each alone or with an encoding, such as hf-bf16 or fsdp2-nf4"


def _begins_with(name: str, word: str) -> bool:
    return name == word or name.startswith(f"{word}-")
