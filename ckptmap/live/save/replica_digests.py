"""Digests by which ranks compare what they hold of the same tensor, without moving it off its device.

Values on the CPU have the xxh3 digest of their bytes. Values on a device have a checksum that the device
computes; those of all tensors are copied to the host at once. For 32-bit words x[i] of the row-major
bytes, the last padded with zeros, in chunks of N = 2^20 words:

    checksum = sum over c of  m(N + c) * sum over j of  m(j) * x[c * N + j]      modulo 2^64
    m(k)     = h(k + 1) | 1,  h(k) = (y ^ (y >> 32)) * 0xBF58476D1CE4E5B9,  y = k * 0x9E3779B97F4A7C15

All operations are on int64 with wrap-around, x and >> are signed, so that every device gives the same
number. All weights are odd: a difference in a single word is always seen. Differences in several words,
which sum up to 0 with these weights, are missed, as a drift does with a probability of about 2^-64. It is
no protection from somebody who searches such a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from ckptmap.execution.smaller_feeds import give_back
from ckptmap.live.model.tensor_reader import as_bytes
from ckptmap.live.optimizer.local_state import LocalCodes, LocalShard
from ckptmap.live.save.staged_values import begun_copy

if TYPE_CHECKING:
    import torch

Digest = tuple[str, ...]
"""One digest a tensor, each with its kind before it: `xxh3 0123456789abcdef`, `sum64 -1234`."""
Piece = LocalShard | LocalCodes

CHUNK_NUMEL = 1 << 20
"""Words a chunk: 8 MiB of products on the device."""
_SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = 0xBF58476D1CE4E5B9 - (1 << 64)


def digests_of(held: Sequence[Iterable[Piece]]) -> list[Digest]:
    """Return the digest of each of these collections of shards; waits once for each device."""
    tensors = [[one for piece in pieces for one in tensors_of(piece)] for pieces in held]
    flat = [one for some in tensors for one in some]
    known = checksums([one for one in flat if one.device.type != "cpu"])
    return [tuple(known.get(id(one)) or _xxh3(one) for one in some) for some in tensors]


def checksums(tensors: Sequence[torch.Tensor]) -> dict[int, str]:
    """Return the digest of each tensor by its id, `sum64 -1234`, which its device computes; waits once for each
    device."""
    return begun_checksums(tensors)()


def begun_checksums(tensors: Sequence[torch.Tensor]) -> Callable[[], dict[int, str]]:
    """Begin to compute what `checksums` returns; return what waits for it, in any thread. The tensors may change
    meanwhile."""
    sums = _Checksums()
    for values in tensors:
        sums.add(values)
    return sums.begun()


def differ(one: Digest, other: Digest) -> bool:
    """Return whether digests show a difference. Those of different kinds, of a rank whose values are on
    the CPU and one whose are not, show none."""
    if not one or not other:
        return False
    pairs = zip(one, other, strict=False)
    return len(one) != len(other) or any(a != b and a[:5] == b[:5] for a, b in pairs)


def tensors_of(piece: Piece) -> list[torch.Tensor]:
    """Return the values of a shard, or the codes and scales of a quantized one."""
    return list(piece.codes.parts.values()) if isinstance(piece, LocalCodes) else [piece.values]


def _xxh3(values: torch.Tensor) -> str:
    import xxhash

    return f"xxh3 {xxhash.xxh3_64_hexdigest(as_bytes(values))}"


class _Checksums:
    """Checksums that are computed on their devices."""

    def __init__(self) -> None:
        self._weights: dict[torch.device, torch.Tensor] = {}
        self._sums: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}

    def add(self, values: torch.Tensor) -> None:
        """Start the checksum of a tensor, by whose id it is known.

        The CPU computes it, the same number, where the device has no memory left for it.
        """
        import torch

        try:
            self._add(values, id(values))
            return
        except torch.OutOfMemoryError:
            pass  # what the attempt took is freed when this block ends
        give_back(str(values.device))
        self._add(values.cpu(), id(values))

    def _add(self, values: torch.Tensor, tensor: int) -> None:
        where = values.device
        if where not in self._weights:
            self._weights[where] = weights(0, CHUNK_NUMEL, where)
        total = checksum(values, self._weights[where])
        self._sums.setdefault(where, []).append((tensor, total))

    def begun(self) -> Callable[[], dict[int, str]]:
        """Begin to copy the sums to the host, at once for each device; return what waits for them, and returns the
        digests by the id of their tensor."""
        import torch

        coming = [
            ([tensor for tensor, _ in sums], begun_copy(torch.stack([total for _, total in sums])))
            for sums in self._sums.values()
        ]

        def arrived() -> dict[int, str]:
            return {
                tensor: f"sum64 {total}"
                for tensors, copy in coming
                for tensor, total in zip(tensors, copy().tolist(), strict=True)
            }

        return arrived


def weights(start: int, count: int, device: torch.device) -> torch.Tensor:
    """Return the weights m(start) .. m(start + count - 1), int64 [count]."""
    import torch

    spread = torch.arange(start + 1, start + 1 + count, device=device).mul_(_SPREAD)
    return spread.bitwise_xor_(spread >> 32).mul_(_MIX).bitwise_or_(1)


def checksum(values: torch.Tensor, weights_of_chunk: torch.Tensor) -> torch.Tensor:
    """Return the checksum of a tensor as int64 [] on its device, without waiting for the device.

    `weights_of_chunk` are the first `CHUNK_NUMEL` weights.
    """
    import torch

    words = _words(values)
    sums = []
    for start in range(0, words.numel(), CHUNK_NUMEL):
        part = words.narrow(0, start, min(CHUNK_NUMEL, words.numel() - start))
        sums.append((part * weights_of_chunk.narrow(0, 0, part.numel())).sum())
    if not sums:
        return torch.zeros((), dtype=torch.int64, device=values.device)
    return (torch.stack(sums) * weights(CHUNK_NUMEL, len(sums), values.device)).sum()


def _words(values: torch.Tensor) -> torch.Tensor:
    """Return the row-major bytes as int32, the last word padded with zeros."""
    import torch

    plain = values.detach().resolve_conj().resolve_neg().contiguous()
    # The stride of a dim of size 1 may be any number, and then the dtype cannot be changed.
    data = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
    if data.numel() % 4:
        data = torch.nn.functional.pad(data, (0, -data.numel() % 4))
    elif data.storage_offset() % 4:
        data = data.clone()
    return data.view(torch.int32)
