"""The options of a conversion on the command line: help, metavar, how a text becomes a value.

What an option is called in the library, its type and its default stand in the dataclasses
`ckptmap.planning.options.Options` and `RunOptions`: each row here names a field of one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptmap.planning.options import CHECKS, DEVICE_MEMORY, DIGESTS, MAX_MEMORY

from .completion import OPTIMIZER_KEYS, SCHEMES, Completer, choices
from .shared_parameters import one_of
from .sizes import parse_memory, parse_nbytes

Value = Any
"""What typer gives for an option: a string, a number, a flag, a list of strings, or None."""


def _wrappers(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def read_param_order(file: str) -> Sequence[Sequence[str]]:
    from ckptmap.optim.index_order import read_order

    return read_order(file)


@dataclass(frozen=True)
class CliOption:
    """One option of the command line. Its key in `TABLE` is the name of its parameter.

    field     the field that it sets, where the parameter has another name
    names     the option's names, where they differ from the parameter's: `--encode`
    kind      the type that typer parses, where it differs from the field's
    default   the default as a user would type it, where it differs from the field's
    read      makes the field's value of the typed one
    check     refuses a typed value
    at_least  the smallest whole number that is accepted; None: the option is not a number
    complete  returns the values that a shell offers
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
    complete: Completer | None = None


