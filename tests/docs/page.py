"""Run a page of the documentation as its reader would: in order, in one folder.

```console                        a line after `$ ` is run; the lines below it are what it prints,
                                  in which `...` stands for any text; without such lines the
                                  command must succeed
```python                         is run; all such blocks of a page share their names
```{code-block} toml              with a `:caption:` is a file of that name
```text                           is not run
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptmap_cli.main import main

from tests.support.paths import ROOT

_FENCE = re.compile(r"^```(\S[^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CAPTION = re.compile(r":caption: (\S+)\n\n?")
_CHECKER = doctest.OutputChecker()
_LIKE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
TIMEOUT_S = 300
# One thread a rank, ranks on loopback.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONPATH": str(ROOT / "examples"),
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, the file that it is, if any, and its text."""

    language: str
    file: str
    text: str
    line: int


@dataclass(frozen=True)
class Command:
    """A command line of a console block, and what the page says it prints."""

    line: str
    expected: str


def blocks(text: str) -> Iterator[Block]:
    """Yield the fenced blocks of a Markdown page that are run or written."""
    for match in _FENCE.finditer(text):
        head, body = match[1].strip(), match[2]
        caption = _CAPTION.match(body)
        line = text.count("\n", 0, match.start()) + 1
        if head.startswith("{code-block}") and caption:
            yield Block("file", caption[1], body[caption.end() :], line)
        elif head in ("console", "python"):
            yield Block(head, "", body, line)
        elif head != "text":
            raise ValueError(f"line {line}: a block of {head!r}, which nothing runs")


def commands(text: str) -> Iterator[Command]:
    """Yield the commands of a console block; a line that ends with a backslash is continued."""
    joined = text.replace("\\\n", "")
    for part in re.split(r"^\$ ", joined, flags=re.MULTILINE)[1:]:
        line, _, expected = part.partition("\n")
        yield Command(line, expected)


class Runner:
    """Runs the blocks of one page in the current directory."""

    def __init__(self) -> None:
        self._names: dict[str, object] = {"__name__": "page"}

    def run(self, block: Block) -> None:
        """Run a block. Raises AssertionError where a command prints something else."""
        if block.language == "file":
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file).write_text(block.text)
        elif block.language == "python":
            exec(compile(block.text, f"line {block.line}", "exec"), self._names)
        else:
            for command in commands(block.text):
                code, printed = output(command.line)
                said = f"line {block.line}: $ {command.line}\nexit code {code}, printed:\n{printed}"
                if not command.expected:
                    assert code == 0, said
                else:
                    assert _CHECKER.check_output(command.expected, printed, _LIKE), said


def output(line: str) -> tuple[int, str]:
    """Return the exit code of a command, and what it prints."""
    name, *args = shlex.split(line)
    if name == "ckptmap":
        return output_of_ckptmap(line)
    program = {
        "python": [sys.executable],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
    }.get(name, [name])
    done = subprocess.run(
        [*program, *args], env={**os.environ, **_ENVIRONMENT}, capture_output=True, text=True,
        timeout=TIMEOUT_S,
    )  # fmt: skip
    return done.returncode, done.stdout + (done.stderr if done.returncode else "")


def output_of_ckptmap(line: str) -> tuple[int, str]:
    """The same for a command line of ckptmap, which needs no process of its own."""
    name, *args = shlex.split(line)
    assert name == "ckptmap", line
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        code = main(args)
    return code, stream.getvalue()
