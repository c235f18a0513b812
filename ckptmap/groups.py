"""The logical tensors of a checkpoint by name, of which nearly all are plain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import cast

from ckptmap.encodings.dense import Dense
from ckptmap.protocols import Group
from ckptmap.tensors import StoredTensor, TensorInfo

DENSE = Dense()


class Groups(MutableMapping[str, Group]):
    """FQN -> Group, in stored order.

    A dense tensor is held as it is stored and its group made when asked for: 100,000 groups with
    their dicts of parts are 30 MB and a tenth of a second, and `inspect` asks for few of them.
    """

    __slots__ = ("_held",)

    def __init__(self, held: dict[str, Group | StoredTensor]) -> None:
        self._held = held

    def __getitem__(self, fqn: str) -> Group:
        held = self._held[fqn]
        if type(held) is Group:
            return held
        return Group(fqn, held.info, DENSE, {"": held})  # type: ignore[dict-item]

    def __setitem__(self, fqn: str, group: Group) -> None:
        self._held[fqn] = group

    def __delitem__(self, fqn: str) -> None:
        del self._held[fqn]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, fqn: object) -> bool:
        return fqn in self._held

    def held(self, fqn: str) -> Group | StoredTensor:
        """As it is held: a dense tensor itself."""
        return self._held[fqn]

    def dense(self) -> Mapping[str, StoredTensor]:
        """Those that are one plain tensor."""
        if any(type(held) is Group for held in self._held.values()):
            return {fqn: h for fqn, h in self._held.items() if not isinstance(h, Group)}
        return cast("Mapping[str, StoredTensor]", self._held)

    def renamed(self, names: dict[str, str]) -> Groups:
        """The same under `names[key]`."""
        return Groups({names[key]: held for key, held in self._held.items()})

    def infos(self) -> dict[str, TensorInfo]:
        """What they are, no group made."""
        return {fqn: held.info for fqn, held in self._held.items()}

    def encoded(self) -> dict[str, Group]:
        """Those that are more than one plain tensor."""
        return {fqn: held for fqn, held in self._held.items() if type(held) is Group}

    def encodings(self) -> tuple[str, ...]:
        """Names of their encodings, in order of first use."""
        names = (
            held.encoding.name if type(held) is Group else DENSE.name
            for held in self._held.values()
        )
        return tuple(dict.fromkeys(names))
