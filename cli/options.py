"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any

import typer

UNITS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "tb": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip
MIN_MEMORY = 2 << 20
"""Buffers that a thread has whatever the bound is: below it the bound would be a lie."""


def parse_nbytes(text: str) -> int:
    """`"64MiB"` -> 67108864, `"2GB"` -> 2000000000, `"4096"` -> 4096."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in UNITS:
        raise typer.BadParameter(f"{text!r} is no size; write for example 64MiB, 2GB or 4096")
    nbytes = int(float(match[1]) * UNITS[match[2]])
    if nbytes < 1:
        raise typer.BadParameter(f"{text!r}: expected 1 byte or more")
    return nbytes


def parse_memory(text: str) -> int:
    """The same, of a bound that can be kept."""
    nbytes = parse_nbytes(text)
    if nbytes < MIN_MEMORY:
        raise typer.BadParameter(
            f"--max-memory {text}: expected 2MiB or more, what one thread holds"
        )
    return nbytes


def one_of(*choices: str) -> Callable[[str], str]:
    """A callback that refuses any other value."""

    def check(value: str) -> str:
        if value not in choices:
            raise typer.BadParameter(f"{value!r}, expected one of {', '.join(choices)}")
        return value

    return check


def _option(*names: str, **about: Any) -> Any:
    return typer.Option(*names, show_default=about.pop("show_default", False), **about)


Json = Annotated[bool, _option("--json", help="Print one JSON document.")]
Quiet = Annotated[
    bool, _option("--quiet", "-q", help="No progress; on stdout the destination only.")
]
Src = Annotated[
    str, typer.Argument(metavar="SRC", help="A checkpoint: file, directory, hf://org/name.")
]
To = Annotated[
    str,
    _option("--to", metavar="SETUP", help="What to convert to: hf, full-bf16, fsdp2-nf4."),
]
WorldSize = Annotated[
    int | None,
    _option("--world-size", min=1, help="Ranks to cut for; default: as many as wrote SRC."),
]
Include = Annotated[
    list[str] | None,
    _option(
        "--include",
        metavar="GLOB",
        help="Only these weights, by plain names, with --names those in DST; repeatable.",
    ),
]
Exclude = Annotated[
    list[str] | None,
    _option(
        "--exclude",
        metavar="GLOB",
        help="Not these weights, by plain names, with --names those in SRC or in DST; repeatable.",
    ),
]
Drop = Annotated[
    list[str] | None,
    _option("--drop", metavar="KEY", help="Leave this entry behind: a key or a glob; repeatable."),
]
Optimizer = Annotated[
    str,
    _option(
        "--optimizer",
        metavar="keep|drop",
        callback=one_of("keep", "drop"),
        show_default=True,
        help="What becomes of optimizer state.",
    ),
]
OptimizerKeys = Annotated[
    str,
    _option(
        "--optimizer-keys",
        metavar="fqn|index|flattened",
        show_default=True,
        help="How DST keys optimizer state; index is what optimizer.load_state_dict takes.",
    ),
]
ParamOrder = Annotated[
    str | None,
    _option(
        "--param-order",
        metavar="FILE",
        help="Which parameters the indices of optimizer state mean: one name a line, an empty line"
        " between groups, or JSON, a list of names a group.",
    ),
]
Like = Annotated[
    str | None,
    _option(
        "--like",
        metavar="PATH",
        help="Another checkpoint of the same model, or its config.json: names, shapes, order.",
    ),
]
Mesh = Annotated[
    str | None,
    _option(
        "--mesh",
        metavar="DIMS",
        help="The mesh that DTensors are cut over: replicate=2,shard=4 or dp=2,tp=4.",
    ),
]
TpPlan = Annotated[
    str | None,
    _option(
        "--tp-plan",
        metavar="FILE",
        help="How the mesh dim tp cuts, TOML or JSON: name pattern to colwise, rowwise, replicate.",
    ),
]
FsdpUnits = Annotated[
    list[str] | None,
    _option(
        "--fsdp-units",
        metavar="GLOB",
        help="A module that FSDP1 wraps, as 'layers.*', beside the root; repeatable.",
    ),
]
UseOrigParams = Annotated[
    bool, _option("--use-orig-params", help="The FSDP1 model is built with use_orig_params=True.")
]
Root = Annotated[
    str | None,
    _option("--root", help="The dict to put weights in, as model or app/model; '' for none."),
]
SourceRoot = Annotated[
    str | None, _option("--source-root", help="The dict of SRC that holds the weights.")
]
Wrap = Annotated[
    str | None,
    _option("--wrap", metavar="NAMES", help="Wrappers to name for, outermost first: ddp,compile."),
]
NamesLike = Annotated[
    str | None, _option("--names-like", metavar="PATH", help="Name keys as this checkpoint does.")
]
Names = Annotated[
    str | None,
    _option(
        "--names",
        metavar="SCHEME",
        help="Naming scheme of DST: meta, torchtune, hf, auto (known names to hf), or a mapping"
        " file; see `ckptmap mappings list`.",
    ),
]
NamesFrom = Annotated[
    str | None,
    _option("--names-from", metavar="SCHEME", help="That of SRC; default: by its keys."),
]
Encode = Annotated[
    list[str] | None,
    _option(
        "--encode", "--quantize", metavar="GLOB", help="Encode these weights only; repeatable."
    ),
]
NoEncode = Annotated[
    list[str] | None,
    _option(
        "--no-encode",
        "--keep",
        metavar="GLOB",
        help="Leave these weights as they are; repeatable.",
    ),
]
Strict = Annotated[
    bool,
    _option(
        "--strict", help="Refuse where a weight's shape keeps it dense, or a glob matches nothing."
    ),
]
NoSync = Annotated[
    bool,
    _option(
        "--no-sync",
        help="Publish without waiting for the disk, as cp does: a power cut in the next half minute"
        " may leave DST without all of its bytes, which `verify` finds, unless with --digest none."
        " A killed run still leaves all or nothing.",
    ),
]
MaxShardSize = Annotated[
    str | None,
    _option("--max-shard-size", metavar="SIZE", help="Largest file of a shard set; default 5GB."),
]
ConfigFrom = Annotated[
    str | None,
    _option("--config-from", metavar="PATH", help="Directory or config.json to carry over."),
]
ExactScales = Annotated[
    bool,
    _option("--exact-scales", help="Store quantization scales without loss, where that can be."),
]
Base = Annotated[
    str | None,
    _option(
        "--base",
        metavar="PATH",
        help="The quantized checkpoint that has the scales of payloads which SRC holds alone.",
    ),
]
