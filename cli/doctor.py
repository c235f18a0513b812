"""`ckptmap doctor`: what is installed here, and what that means for live models."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from typing import Any

import typer

from . import options as ask
from .output import Output

EXAMPLES = (
    "ckptmap doctor",
    "ckptmap doctor --json",
)
PACKAGES = (
    "torch", "torchao", "safetensors", "xxhash", "huggingface_hub", "typer", "transformers",
    "accelerate", "bitsandbytes", "peft",
)  # fmt: skip


def command(json: ask.Json = False) -> None:
    """Show versions, devices, and whether what live models need of torch and torchao works here.

    Exit code 1 where it does not.
    """
    found = report()
    out = Output(json)
    if out.json:
        out.document(found)
    else:
        out.text("\n".join(_lines(found)))
    if any(fix["problem"] for fix in found["fixes"]):
        raise typer.Exit(1)


def report() -> dict[str, Any]:
    """Versions from package records; torch is imported only to ask it for devices."""
    from ckptmap.version import __version__

    return {
        "ckptmap": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "executable": sys.executable,
        "packages": {name: _version(name) for name in PACKAGES},
        "devices": _devices(),
        "fixes": _fixes(),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> list[str]:
    """`["cpu", "cuda:0 NVIDIA H200 (139.8 GB)"]`; empty where torch is not there."""
    try:
        import torch
    except ImportError:
        return []
    from ckptmap.plans import human

    found = ["cpu"]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        about = torch.cuda.get_device_properties(index)
        found.append(f"cuda:{index} {about.name} ({human(about.total_memory)})")
    return found


def _fixes() -> list[dict[str, Any]]:
    """Places that depend on versions of torch and torchao: does each work here?"""
    from ckptmap.resume.fixes import states

    return [
        {
            "name": state.name,
            "library": state.library,
            "version": state.version,
            "tested": list(state.tested),
            "within_tested": state.within_tested,
            "why": state.why,
            "problem": state.problem,
        }
        for state in states()
    ]


def _verdict(fix: dict[str, Any]) -> str:
    if fix["problem"]:
        return f"FAILS: {fix['problem']}"
    low, high = fix["tested"]
    span = low if low == high else f"{low} to {high}"
    return "works" if fix["within_tested"] else f"works, though tested with {span} only"


def _lines(found: dict[str, Any]) -> list[str]:
    return [
        f"ckptmap {found['ckptmap']}, Python {found['python']}, {found['platform']}",
        f"  {found['executable']}",
        "packages",
        *(f"  {name:<16} {version or '-'}" for name, version in found["packages"].items()),
        "devices",
        *(f"  {device}" for device in found["devices"] or ["none: torch is not installed"]),
        "what live models need",
        *(
            f"  {fix['name']} ({fix['library']} {fix['version']}): {_verdict(fix)}"
            for fix in found["fixes"]
        ),
    ]
