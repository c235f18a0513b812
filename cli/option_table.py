"""The options of a conversion on the command line: help, metavar, how a text becomes a value.

What an option is called in the library, its type and its default stand in the dataclasses
`ckptmap.planning.options.Options` and `RunOptions`: each row here names a field of one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptmap.planning.options import DIGESTS, MAX_MEMORY

from .shared_parameters import one_of
from .sizes import parse_memory, parse_nbytes

Value = Any
"""What typer gives for an option: a text, a number, a flag, a list of texts, or None."""


def _wrappers(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def read_param_order(file: str) -> Sequence[Sequence[str]]:
    from ckptmap.optim.index_order import read_order

    return read_order(file)


@dataclass(frozen=True)
class CliOption:
    """One option of the command line; `TABLE` has it under the name of its parameter.

    field   the field that it sets, where that has another name
    names   of the option, where they are not the parameter's
    kind    the type that typer parses, where it is not the field's
    default in the form that is typed, where it is not the field's
    read    makes the field's value of what was typed
    """

    help: str
    metavar: str | None = None
    field: str = ""
    names: tuple[str, ...] = ()
    kind: object = None
    default: Value = None
    read: Callable[[Value], Value] | None = None
    check: Callable[[str], str] | None = None
    at_least: int | None = None
    show_default: bool = False


TABLE: Mapping[str, CliOption] = {
    "world_size": CliOption("Ranks to cut for; default: as many as wrote SRC.", at_least=1),
    "max_memory": CliOption(
        "Bound of all buffers of a rank, 2MiB or more.", "SIZE", kind=str,
        default=f"{MAX_MEMORY >> 20}MiB", read=parse_memory, show_default=True,
    ),
    "digest": CliOption(
        "Of what is written: xxh3 of every tensor, or sha256 of every file as well. Without any,"
        " `verify` can check structure only, and a killed run begins anew.",
        "|".join(DIGESTS), check=one_of(*DIGESTS), show_default=True,
    ),
    "device": CliOption("Where arithmetic runs: cpu, cuda, cuda:1.", show_default=True),
    "threads": CliOption("Default: by the cores.", at_least=1),
    "overwrite": CliOption("Replace DST once the new one is whole."),
    "include": CliOption(
        "Only these weights, by plain names, with --names those in DST; repeatable.", "GLOB",
    ),
    "exclude": CliOption(
        "Not these weights, by plain names, with --names those in SRC or in DST; repeatable.",
        "GLOB",
    ),
    "drop": CliOption("Leave this entry behind: a key or a glob; repeatable.", "KEY"),
    "optimizer": CliOption(
        "What becomes of optimizer state.", "keep|drop", check=one_of("keep", "drop"),
        show_default=True,
    ),
    "optimizer_keys": CliOption(
        "How DST keys optimizer state; index is what optimizer.load_state_dict takes.",
        "fqn|index|flattened", show_default=True,
    ),
    "param_order": CliOption(
        "Which parameters the indices of optimizer state mean: one name a line, an empty line"
        " between groups, or JSON, a list of names a group.",
        "FILE", kind=str | None, read=read_param_order,
    ),
    "like": CliOption(
        "Another checkpoint of the same model, or its config.json: names, shapes, order.", "PATH",
    ),
    "mesh": CliOption(
        "The mesh that DTensors are cut over: replicate=2,shard=4 or dp=2,tp=4.", "DIMS",
    ),
    "tp_plan": CliOption(
        "How the mesh dim tp cuts, TOML or JSON: name pattern to colwise, rowwise, replicate.",
        "FILE",
    ),
    "fsdp_units": CliOption(
        "A module that FSDP1 wraps, as 'layers.*', beside the root; repeatable.", "GLOB",
    ),
    "use_orig_params": CliOption("The FSDP1 model is built with use_orig_params=True."),
    "root": CliOption("The dict to put weights in, as model or app/model; '' for none.", "KEY"),
    "source_root": CliOption("The dict of SRC that holds the weights.", "KEY"),
    "wrap": CliOption(
        "Wrappers to name for, outermost first: ddp,compile.", "NAMES", kind=str | None,
        read=_wrappers,
    ),
    "names_like": CliOption("Name keys as this checkpoint does.", "PATH"),
    "names": CliOption(
        "Naming scheme of DST: meta, torchtune, hf, auto (known names to hf), or a mapping"
        " file; see `ckptmap mappings list`.",
        "SCHEME",
    ),
    "names_from": CliOption("That of SRC; default: by its keys.", "SCHEME"),
    "encode": CliOption(
        "Encode these weights only; repeatable.", "GLOB", names=("--encode", "--quantize"),
    ),
    "no_encode": CliOption(
        "Leave these weights as they are; repeatable.", "GLOB", names=("--no-encode", "--keep"),
    ),
    "strict": CliOption(
        "Refuse where a weight's shape keeps it dense, or a glob matches nothing."
    ),
    "exact_scales": CliOption(
        "Store quantization scales without loss, where that can be.", kind=bool, default=False,
    ),
    "base": CliOption(
        "The quantized checkpoint that has the scales of payloads which SRC holds alone.", "PATH",
    ),
    "max_shard_size": CliOption(
        "Largest file of a shard set; default 5GB.", "SIZE", field="max_shard_nbytes",
        kind=str | None, read=parse_nbytes,
    ),
    "config_from": CliOption("Directory or config.json to carry over.", "PATH"),
    "low_disk": CliOption(
        "From hf://: keep one file of SRC at a time, beside DST, not the cache."
    ),
    "no_sync": CliOption(
        "Publish without waiting for the disk, as cp does: a power cut in the next half minute"
        " may leave DST without all of its bytes, which `verify` finds, unless with --digest none."
        " A killed run still leaves all or nothing.",
        field="sync", default=False, read=lambda typed: not typed,
    ),
}  # fmt: skip
"""In the order of the help."""
