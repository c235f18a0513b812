"""The stored tensors among which schemes find parts of weights: by key, by the end of a key, by kind.

    ending("_scale")  ->  every key whose last segment ends so, in stored order

Some twenty schemes look for their keys among 200,000: the last segments, of which there are few, are told
apart once for all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, compress, repeat

from ckptmap.core.columns import each
from ckptmap.core.tensor_columns import Extents
from ckptmap.tensors import StoredTensor, TensorInfo


class StoredParts(Mapping[str, StoredTensor]):
    """The stored tensors that no scheme has taken yet, by key, in stored order.

    `all` holds the taken ones, too. Only `take` removes tensors. Tensor i has the key `keys_of_all[i]` and the shape
    and dtype `infos[i]`: who wants no more than that need not have 200,000 tensors made.
    """

    def __init__(
        self,
        stored: Mapping[str, StoredTensor],
        infos: Sequence[TensorInfo] | None = None,
        extents: Extents | None = None,
    ) -> None:
        """`infos` and `extents`: those of the tensors, if they are known without a look at each."""
        self.all = stored
        self.keys_of_all = list(stored)
        self.infos = [tensor.info for tensor in stored.values()] if infos is None else infos
        self._extents = extents
        self._numbers = dict(zip(self.keys_of_all, range(len(self.keys_of_all)), strict=True))
        self._kinds = [*_kinds(self.infos), None]
        """The kind of each tensor; None for those that are taken, and at -1 for what is not there."""
        self._taken = bytearray(len(self.keys_of_all))
        self._count = len(self.keys_of_all)

    @classmethod
    def of(cls, stored: Mapping[str, StoredTensor]) -> StoredParts:
        """Return tensors as an object of this class, which is returned as it is."""
        return stored if isinstance(stored, cls) else cls(stored)

    def take(self, keys: Iterable[str]) -> None:
        """Remove the tensors of these keys, which are parts of weights. Raise KeyError for one that is not there."""
        numbers = list(map(self._numbers.__getitem__, keys))
        taken, kinds = self._taken, self._kinds
        for number in numbers:
            if taken[number]:
                raise KeyError(self.keys_of_all[number])
            taken[number] = 1
            kinds[number] = None
        self._count -= len(numbers)

    def kinds(self, keys: Iterable[str]) -> list[int | None]:
        """Return for each key a number that tensors of one shape and dtype share; None: there is no tensor."""
        numbers = map(self._numbers.get, keys, repeat(-1))
        return list(map(self._kinds.__getitem__, numbers))

    def info(self, key: str) -> TensorInfo | None:
        """Return shape and dtype of a tensor; None: there is none."""
        number = self._numbers.get(key)
        return None if number is None or self._taken[number] else self.infos[number]

    def places(self, keys: Sequence[str]) -> Iterator[tuple[str, int, int] | None]:
        """Yield for each key the (file, offset, bytes) of its tensor; None: it is not one extent."""
        if self._extents is None:
            for key in keys:
                extent, info = self.all[key].extent, self.info(key)
                yield (
                    None
                    if extent is None or info is None
                    else (extent.file, extent.offset, info.nbytes)
                )
            return
        numbers = list(map(self._numbers.__getitem__, keys))
        nbytes = each(list(map(self.infos.__getitem__, numbers)), lambda info: info.nbytes)
        homes, offsets = self._extents.files, self._extents.offsets
        yield from zip(
            map(homes.__getitem__, numbers), map(offsets.__getitem__, numbers), nbytes, strict=True
        )

    def infos_left(self) -> list[TensorInfo]:
        """Return shape and dtype of every tensor that is not taken."""
        return list(compress(self.infos, map((0).__eq__, self._taken)))

    def ending(self, *ends: str, dtypes: Collection[str] | None = None) -> list[str]:
        """Return the keys that end in one of `ends`, in stored order.

        dtypes  only those of tensors of these dtypes; None: of any
        """
        found = [
            numbers
            for (last, dtype), numbers in self._by_last.items()
            if (dtypes is None or dtype in dtypes)
            and any(may_end(last, end.rpartition(".")) for end in ends)
        ]
        numbers = found[0] if len(found) == 1 else sorted(chain.from_iterable(found))
        keys, taken = self.keys_of_all, self._taken
        left = [keys[number] for number in numbers if not taken[number]]
        return [key for key in left if key.endswith(ends)] if any("." in e for e in ends) else left

    @cached_property
    def lasts(self) -> Collection[str]:
        """The last segments of all keys."""
        return {last for last, _ in self._by_last}

    @cached_property
    def _by_last(self) -> dict[tuple[str, str], list[int]]:
        """The last segment of a key and a dtype -> the numbers of their keys."""
        lasts = [key[key.rfind(".") + 1 :] for key in self.keys_of_all]
        numbers: dict[tuple[str, str], list[int]] = defaultdict(list)
        both = zip(lasts, each(self.infos, lambda info: info.dtype), strict=True)
        for number, last in enumerate(both):
            numbers[last].append(number)
        return dict(numbers)

    def __getitem__(self, key: str) -> StoredTensor:
        if self._taken[self._numbers[key]]:
            raise KeyError(key)
        return self.all[key]

    def __contains__(self, key: object) -> bool:
        number = self._numbers.get(key)  # type: ignore[call-overload]
        return number is not None and not self._taken[number]

    def __iter__(self) -> Iterator[str]:
        taken = self._taken
        return (key for number, key in enumerate(self.keys_of_all) if not taken[number])

    def __len__(self) -> int:
        return self._count


def _kinds(infos: Sequence[TensorInfo]) -> list[int | None]:
    """Return for each of these a number that equal ones share."""
    numbers: dict[TensorInfo, int] = {}
    return [*each(infos, lambda info: numbers.setdefault(info, len(numbers)))]


def may_end(last: str, end: tuple[str, str, str]) -> bool:
    """Return whether a key with this last segment may end so; `end` was cut at its last dot."""
    return last == end[2] if end[1] else last.endswith(end[2])
