"""Buffers that are not in a state dict (`persistent=False`): a checkpoint has a digest of their values alone.

    cos, sin of rotary embedding, masks     made by the constructor, the same in every run
    a counter, a running mean               moved by training: a resumed run begins with the constructor's
    a torch.Generator of a module           likewise; it is no buffer, and its state is compared as one

So a run goes on bit for bit only if the live values are those that the saved run had. A buffer of another shape is
taken for a cache that grows with what it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from ckptmap.core.formatting import some
from ckptmap.live.model import fsdp1_buffers, module_walk, several_models
from ckptmap.live.model.local_digest import blocks_of
from ckptmap.live.model.values_in_memory import odd_layout
from ckptmap.live.save.replica_digests import begun_checksums

if TYPE_CHECKING:
    import torch

SUM = "sum64 "
"""What the checksum that a device computes begins with; the digest of bytes is of hexadecimal digits."""
KEY = "unsaved_buffers"
"""Setting that has their forms and digests by name, of every rank."""


Described: TypeAlias = dict[str, list[str]]
"""FQN -> [shape and dtype, digest]."""


def described(
    model: torch.nn.Module, saved: Mapping[str, Sequence[str]] | None = None
) -> Described:
    """Return the form and the digest of the buffers of this rank that are not saved. saved: what was returned before,
    so that digests are of the same kind."""
    begun = begun_description(model, saved)
    return {} if begun is None else begun()


def begun_description(
    model: torch.nn.Module, saved: Mapping[str, Sequence[str]] | None = None
) -> Callable[[], Described] | None:
    """Begin to compute what `described` returns; return what waits for the devices, in any thread; None: there are no
    such buffers. Training may change them meanwhile."""
    import torch

    found: dict[str, torch.Tensor] = {}
    for path, module in module_walk.named_modules(model):
        for name, value in vars(module).items():
            if isinstance(value, torch.Generator) and not _is_default(value):
                found[f"{path}.{name}" if path else name] = value.get_state()
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers.get(name)
            if type(buffer) is torch.Tensor and not (buffer.is_meta or odd_layout(buffer)):
                found[f"{path}.{name}" if path else name] = buffer
    if not found:
        return None
    plain = several_models.plain_names(model, found)
    dtypes = fsdp1_buffers.forward_dtypes(model)
    forward = {plain[key]: _in_forward(one, dtypes.get(id(one))) for key, one in found.items()}
    return begun_forms_and_digests(forward, saved or {})


def _is_default(generator: torch.Generator) -> bool:
    """Return whether this is torch's random stream, which is restored."""
    import torch

    device = torch.accelerator.current_accelerator()
    module = None if device is None else torch.get_device_module(device)
    known = [torch.default_generator, *getattr(module, "default_generators", ())]
    return any(generator is one for one in known)


def _in_forward(buffer: torch.Tensor, dtype: str | None) -> torch.Tensor:
    """Return a buffer in the dtype in which FSDP1 computes with it."""
    import torch

    values = buffer.detach()
    return values if dtype is None else values.to(getattr(torch, dtype))


def begun_forms_and_digests(
    values: Mapping[str, torch.Tensor], saved: Mapping[str, Sequence[str]]
) -> Callable[[], Described]:
    """Begin to digest tensors: of one on a device by a checksum that it computes, so that the host waits once for each
    device; of one on the CPU by its bytes, at once. saved: as for `described`."""
    kinds = {name: digest[:6] for name, (_, digest) in saved.items()}
    summed = {
        name: one
        for name, one in values.items()
        if (kinds[name] == SUM if name in kinds else one.device.type != "cpu")
    }
    arrived = begun_checksums([*summed.values()])
    keys = {name: id(one) for name, one in summed.items()}
    known = {
        name: (f"{tuple(one.shape)} {one.dtype}", "" if name in keys else _digest(one))
        for name, one in values.items()
    }

    def all_known() -> Described:
        sums = arrived()
        return {name: [form, digest or sums[keys[name]]] for name, (form, digest) in known.items()}

    return all_known


def settled(settings: Mapping[str, object]) -> Mapping[str, object]:
    """Return the settings of a rank with what `begun_description` has begun; waits for the devices."""
    begun = settings.get(KEY)
    return {**settings, KEY: begun()} if callable(begun) else settings


def _digest(values: torch.Tensor) -> str:
    import xxhash

    digest = xxhash.xxh3_128()
    for block in blocks_of(values):
        digest.update(block)
    return digest.hexdigest()


def of_all_ranks(by_rank: Sequence[object]) -> dict[str, object]:
    """Return the setting of all ranks: None in place of what equals rank 0's, False of no buffers; empty where no
    rank has any, as torch reads no empty dicts."""
    if not any(by_rank):
        return {}
    first = by_rank[0]
    return {
        KEY: [None if rank and one == first else one or False for rank, one in enumerate(by_rank)]
    }


def of_rank(by_rank: object, rank: int) -> Mapping[str, Sequence[str]]:
    """Return what the rank of this number has recorded; empty: nothing."""
    if not isinstance(by_rank, list | tuple) or rank >= len(by_rank):
        return {}
    found = by_rank[0] if by_rank[rank] is None else by_rank[rank]
    if not isinstance(found, Mapping):
        return {}
    return {
        name: pair
        for name, pair in found.items()
        if isinstance(pair, list | tuple) and len(pair) == 2
    }


def changed(saved: Mapping[str, Sequence[str]], live: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield the buffers whose values were others when the run was saved."""
    names = [
        name
        for name, (form, digest) in saved.items()
        if name in live and live[name][0] == form and live[name][1] != digest
    ]
    if names:
        what = "buffer or generator is" if len(names) == 1 else "buffers or generators are"
        yield (
            f"{len(names)} {what} not in the state dict of the model, and not as when it was saved: {some(names)}"
            " (register buffers with persistent=True, and save a generator by get_extra_state, or set them before"
            " load)"
        )
