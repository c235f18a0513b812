"""`ckptmap doctor`: show what is installed, and which encodings live models can hold."""

from __future__ import annotations

import platform
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptmap.core.printable import as_lines

from .printer import Printer
from .shared_parameters import Json

if TYPE_CHECKING:
    from ckptmap.planning.live_encodings import LiveSupport

EXAMPLES = (
    "ckptmap doctor",
    "ckptmap doctor --from out/model --to fsdp2-int8",
    "ckptmap doctor --to fsdp1",
    "ckptmap doctor --json",
)
WIDTH = 78
"""Columns of the lists of names."""
PACKAGES = (
    "torch", "torchao", "safetensors", "xxhash", "huggingface_hub", "typer", "transformers",
    "accelerate", "bitsandbytes", "peft", "compressed-tensors",
)  # fmt: skip


def command(
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="PATH|SETUP",
            help="A checkpoint or setup; its encodings are looked up.",
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="SETUP", help="Setup of the live model: fsdp2, ddp-int8."),
    ] = None,
    json: Json = False,
) -> None:
    """Show versions, devices, setups, encodings, and what works here.

    Tried are the parts of torch and torchao that live models use.

    With --from or --to: show which encodings a live model of the setup can hold with the installed
    libraries.

    The exit code is 1 where a part does not work, or the live model cannot hold the encoding.
    """
    out = Printer(json)
    if source is not None or to is not None:
        rows = holding(source, to)
        if out.json:
            out.document({"holding": rows})
        else:
            out.text(as_lines(_table(rows)))
        entry_point = (source is not None and to is not None) or len(rows) == 1
        if entry_point and not all(row["holds"] for row in rows):
            raise typer.Exit(1)
        return
    document = report()
    if out.json:
        out.document(document)
    else:
        out.text(as_lines(_lines(document)))
    if document["broken_entry_points"] or any(fix["problem"] for fix in document["fixes"]):
        raise typer.Exit(1)


def holding(source: str | None, to: str | None) -> list[dict[str, object]]:
    """Return a row for each pair of setup and encoding that the options select.

    `--to ddp-int8` asks for one; `--to fsdp1` for the encodings of `--from`, or all; `--from` alone
    for all setups. Raises what `open` and `parse` raise.
    """
    from ckptmap import registry
    from ckptmap.planning.live_encodings import rows
    from ckptmap.setups import parse

    aim = parse(to) if to is not None else None
    encodings = None if source is None else _encodings(source)
    if aim is not None and aim.scheme is not None:
        encodings = {aim.scheme.name}
    dense = {setup.name for setup in registry.setups() if setup.dense}
    return [
        _row(setup, encoding, support, setup in dense)
        for setup, encoding, support in rows()
        if (aim is None or setup == aim.setup.name) and (encodings is None or encoding in encodings)
    ]


def _row(setup: str, encoding: str, support: LiveSupport, dense: bool) -> dict[str, object]:
    how, nearest, lacks = support.how, support.nearest, _lacking(support.needs)
    if support.ok and dense:
        how, nearest = (
            "what loads it takes dense tensors only",
            (f"fsdp2-{encoding}", f"{setup}-bf16"),
        )
    elif support.ok and lacks:
        how = lacks
    return {
        "setup": setup,
        "encoding": encoding,
        "holds": support.ok and not dense and not lacks,
        "how": how,
        "nearest": list(nearest),
    }


def _encodings(source: str) -> set[str]:
    """Return the encodings of a checkpoint, or the one of a setup's name."""
    from pathlib import Path

    from ckptmap.checkpoint.open import open
    from ckptmap.errors import PlanError
    from ckptmap.setups import parse

    if not Path(source).exists() and "/" not in source:
        try:
            scheme = parse(source).scheme
        except PlanError as error:
            raise PlanError(
                error.code, f"--from {source!r} is neither a path here nor a setup", error.hint
            ) from error
        return set() if scheme is None else {scheme.name}
    with open(source) as ckpt:
        return set(ckpt.encodings)


