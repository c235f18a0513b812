"""What a user may have meant by a command line that the parser refuses."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from ckptmap.core.printable import quote

SHOWN = 120
"""Characters that an error shows of a usage message."""
WORDS = {
    "--dtype": "the dtype belongs to the setup: --to hf-bf16",
    "--torch-dtype": "the dtype belongs to the setup: --to hf-bf16",
    "--precision": "the dtype belongs to the setup: --to hf-bf16",
    "--bf16": "the dtype belongs to the setup: --to hf-bf16",
    "--fp16": "the dtype belongs to the setup: --to hf-fp16",
    "--quantization": "the encoding belongs to the setup: --to hf-nf4",
    "--format": "the kind of output is --to SETUP: --to hf",
    "--setup": "the kind of output is --to SETUP: --to hf",
    "--from": "the kind of SRC is found out from its files; leave --from out",
    "--src": "SRC and DST are typed without an option: ckptmap convert SRC DST --to hf",
    "--source": "SRC and DST are typed without an option: ckptmap convert SRC DST --to hf",
    "--input": "SRC and DST are typed without an option: ckptmap convert SRC DST --to hf",
    "--dst": "SRC and DST are typed without an option: ckptmap convert SRC DST --to hf",
    "--output": "SRC and DST are typed without an option: ckptmap convert SRC DST --to hf",
    "--output-dir": "SRC and DST are typed without an option: ckptmap convert SRC DST --to hf",
    "--out": "SRC and DST are typed without an option: ckptmap convert SRC DST --to hf",
    "--force": "an output is replaced with --overwrite",
    "--yes": "an output is replaced with --overwrite",
    "--config": "the config.json to copy is --config-from PATH",
    "--tokenizer": "a tokenizer is copied with its config.json: --config-from DIRECTORY",
    "--ranks": "the number of ranks is --world-size N",
    "--nproc": "the number of ranks is --world-size N",
    "--num-ranks": "the number of ranks is --world-size N",
    "--num-gpus": "the number of ranks is --world-size N",
    "--no-optimizer": "the optimizer state is left out with --optimizer drop",
    "--drop-optimizer": "the optimizer state is left out with --optimizer drop",
    "--remove-prefix": "a prefix is taken off with --strip-prefix P",
    "--prefix": "a prefix is taken off with --strip-prefix P, or put on with --add-prefix P",
    "--keys": "some of the tensors are chosen with --include PATTERN and --exclude PATTERN",
    "--filter": "some of the tensors are chosen with --include PATTERN and --exclude PATTERN",
    "--shard-size": "the largest size of a file is --max-shard-size 5GB",
    "--verbose": "without --quiet it shows its progress; CKPTMAP_DEBUG=1 shows the traceback of an error",
}
"""Options that other tools have -> what stands for them here."""
EXTRA = {
    "plan": "plan writes no output and takes no DST; patterns need quotes: '*.mlp.*'",
    "inspect": "inspect takes one path; two checkpoints are compared with ckptmap diff A B",
    "verify": "verify takes one path, and its source with --against SRC",
    "report": "report takes one path; -o FILE names the file, --against B another checkpoint",
}
"""What a command takes that was given more arguments -> the hint."""
COMMANDS_MEANT = {
    "info": "inspect", "show": "inspect", "list": "ls", "compare": "diff", "check": "verify", "download": "pull",
    "upload": "push", "export": "convert", "quantize": "convert", "reshard": "convert", "consolidate": "convert",
    "help": "--help", "version": "--version",
}  # fmt: skip
"""Commands that other tools have -> what stands for them here."""
IN_PYTHON = {
    "load": "a model in memory is loaded in Python: ckptmap.load(PATH, model)",
    "save": "a model in memory is saved in Python: ckptmap.save(PATH, model)",
    "open": "did you mean: ckptmap inspect? In Python: ckptmap.open(PATH)",
    "translate": "a state dict in memory is translated in Python: ckptmap.translate(state_dict, like=model)",
}
"""Calls of the library that are no commands -> what to do."""
NO_OPTION = re.compile(r"No such option:? '?(-[-\w]+)'?")
NO_COMMAND = re.compile(r"No such command '([-\w]+)'")
GUESS = re.compile(r" \((?:Possible options|Did you mean)[^)]*\)| Did you mean .*")


def usage_message(text: str) -> str:
    """Return the parser's message as one line; of an option that other tools have without its guesses."""
    message = " ".join(text.split()).removeprefix("Invalid value: ")
    command = NO_COMMAND.match(message)
    if _word(message) or (command is not None and command[1] in {*COMMANDS_MEANT, *IN_PYTHON}):
        message = GUESS.sub("", message)
    if "unexpected extra argument" in message and len(message) > SHOWN:
        message = f"{message[:SHOWN]}...)"
    return message


def usage_hint(message: str, args: Sequence[str]) -> str:
    """Return the next step: what was meant, if it is known, and the help of the command."""
    from .typer_app import COMMANDS

    help = f"ckptmap {args[0]} --help" if args and args[0] in COMMANDS else "ckptmap --help"
    meant = WORDS.get(_word(message), "")
    if message.startswith("No such command") and args and args[0] in COMMANDS_MEANT:
        meant = f"did you mean: ckptmap {COMMANDS_MEANT[args[0]]}"
    if message.startswith("No such command") and args and args[0] in IN_PYTHON:
        meant = IN_PYTHON[args[0]]
    if "unexpected extra argument" in message:  # most often the shell has expanded a pattern
        meant = EXTRA.get(args[0], "patterns need quotes: '*.mlp.*'")
    single = next((arg for arg in args if _is_long_with_one_dash(arg)), None)
    if single is not None and NO_OPTION.search(message):
        meant = f"long options have two dashes: -{single}"
    path = next((arg for arg in args[1:] if arg[0:1] == "-" and os.path.lexists(arg)), None)
    if path is not None and NO_OPTION.search(message):
        meant = f"a path that begins with a dash is typed as {quote(f'./{path}')}"
    return f"{meant}; {help}" if meant else help


def _word(message: str) -> str:
    """Return the unknown option that a message names, if other tools have it; "": it is none of them."""
    found = NO_OPTION.search(message)
    name = found[1].replace("_", "-") if found else ""
    return name if name in WORDS else ""


def _is_long_with_one_dash(arg: str) -> bool:
    return re.fullmatch(r"-[a-z][a-z-]+", arg) is not None
