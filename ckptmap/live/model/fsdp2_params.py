"""torch's FSDPParam, the object by which FSDP2 manages one parameter: queries, and a replacement.

FSDPParam is not public; `ckptmap.live.quantized.library_fixes` has the versions of torch that were
tested.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptmap.errors import LoadError
from ckptmap.live.model import module_walk

if TYPE_CHECKING:
    import torch
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

NEEDS = ("reset_sharded_param", "_init_extensions", "init_unsharded_param")
"""Methods of torch's FSDPParam without which a sharded parameter cannot be replaced."""


def fsdp_params(model: torch.nn.Module) -> dict[tuple[int, str], FSDPParam]:
    """Return torch's FSDPParam of every parameter under `fully_shard`, by (id of module, attribute)."""
    found: dict[tuple[int, str], FSDPParam] = {}
    for group in fsdp_groups(model):
        for param in group.fsdp_params:
            info = param._module_info
            found[id(info.module), info.param_name] = param
            for shared in zip(info.shared_modules, info.shared_param_names, strict=True):
                found[id(shared[0]), shared[1]] = param
    return found


def fsdp_groups(model: torch.nn.Module) -> list[FSDPParamGroup]:
    """Return torch's FSDPParamGroup of every module under `fully_shard`."""
    import torch

    if not torch.distributed.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule

    groups: list[FSDPParamGroup] = []
    for module in module_walk.modules(model):
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            # Since torch 2.12 a list: one module may have several groups. Before, a single group.
            several = getattr(state, "_fsdp_param_groups", None)
            single = getattr(state, "_fsdp_param_group", None)
            if several is not None:
                groups += several
            elif single is not None:
                groups.append(single)
    return groups


def unreduced(fsdp_param: FSDPParam | None) -> torch.Tensor | None:
    """Return the whole gradient of this rank that FSDP2 has not reduced yet; None: there is none."""
    unsharded = getattr(fsdp_param, "_unsharded_param", None)
    kept: torch.Tensor | None = getattr(fsdp_param, "unsharded_accumulated_grad", None)
    return kept if kept is not None or unsharded is None else unsharded.grad


def drop_unreduced(fsdp_param: FSDPParam) -> None:
    """Drop the gradient that FSDP2 has not reduced yet."""
    unsharded = getattr(fsdp_param, "_unsharded_param", None)
    if unsharded is not None:
        unsharded.grad = None
    if getattr(fsdp_param, "unsharded_accumulated_grad", None) is not None:
        fsdp_param.unsharded_accumulated_grad = None


def offloads(fsdp_param: FSDPParam | None) -> bool:
    """Return whether CPUOffloadPolicy keeps the shards on the CPU."""
    return bool(getattr(fsdp_param, "offload_to_cpu", False))


def is_model_parallel(fsdp_param: FSDPParam) -> bool:
    """Return whether the parameter was a DTensor before `fully_shard`, of tensor parallelism for one:
    it is that DTensor again while it is unsharded."""
    return bool(getattr(fsdp_param, "is_dtensor", False))


def reshards_apart(fsdp_param: FSDPParam) -> bool:
    """Return whether a forward reshards to a smaller mesh, where torch refuses the all-gather of a
    tensor subclass."""
    after = getattr(fsdp_param, "post_forward_mesh_info", None)
    return after is not None and after is not getattr(fsdp_param, "mesh_info", None)


