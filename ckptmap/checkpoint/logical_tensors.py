"""The weights of a checkpoint by FQN: nearly all are one plain tensor, some are payload and scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

from ckptmap.core.tensor_columns import PlainTensors
from ckptmap.protocols import Group
from ckptmap.quantization.dense import Dense
from ckptmap.tensors import StoredTensor, TensorInfo

DENSE = Dense()


class LogicalTensors(Mapping[str, Group]):
    """FQN -> Group, in stored order.

    A dense tensor is held as it is stored, in columns if all tensors are dense, and its Group is
    made when someone asks for it: 100,000 groups with their dicts of parts are 30 MB and a tenth of
    a second, and `inspect` asks for few of them.
    """

    __slots__ = ("_held", "run")

    def __init__(self, held: dict[str, Group | StoredTensor] | PlainTensors) -> None:
        self.run = held if isinstance(held, PlainTensors) else None
        """The columns of all tensors; None: each is held by itself."""
        self._held = {} if isinstance(held, PlainTensors) else held

    def __getitem__(self, fqn: str) -> Group:
        held = self.held(fqn)
        if type(held) is Group:
            return held
        return Group(fqn, held.info, DENSE, {"": held})  # type: ignore[dict-item]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held if self.run is None else self.run.names)

    def __len__(self) -> int:
        return len(self._held if self.run is None else self.run)

    def __contains__(self, fqn: object) -> bool:
        return fqn in self._held if self.run is None else (fqn,) in self.run

    def held(self, fqn: str) -> Group | StoredTensor:
        """Return a dense tensor itself, any other as its Group."""
        return self._held[fqn] if self.run is None else self.run.held(fqn)

    def dense(self) -> Mapping[str, StoredTensor]:
        """Return the tensors that are one plain tensor each, as stored."""
        if self.run is not None:
            return {name: self.run.held(name) for name in self.run.names}
        held = self._held
        if any(type(one) is Group for one in held.values()):
            return {fqn: h for fqn, h in held.items() if not isinstance(h, Group)}
        return cast("Mapping[str, StoredTensor]", held)

    def renamed(self, names: dict[str, str]) -> LogicalTensors:
        """Return the same tensors under `names[key]`."""
        if self.run is not None:
            return LogicalTensors(self.run.renamed(names))
        return LogicalTensors({names[key]: held for key, held in self._held.items()})

    def with_groups(self, groups: Mapping[str, Group]) -> LogicalTensors:
        """Return all tensors, those of `groups` in place of the ones with their names or at the end."""
        return LogicalTensors({**{fqn: self.held(fqn) for fqn in self}, **groups})

    def infos(self) -> dict[str, TensorInfo]:
        """Return shape and dtype of every weight; no group is made for that."""
        if self.run is not None:
            return dict(zip(self.run.names, self.run.infos, strict=True))
        return {fqn: held.info for fqn, held in self._held.items()}

    def sharing(self) -> list[tuple[str, ...]]:
        """Return sets of names that the file itself says are one tensor."""
        if self.run is not None:
            return []
        found: dict[object, list[str]] = {}
        for fqn, held in self._held.items():
            stored = next(iter(held.parts.values()), None) if type(held) is Group else held
            if stored is None:  # read through others, as a tensor that was decoded to be fused
                continue
            share = stored.share  # type: ignore[union-attr]
            if share is not None and stored.info.numel:
                found.setdefault(share, []).append(fqn)
        return [tuple(names) for names in found.values() if len(names) > 1]

    def encoded(self) -> dict[str, Group]:
        """Return the weights that are more than one plain tensor."""
        return {fqn: held for fqn, held in self._held.items() if type(held) is Group}

    def encodings(self) -> tuple[str, ...]:
        """Return the names of their encodings, in order of first use."""
        if self.run is not None:
            return (DENSE.name,) if self.run else ()
        names = (
            held.encoding.name if type(held) is Group else DENSE.name
            for held in self._held.values()
        )
        return tuple(dict.fromkeys(names))