GROUPS: Mapping[str, Mapping[str, CliOption]] = {
    "Options": {
        "as_": CliOption(
            "In place of --to: write DST in the form of this checkpoint of the same model, with its setup, names,"
            " encodings and files. Weights that did not change get its bytes.",
            "PATH",
            names=("--as",),
        ),
        "world_size": CliOption(
            "Number of ranks to shard DST for, 1 or more; default: as many as wrote SRC.",
            at_least=1,
        ),
        "config_from": CliOption(
            "Copy config.json and the tokenizer from here into DST: a directory, or a config.json.",
            "PATH",
        ),
        "overwrite": CliOption("Replace DST when the new one is complete."),
    },
    "Which tensors": {
        "include": CliOption(
            "Write only weights with these names, as `inspect` shows them (with --names and --rename: names in"
            " DST); repeatable.",
            "GLOB",
        ),
        "exclude": CliOption(
            "Leave out weights with these names (with --names: names in SRC or in DST); repeatable.",
            "GLOB",
        ),
        "drop": CliOption(
            "Leave out this entry of SRC, whatever it is: a key or a glob (with --rename: a new name);"
            " repeatable.",
            "KEY",
        ),
        "optimizer": CliOption(
            "Convert the optimizer state, or leave it out.",
            "keep|drop",
            check=one_of("keep", "drop"),
            complete=choices("keep", "drop"),
            show_default=True,
        ),
    },
    "Files and shards": {
        "mesh": CliOption(
            "The device mesh of DTensors: replicate=2,shard=4 or dp=2,tp=4.",
            "DIMS",
        ),
        "tp_plan": CliOption(
            "How weights are split over the mesh dim tp: TOML or JSON, from patterns of names to colwise, rowwise"
            " or replicate.",
            "FILE",
        ),
        "fsdp_units": CliOption(
            "Modules that FSDP1 wraps besides the root, for example 'layers.*'; repeatable.",
            "GLOB",
        ),
        "use_orig_params": CliOption(
            "The FSDP1 model that loads DST is built with use_orig_params=True."
        ),
        "max_shard_size": CliOption(
            "Size of the largest file where DST is split into several; default: 5GB, and one file for GGUF.",
            "SIZE",
            field="max_shard_nbytes",
            names=("--max-shard-size", "--max-shard-nbytes"),
            kind=str | None,
            read=parse_nbytes,
        ),
        "root": CliOption(
            "The dict of DST that holds the weights: model, app/model, or '' for none.", "KEY"
        ),
        "source_root": CliOption(
            "The dict of SRC that holds the weights, or one of its models by name.", "KEY"
        ),
        "like": CliOption(
            "Another checkpoint of the same model, or its config.json, to take names, shapes and the"
            " order of parameters from.",
            "PATH",
        ),
        "keep_layout": CliOption(
            "Leave every entry of a torch.save file where it is. Default: yes if DST is such a file, too, and only"
            " prefixes of names change.",
            names=("--keep-layout/--no-keep-layout",),
        ),
    },
    "Names": {
        "strip_prefix": CliOption(
            "Remove these segments from the head of all names that begin with them: student.",
            "PREFIX",
        ),
        "rename": CliOption(
            "Rename by a pattern of whole names, in which {x} takes one segment or more:"
            " 'encoder.{n}.{x}=layers.{n}.{x}'; repeatable.",
            "OLD=NEW",
        ),
        "add_prefix": CliOption(
            "Put these segments before all names, after --strip-prefix and --rename.", "PREFIX"
        ),
        "names": CliOption(
            "Naming scheme of DST: meta, torchtune, hf, auto (hf where the names of SRC are known), or a"
            " mapping file; see `ckptmap mappings list`.",
            "SCHEME",
            complete=SCHEMES,
        ),
        "names_from": CliOption(
            "Naming scheme of SRC; default: recognized by its keys.", "SCHEME", complete=SCHEMES
        ),
        "names_like": CliOption(
            "Give weights the names that they have in this checkpoint.", "PATH"
        ),
        "wrap": CliOption(
            "Put the segments of these wrappers before names, outermost first: ddp,compile.",
            "NAMES",
            kind=str | None,
            read=_wrappers,
        ),
    },
    "Optimizer state": {
        "optimizer_keys": CliOption(
            "How DST keys optimizer state: fqn, by the name of the parameter; index, by its number, as"
            " optimizer.load_state_dict takes it; flattened. Default: fqn; with --keep-layout as SRC does.",
            "fqn|index|flattened",
            complete=OPTIMIZER_KEYS,
        ),
        "param_order": CliOption(
            "The names behind the indices of SRC's optimizer state: one name a line and an empty line"
            " between groups, or JSON with one list of names a group.",
            "FILE",
            kind=str | None,
            read=read_param_order,
        ),
    },
    "Encodings": {
        "encode": CliOption(
            "Encode only weights with these names; repeatable.",
            "GLOB",
            names=("--encode", "--quantize"),
        ),
        "no_encode": CliOption(
            "Do not encode weights with these names; repeatable.",
            "GLOB",
            names=("--no-encode", "--keep"),
        ),
        "strict": CliOption(
            "Refuse the plan if the shape of a weight keeps it from being encoded."
        ),
        "exact_scales": CliOption(
            "Store scales without loss, if the encoding has a form for that.",
            kind=bool,
            default=False,
        ),
        "base": CliOption(
            "A checkpoint that has the scales of quantized weights that SRC holds without scales.",
            "PATH",
        ),
    },
    "How it runs": {
        "max_memory": CliOption(
            "Upper bound of all buffers of a rank, 2MiB or more; default:"
            f" {MAX_MEMORY >> 20}MiB, with a device {DEVICE_MEMORY >> 20}MiB.",
            "SIZE",
            kind=str | None,
            read=parse_memory,
        ),
        "device": CliOption(
            "Device for arithmetic: cpu, cuda, cuda:1.",
            show_default=True,
            complete=choices("cpu", "cuda"),
        ),
        "threads": CliOption("Number of threads; default: one a core, at most 4.", at_least=1),
        "digest": CliOption(
            "Digests to store in the manifest: xxh3 of every tensor; sha256: of every file as well;"
            " none: `verify` can then check structure only, and a killed run begins anew.",
            "|".join(DIGESTS),
            check=one_of(*DIGESTS),
            complete=choices(*DIGESTS),
            show_default=True,
        ),
        "check_source": CliOption(
            "Which checksums of SRC are compared: stored: those of tensors that are read; full: also those of tensors"
            " that are read in part, whose rest is read for it; none: none.",
            "|".join(CHECKS),
            check=one_of(*CHECKS),
            complete=choices(*CHECKS),
            show_default=True,
        ),
        "low_disk": CliOption(
            "With hf://: keep one file of SRC at a time, beside DST, instead of all in the cache."
        ),
        "sync": CliOption(
            "Whether to wait for the disk before DST appears. With --no-sync, as with cp, DST may lack"
            " bytes after a power cut in the next half minute; `verify` finds that, but not with"
            " --digest none. A killed run still leaves all or nothing.",
            names=("--sync/--no-sync",),
            default=True,
        ),
    },
}
"""Title in the help of a command with many options -> the options below it, in order."""
TABLE: Mapping[str, CliOption] = {
    name: option for group in GROUPS.values() for name, option in group.items()
}
