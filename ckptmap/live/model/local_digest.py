"""A digest of the bytes that this rank holds of one tensor of a live model.

A dense tensor has the bytes of its shard in row-major order, a quantized one those of the plain tensors that a
checkpoint keeps of it. It is of memory, so that no write to it goes unseen, `tensor.data` included. What is on a
device has the checksum of `replica_digests`, which the device computes: to bring a frozen base of 16 GB to the host
takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from ckptmap.errors import LoadError
from ckptmap.live.model.live_form import form_of, stored_form
from ckptmap.live.model.live_tensor import LiveTensor
from ckptmap.live.model.tensor_reader import as_bytes
from ckptmap.live.save.replica_digests import checksums

if TYPE_CHECKING:
    import torch

BLOCK_NUMEL = 1 << 22
"""Elements that are brought to the host at a time."""


class LocalDigest(NamedTuple):
    """The digest of all parts of a tensor, and that of its codes alone, which are kept where a library
    rounds the scales (`LiveForm.has_rounded_scales`)."""

    whole: str
    codes: str


def local_digest(target: LiveTensor) -> LocalDigest | None:
    """Return the digest of this rank's part; None: the tensor is on meta, or of a form that cannot say
    which bytes it holds. Waits once for the device of the tensor. Digests of a device and of the CPU differ."""
    import xxhash

    if target.local.is_meta:
        return None
    try:
        parts = list(_parts(target))
    except LoadError:  # CKM505: it cannot be stored
        return None
    sums = checksums([tensor for _, tensor in parts if _is_summed(tensor)])
    whole, codes = xxhash.xxh3_128(), ""
    for name, tensor in parts:
        seen = sums.get(id(tensor)) or _digest(tensor)
        whole.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {seen}\n".encode())
        codes = codes or seen
    return LocalDigest(whole.hexdigest(), codes)


def _is_summed(tensor: torch.Tensor) -> bool:
    """Return whether the device of a tensor computes its checksum: not where a subclass may change operations."""
    import torch

    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return is_plain and tensor.device.type not in ("cpu", "meta")


def _digest(tensor: torch.Tensor) -> str:
    import xxhash

    seen = xxhash.xxh3_128()
    for block in blocks_of(tensor):
        seen.update(block)
    return seen.hexdigest()


def is_same(target: LiveTensor, now: LocalDigest, before: LocalDigest) -> bool:
    """Return whether two digests of a tensor are of the same values: of the same codes, where a forward
    has rounded the scales, as it will again."""
    form = form_of(target)
    rounded = form is not None and form.has_rounded_scales(target)
    return now.codes == before.codes if rounded else now == before


def _parts(target: LiveTensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that hold the values, by name; codes first."""
    form = form_of(target)
    kept = None if form is None else stored_form(target, "")
    if kept is not None:
        yield from ((part.key, part.values) for part in kept.parts)
    else:
        yield "", target.local


def blocks_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in row-major order."""
    if not tensor.is_contiguous():
        yield as_bytes(tensor)
        return
    flat = tensor.detach().view(-1)
    for start in range(0, flat.numel(), BLOCK_NUMEL):
        yield as_bytes(flat[start : start + BLOCK_NUMEL])