def adopt_replaced(fsdp_param: FSDPParam) -> None:
    """Make FSDP2 use the DTensor that has replaced the parameter on its module.

    FSDPParam keeps a flat alias of the local shard, `_sharded_param_data`, and compares its storage
    with that of the new shard. A tensor subclass has no storage to compare, so the alias must go
    first, and with it what an earlier forward allocated for the old class. Nothing is copied,
    except that torch pads an uneven dense shard.
    """
    lacks = _problem_of(type(fsdp_param))
    if lacks:
        raise LoadError("CKM505", lacks, "use a torch version that `ckptmap doctor` names")
    info = fsdp_param._module_info
    param = getattr(info.module, info.param_name)
    local = param.to_local()
    if hasattr(local, "fsdp_pre_all_gather"):
        fsdp_param._sharded_param_data = local.view(-1)
    unshard_alone(fsdp_param)
    fsdp_param.reset_sharded_param()  # type: ignore[no-untyped-call]
    fsdp_param._init_extensions()
    fsdp_param.all_gather_outputs = []
    if hasattr(fsdp_param, "_unsharded_param"):
        del fsdp_param._unsharded_param


def unshard_alone(fsdp_param: FSDPParam) -> None:
    """Make FSDP2 unshard a tensor subclass of which this rank alone holds all, as torch 2.13 cannot: its
    forward fails in `fsdp_post_all_gather`, which gets the first of several inner tensors."""
    fsdp_param.__dict__.pop("init_unsharded_param", None)
    info = fsdp_param._module_info
    param = getattr(info.module, info.param_name)
    local = param.to_local()
    if hasattr(local, "fsdp_pre_all_gather") and local.shape == param.shape:
        own = partial(_unsharded_is_sharded, fsdp_param)
        fsdp_param.__dict__["init_unsharded_param"] = own


def _unsharded_is_sharded(fsdp_param: FSDPParam) -> None:
    """Replace FSDPParam.init_unsharded_param where one rank holds all of a tensor subclass.

    torch 2.13 skips the all-gather there, and passes on only the first of the subclass's inner
    tensors. The shard is the whole tensor, so that the unsharded parameter may share its data. With
    CPUOffloadPolicy the shard is on the CPU, and the unsharded parameter is a copy on the device,
    whose memory FSDP2 frees when it reshards.
    """
    from torch import nn

    fsdp_param._extensions_data.clear()  # type: ignore[no-untyped-call]
    local = fsdp_param._sharded_local_tensor.detach()
    is_apart = offloads(fsdp_param) and local.device != fsdp_param.device
    if hasattr(fsdp_param, "_unsharded_param"):
        if is_apart:
            _copy_again(local, fsdp_param._unsharded_inner_tensors)
        return
    if is_apart:
        local = local.to(fsdp_param.device)
        fsdp_param._unsharded_inner_tensors = list(_inner_tensors(local))
    is_trained = fsdp_param.sharded_param.requires_grad
    fsdp_param._unsharded_param = nn.Parameter(local, requires_grad=is_trained)


def _copy_again(local: torch.Tensor, inner: Sequence[torch.Tensor]) -> None:
    """Copy the shard into the unsharded parameter's inner tensors, which have no memory now."""
    from torch.autograd.grad_mode import _unsafe_preserve_version_counter

    for tensor, values in zip(inner, _inner_tensors(local), strict=True):
        tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)
        # The backward accepts the tensor that the forward saved: its values are the same again.
        with _unsafe_preserve_version_counter(tensor):
            tensor.copy_(values, non_blocking=True)


def _inner_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors that a tensor subclass wraps, at any depth."""
    import torch
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    wrapper: Any = tensor
    if not is_traceable_wrapper_subclass(wrapper):
        yield tensor
        return
    names, _ = wrapper.__tensor_flatten__()
    for name in names:
        value = getattr(wrapper, name)
        if isinstance(value, torch.Tensor):
            yield from _inner_tensors(value)


def _problem_of(cls: object) -> str:
    lost = [name for name in NEEDS if not hasattr(cls, name)]
    if not lost:
        return ""
    import torch

    return f"torch {torch.__version__}: FSDPParam has no {', '.join(lost)}"


def problem() -> str:
    """Return why the installed torch does not let a parameter be replaced; empty: it does."""
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    except ImportError as error:
        import torch

        return f"torch {torch.__version__}: {error}"
    return _problem_of(FSDPParam)
