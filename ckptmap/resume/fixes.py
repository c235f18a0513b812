"""Where live models need more of a library than its public interface gives; nowhere else.

Each fix names the versions that it was tested with and what it needs of them, so that `doctor` can
say whether it applies here and whether it would work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from ckptmap.encodings.nf4 import NF4
from ckptmap.errors import LoadError
from ckptmap.resume import fix_lowbit
from ckptmap.tensors import TensorInfo

if TYPE_CHECKING:
    import torch

FSDP_NEEDS = ("reset_sharded_param", "_init_extensions", "init_unsharded_param")
"""Methods of torch's FSDPParam without which a sharded parameter cannot be replaced."""


@dataclass(frozen=True)
class Fix:
    """One place that depends on versions: `check` returns what is wrong here, empty: nothing."""

    name: str
    library: str
    tested: tuple[str, str]
    """The first and the last version that the tests ran with."""
    why: str
    check: Callable[[], str]
    asks: Callable[[], str] = str
    """What the user has to do here; empty: nothing."""


@dataclass(frozen=True)
class FixState:
    """A fix on this machine, as `doctor` shows it."""

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
    """Every fix with the version found here; `problem` is empty where it works."""
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


# ------------------------------------------------------------------- replacing FSDP2 parameters


def fsdp_params(model: torch.nn.Module) -> dict[tuple[int, str], Any]:
    """torch's FSDPParam of every parameter under `fully_shard`, by (id of module, attribute)."""
    found: dict[tuple[int, str], Any] = {}
    for group in _fsdp_groups(model):
        for param in group.fsdp_params:
            info = param._module_info
            found[id(info.module), info.param_name] = param
            for shared in zip(info.shared_modules, info.shared_param_names, strict=True):
                found[id(shared[0]), shared[1]] = param
    return found


def _fsdp_groups(model: torch.nn.Module) -> list[Any]:
    import torch

    if not torch.distributed.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule

    groups: list[Any] = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            # A list since one module may have several groups; a single one before torch 2.12.
            several = getattr(state, "_fsdp_param_groups", None)
            single = getattr(state, "_fsdp_param_group", None)
            groups += several if several is not None else [single] * (single is not None)
    return groups


def offloads(fsdp_param: Any) -> bool:
    """Are its shards kept on the CPU, by CPUOffloadPolicy?"""
    return bool(getattr(fsdp_param, "offload_to_cpu", False))


def is_model_parallel(fsdp_param: Any) -> bool:
    """Was it a DTensor before `fully_shard`? It is one again while unsharded, in forward."""
    return bool(getattr(fsdp_param, "is_dtensor", False))


def reshards_apart(fsdp_param: Any) -> bool:
    """Is it resharded to a smaller mesh after forward? torch refuses all-gather extensions there."""
    after = getattr(fsdp_param, "post_forward_mesh_info", None)
    return after is not None and after is not getattr(fsdp_param, "mesh_info", None)


def adopt_replaced(fsdp_param: Any) -> None:
    """Make FSDP2 use the DTensor that has replaced the parameter on its module.

    FSDPParam keeps a flat alias of the local shard, `_sharded_param_data`, whose storage it
    compares with the new one's; a tensor subclass has no storage to compare, so the alias must go
    first. What an earlier forward allocated for the old kind of tensor goes too. All tensors are
    only referenced: nothing is copied, save that torch pads an uneven dense shard.
    """
    problem = _fsdp_problem(type(fsdp_param))
    if problem:
        raise LoadError("CKM505", problem, "use a torch version that `ckptmap doctor` names")
    info = fsdp_param._module_info
    param = getattr(info.module, info.param_name)
    local = param.to_local()
    fsdp_param.__dict__.pop("init_unsharded_param", None)
    if hasattr(local, "fsdp_pre_all_gather"):
        fsdp_param._sharded_param_data = local.view(-1)
        if local.shape == param.shape:
            fsdp_param.init_unsharded_param = partial(_unsharded_is_sharded, fsdp_param)
    fsdp_param.reset_sharded_param()
    fsdp_param._init_extensions()
    fsdp_param.all_gather_outputs = []
    if hasattr(fsdp_param, "_unsharded_param"):
        del fsdp_param._unsharded_param


def _unsharded_is_sharded(fsdp_param: Any) -> None:
    """FSDPParam.init_unsharded_param where one rank holds all of a tensor subclass.

    torch 2.13 skips the all-gather there and hands on the first of the subclass's tensors alone;
    the shard is the whole tensor, so the unsharded parameter may share its data.
    """
    from torch import nn

    fsdp_param._extensions_data.clear()
    if not hasattr(fsdp_param, "_unsharded_param"):
        local = fsdp_param._sharded_local_tensor
        fsdp_param._unsharded_param = nn.Parameter(local.detach(), requires_grad=False)


def _fsdp_problem(cls: Any) -> str:
    lost = [name for name in FSDP_NEEDS if not hasattr(cls, name)]
    if not lost:
        return ""
    return f"torch {_version('torch')}: FSDPParam has no {', '.join(lost)}"


def _check_fsdp() -> str:
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    except ImportError as error:
        return f"torch {_version('torch')}: {error}"
    return _fsdp_problem(FSDPParam)


# ------------------------------------------------------------------------- torchao's NF4Tensor


def _check_nf4() -> str:
    """Builds the smallest one there is: 64 elements."""
    import torch

    from ckptmap.encodings.nf4_live import to_torchao

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


def _check_int8() -> str:
    from ckptmap.resume import int8_live

    return int8_live.problem()


FIXES = (
    Fix(
        "replace an FSDP2 parameter",
        "torch",
        ("2.13", "2.13"),
        "a dense shard becomes an NF4Tensor; FSDPParam._sharded_param_data still aliases the old one",
        _check_fsdp,
    ),
    Fix(
        "unshard NF4 on one rank",
        "torch",
        ("2.13", "2.13"),
        "FSDP2 on a mesh of one rank hands an NF4Tensor one of its three tensors",
        _check_fsdp,
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
        _check_int8,
    ),
    Fix(
        "step low-bit optimizers under FSDP2",
        "torchao",
        ("0.16", "0.18"),
        "since 0.17 their states lose the dtype of bf16 parameters, and step() fails",
        fix_lowbit.problem,
        fix_lowbit.asks,
    ),
)
