"""The stored tensors among which schemes find parts of weights: by key, by the end of a key, by kind.

    ending("_scale")  ->  every key whose last segment ends so, in stored order

Some twenty schemes look for their keys among 200,000: the last segments, of which there are few, are told
apart once for all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from itertools import chain

from ckptmap.core.columns import distinct
from ckptmap.tensors import StoredTensor, TensorInfo


class StoredParts(dict[str, StoredTensor]):
    """The stored tensors that no scheme has taken yet, by key, in stored order.

    `all` holds the taken ones, too. Only `take` removes tensors.
    """

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        super().__init__(stored)
        self.all = stored

    @classmethod
    def of(cls, stored: Mapping[str, StoredTensor]) -> StoredParts:
        """Return tensors as an object of this class, which is returned as it is."""
        return stored if isinstance(stored, cls) else cls(stored)

    def take(self, keys: Iterable[str]) -> None:
        """Remove the tensors of these keys, which are parts of a weight."""
        kinds = self.kinds
        for key in keys:
            del self[key]
            del kinds[key]

    def ending(self, *ends: str, dtypes: Collection[str] | None = None) -> list[str]:
        """Return the keys that end in one of `ends`, in stored order.

        dtypes  only those of tensors of these dtypes; None: of any
        """
        found = [
            numbers
            for (last, dtype), numbers in self._numbers.items()
            if (dtypes is None or dtype in dtypes)
            and any(may_end(last, end.rpartition(".")) for end in ends)
        ]
        numbers = found[0] if len(found) == 1 else sorted(chain.from_iterable(found))
        keys = list(map(self._keys.__getitem__, numbers))
        if len(self) < len(self._keys):
            keys = [key for key in keys if key in self]
        return [key for key in keys if key.endswith(ends)] if any("." in e for e in ends) else keys

    @cached_property
    def lasts(self) -> Collection[str]:
        """The last segments of all keys."""
        return {last for last, _ in self._numbers}

    @cached_property
    def kinds(self) -> dict[str, int]:
        """Key -> a number that tensors of one shape and dtype share."""
        infos = [tensor.info for tensor in self.values()]
        numbers: dict[TensorInfo, int] = {}
        number_of = {
            key: numbers.setdefault(info, len(numbers)) for key, info in distinct(infos).items()
        }
        return dict(zip(self, map(number_of.__getitem__, map(id, infos)), strict=True))

    @cached_property
    def _keys(self) -> list[str]:
        return list(self.all)

    @cached_property
    def _numbers(self) -> dict[tuple[str, str], list[int]]:
        """The last segment of a key and a dtype -> the numbers of their keys."""
        numbers: dict[tuple[str, str], list[int]] = {}
        for number, (key, tensor) in enumerate(self.all.items()):
            last = key[key.rfind(".") + 1 :], tensor.info.dtype
            if last in numbers:
                numbers[last].append(number)
            else:
                numbers[last] = [number]
        return numbers


def may_end(last: str, end: tuple[str, str, str]) -> bool:
    """Return whether a key with this last segment may end so; `end` was cut at its last dot."""
    return last == end[2] if end[1] else last.endswith(end[2])