def _lacking(needs: Sequence[tuple[str, str]]) -> str:
    """Return which library is missing or too old; an empty string where none is."""
    for library, least in needs:
        version = _version(library)
        if version is None or _numbers(version) < _numbers(least):
            return f"needs {library} {least} or later, found {version or 'none'}"
    return ""


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit()]


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    if not rows:
        return ["dense weights, or codes that no live model holds: every setup holds them, decoded"]
    installed = ", ".join(
        f"{name} {_version(name) or '-'}" for name in ("torch", "torchao", "bitsandbytes")
    )
    lines = [f"what a live model holds, with {installed}"]
    for row in rows:
        verdict = "yes" if row["holds"] else "no"
        nearest = " or ".join(f"--to {name}" for name in row["nearest"])
        lines.append(f"  {row['setup']:<16} {row['encoding']:<11} {verdict:<4} {row['how']}")
        if nearest:
            lines.append(f"  {'':<33} nearest: {nearest}")
    return lines


def report() -> dict[str, Any]:
    """Return versions, devices and fixes. torch is imported only to list devices."""
    from ckptmap import registry
    from ckptmap.registry import broken_entry_points
    from ckptmap.version import __version__

    return {
        "ckptmap": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "executable": sys.executable,
        "packages": {name: _version(name) for name in PACKAGES},
        "devices": _devices(),
        "setups": [setup.name for setup in registry.setups()],
        "encodings": [scheme.suffix for scheme in registry.schemes() if scheme.suffix],
        "fixes": _fixes(),
        "broken_entry_points": [asdict(broken) for broken in broken_entry_points()],
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> list[str]:
    """Return the devices: `["cpu", "cuda:0 NVIDIA H200 (139.8 GB)"]`; empty where torch is not installed."""
    try:
        import torch
    except ImportError:
        return []
    from ckptmap.core.formatting import human

    devices = ["cpu"]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        about = torch.cuda.get_device_properties(index)
        devices.append(f"cuda:{index} {about.name} ({human(about.total_memory)})")
    return devices


def _fixes() -> list[dict[str, object]]:
    """Return the state of each place that depends on the versions of torch and torchao."""
    from ckptmap.live.quantized.library_fixes import states

    return [
        {
            "name": state.name,
            "library": state.library,
            "version": state.version,
            "tested": list(state.tested),
            "within_tested": state.within_tested,
            "why": state.why,
            "problem": state.problem,
            "asks": state.asks,
        }
        for state in states()
    ]


def _verdict(fix: dict[str, Any]) -> str:
    if fix["problem"]:
        return f"FAILS: {fix['problem']}"
    if fix["asks"]:
        return f"needs a repair: {fix['asks']}"
    low, high = fix["tested"]
    span = low if low == high else f"{low} to {high}"
    return "works" if fix["within_tested"] else f"works, though tested with {span} only"


def _wrapped(words: Sequence[str]) -> list[str]:
    indent = "  "
    return textwrap.wrap(
        " ".join(words),
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )


def _lines(facts: dict[str, Any]) -> list[str]:
    return [
        f"ckptmap {facts['ckptmap']}, Python {facts['python']}, {facts['platform']}",
        f"  {facts['executable']}",
        "packages",
        *(f"  {name:<18} {version or '-'}" for name, version in facts["packages"].items()),
        "devices",
        *(f"  {device}" for device in facts["devices"] or ["none: torch is not installed"]),
        "setups: what --to takes, alone or with one of the encodings after a hyphen: hf-bf16",
        *_wrapped(facts["setups"]),
        "encodings",
        *_wrapped(facts["encodings"]),
        "what live models need",
        *(
            f"  {fix['name']} ({fix['library']} {fix['version']}): {_verdict(fix)}"
            for fix in facts["fixes"]
        ),
        *(["entry points that are skipped"] if facts["broken_entry_points"] else []),
        *(
            f"  {entry_point['distribution']}: {entry_point['name']} = {entry_point['value']} in {entry_point['group']}: {entry_point['why']}"
            for entry_point in facts["broken_entry_points"]
        ),
    ]
