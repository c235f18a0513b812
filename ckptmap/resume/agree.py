"""Errors that all ranks of a model raise together: none is left waiting in a later collective."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ckptmap.errors import CkptmapError, LoadError
from ckptmap.resume.fsdp1 import is_fsdp1
from ckptmap.resume.target import Target, is_dtensor

if TYPE_CHECKING:
    import torch


def peer_groups(model: torch.nn.Module, targets: Sequence[Target]) -> list[Any]:
    """The process groups over which the model is spread: those of its meshes, and DDP's."""
    import torch

    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    groups: dict[int, Any] = {}
    for target in targets:
        tensor: Any = target.tensor
        if is_dtensor(tensor) and tensor.device_mesh.get_coordinate() is not None:
            for group in tensor.device_mesh.get_all_groups():
                groups.setdefault(id(group), group)
    for module in model.modules():
        wrapped = isinstance(module, torch.nn.parallel.DistributedDataParallel) or is_fsdp1(module)
        if wrapped:
            group = module.process_group
            groups.setdefault(id(group), group)
    return [group for group in groups.values() if group.size() > 1]


def explain(error: Exception, text: str, fqn: str = "") -> None:
    """Say more of an error while it is on its way, and which tensor it is about."""
    if isinstance(error, CkptmapError):
        about = f"{fqn}: " * bool(fqn and fqn not in error.message)
        error.message = f"{about}{error.message}; {text}"
    else:
        error.add_note(text)


@contextmanager
def agreed(peers: Sequence[Any]) -> Iterator[None]:
    """Raise on every rank what any rank raised within: its own error there, a LoadError that names
    that rank elsewhere."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    found = _first_error(error, peers)
    if error is not None:
        raise error
    if found is not None:
        rank, code, message, hint = found
        raise LoadError(code, f"[rank {rank}] {message}", hint)


def _first_error(error: Exception | None, peers: Sequence[Any]) -> tuple[int, str, str, str] | None:
    import torch

    found = None
    if error is not None and peers:
        rank = torch.distributed.get_rank()
        text = (
            error.message
            if isinstance(error, CkptmapError)
            else "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        )
        found = (rank, getattr(error, "code", "CKM505"), text, getattr(error, "hint", ""))
    for group in peers:
        answers: list[Any] = [None] * group.size()
        torch.distributed.all_gather_object(answers, found, group=group)
        found = next((answer for answer in answers if answer is not None), None)
    return found
