"""Places where live models depend on the internals of a library.

Each fix names the versions that it was tested with and what it needs of them, so that `doctor` can
say whether it applies here and whether it would work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from ckptmap.errors import LoadError
from ckptmap.live.model import fsdp2_params
from ckptmap.live.quantized import int8_sharded, torchao_lowbit_fix
from ckptmap.quantization.nf4.scheme import NF4
from ckptmap.tensors import TensorInfo


@dataclass(frozen=True)
class Fix:
    """One dependency on internals; `check` returns what is wrong with the installed version, or ""."""

    name: str
    library: str
    tested: tuple[str, str]
    """The first and the last version that the tests ran with."""
    why: str
    check: Callable[[], str]
    asks: Callable[[], str] = str
    """Return what the user has to do with the installed version; empty: nothing."""


@dataclass(frozen=True)
class FixState:
    """The state of a fix on this machine, as `ckptmap doctor` shows it."""

    name: str
    library: str
    version: str
    tested: tuple[str, str]
    why: str
    problem: str
    asks: str = ""

    @property
    def within_tested(self) -> bool:
        low, high = map(_minor, self.tested)
        return bool(self.version) and low <= _minor(self.version) <= high


def states() -> list[FixState]:
    """Return every fix with the installed version; `problem` is empty where it works."""
    found = []
    for fix in FIXES:
        version = _version(fix.library)
        problem = fix.check() if version else f"{fix.library} is not installed"
        asks = fix.asks() if version else ""
        found.append(FixState(fix.name, fix.library, version, fix.tested, fix.why, problem, asks))
    return found


def _version(library: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(library)
    except PackageNotFoundError:
        return ""


def _minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _check_nf4() -> str:
    """Build the smallest NF4Tensor, of 64 elements, and return what went wrong; empty: nothing."""
    import torch

    from ckptmap.live.quantized.nf4_torchao import to_torchao

    info, encoding = TensorInfo((1, 64), "float32"), NF4(64, 1)
    parts = {
        name: torch.zeros(part.shape, dtype=getattr(torch, part.dtype))
        for name, part in cast(Mapping[str, TensorInfo], encoding.parts(info)).items()
    }
    try:
        to_torchao(parts, info, encoding)
    except (LoadError, AttributeError, TypeError) as error:
        return f"torchao {_version('torchao')}: {error}"
    return ""


FIXES = (
    Fix(
        "replace an FSDP2 parameter",
        "torch",
        ("2.13", "2.13"),
        "a dense shard becomes an NF4Tensor; FSDPParam._sharded_param_data still aliases the old one",
        fsdp2_params.problem,
    ),
    Fix(
        "unshard a tensor subclass on one rank",
        "torch",
        ("2.13", "2.13"),
        "FSDP2 on a mesh of one rank hands NF4 and int8 training weights one of their tensors",
        fsdp2_params.problem,
    ),
    Fix(
        "build an NF4Tensor",
        "torchao",
        ("0.18", "0.18"),
        "its constructor is not documented, and torchao 0.18 moved the class without an alias",
        _check_nf4,
    ),
    Fix(
        "shard an Int8Tensor",
        "torchao",
        ("0.18", "0.18"),
        "FSDP2 cannot cut it (aten.split is missing): a shard is of a subclass that gathers itself",
        int8_sharded.problem,
    ),
    Fix(
        "step low-bit optimizers under FSDP2",
        "torchao",
        ("0.16", "0.18"),
        "since 0.17 their states lose the dtype of bf16 parameters, and step() fails",
        torchao_lowbit_fix.problem,
        torchao_lowbit_fix.asks,
    ),
)
