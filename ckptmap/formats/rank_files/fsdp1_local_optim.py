"""Lay out the files in which each rank of FSDP1 saves its optimizer state, for
`optimizer.load_state_dict` on that rank.

    use_orig_params=False   one index per flat parameter. Its state is cut and padded as the parameter is.
    use_orig_params=True    one index per parameter. Its state is the rank's slice; no entry if empty.

Indices count through all parameter groups, in the same way on every rank. `param_names` of a group
lists the names in the order of its indices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptmap.core.state_tree import nest
from ckptmap.errors import PlanError
from ckptmap.formats.pickle.writer import StorageTensor, dump
from ckptmap.formats.rank_files.fsdp1_local_flat import (
    Flat,
    FlatPiece,
    Storage,
    Traversal,
    laid_out,
    pieces_in_range,
    whole,
)
from ckptmap.protocols import OutFile, OutState, OutTensor
from ckptmap.tensors import ITEMSIZE, Path

OPTIMIZER, STATE, GROUPS = "optimizer", "state", "param_groups"
PARAMS, NAMES = "params", "param_names"


@dataclass(frozen=True)
class _Param:
    """The parameter that an index of the optimizer stands for.

    It is the flat parameter `flat` with all its `members`; if `named`, one member of `flat`; or, if
    `flat` is None, one parameter that every rank holds whole.
    """

    name: str
    members: Sequence[OutTensor]
    flat: Flat | None
    named: bool = False

    def span(self, rank: int) -> tuple[int, int] | None:
        """Return (begin, end) of the elements of `flat` for which a rank has state; (0, 0) without
        `flat`. Return None if the rank has no state, because its slice of the member is empty."""
        if self.flat is None:
            return 0, 0
        low, high = self.flat.bounds(rank)
        if not self.named:
            return low, high
        (member,) = self.members
        _, start = self.flat.members[member.path]
        low, high = max(low, start), min(high, start + member.info.numel)
        return (low, high) if low < high else None


class OptimizerFiles:
    """The files of the optimizer state in `state`, which holds it by FQN below the key "optimizer"."""

    def __init__(
        self, state: OutState, weights: Sequence[OutTensor], flats: Mapping[str, Flat]
    ) -> None:
        self._world = state.world_size
        self._flats = flats
        self._weights = {str(tensor.path[-1]): tensor for tensor in weights}
        self._traversal = Traversal(weights)
        self._states: dict[str, dict[Path, object]] = {}
        self._groups: list[dict[object, Any]] = []
        self._rest: list[tuple[Path, object]] = []
        mine = [(tensor.path, tensor) for tensor in state.tensors]
        for path, value in (*mine, *state.extra.items()):
            if path[0] == OPTIMIZER:
                self._take(path[1:], value)
        self._params = [self._of_group(group) for group in self._groups]

    def files(self) -> list[OutFile]:
        """Return one file per rank. Raise PlanError CKM504 if a part of a flat parameter has no state
        and another part has."""
        return [self._file(rank) for rank in range(self._world)]

    # ------------------------------------------------------------------ all ranks

    def _take(self, path: Path, value: Any) -> None:
        if path[0] == STATE:
            if len(path) > 2:
                fqn = self._owner(str(path[1]))
                self._states.setdefault(fqn, {})[path[2:]] = value
        elif path == (GROUPS,):
            self._groups += [dict(group) for group in value]
        elif path[0] == GROUPS:
            number = int(path[1])
            self._groups += [{} for _ in range(number + 1 - len(self._groups))]
            node = self._groups[number]
            for segment in path[2:-1]:
                node = node.setdefault(segment, {})
            node[path[-1]] = value
        else:
            self._rest.append((path, value))

    def _owner(self, fqn: str) -> str:
        """Return the FQN of the tensor that lies in the flat parameter, for one that is tied to it."""
        alias = self._weights[fqn].alias_of
        return fqn if alias is None else str(alias[-1])

    def _of_group(self, group: Mapping[object, Any]) -> list[_Param]:
        """Return the parameters of a group: flat ones in the order of `FSDP.parameters()`, and with
        use_orig_params in the order of the group itself."""
        params: dict[str, _Param] = {}
        for fqn in map(self._owner, map(str, group[PARAMS])):
            tensor = self._weights[fqn]
            flat = None if tensor.unit is None else self._flats[tensor.unit.prefix]
            if tensor.unit is None or tensor.unit.named:
                params[fqn] = _Param(fqn, (tensor,), flat, tensor.unit is not None)
            elif tensor.unit.prefix not in params:
                assert flat is not None, "a unit has a flat parameter"
                members = [member for member, _ in flat.members.values()]
                params[tensor.unit.prefix] = _Param(str(flat.path[-1]), members, flat)
        named = any(tensor.unit and tensor.unit.named for tensor in self._weights.values())
        if named:
            return list(params.values())
        return [params[name] for name in sorted(params, key=self._traversal.at)]

    # ------------------------------------------------------------------ one rank

    def _file(self, rank: int) -> OutFile:
        storages: list[Storage] = []
        leaves: list[tuple[Path, object]] = [
            (path, _written(value, storages)) for path, value in self._rest
        ]
        groups, index = [], 0
        for group, params in zip(self._groups, self._params, strict=True):
            for number, param in enumerate(params, index):
                leaves += self._entries(param, (STATE, number), rank, storages)
            indices = list(range(index, index + len(params)))
            names = [param.name for param in params]
            plain = {key: _written(value, storages) for key, value in group.items()}
            groups.append({**plain, PARAMS: indices, NAMES: names})
            index += len(params)
        if not any(path[0] == STATE for path, _ in leaves):
            leaves.append(((STATE,), {}))
        leaves.append(((GROUPS,), groups))
        name = f"optim_world_size_{self._world}_rank_{rank}.pt"
        return laid_out(name, dump(nest(leaves)), storages)

    def _entries(
        self, param: _Param, at: Path, rank: int, storages: list[Storage]
    ) -> Iterator[tuple[Path, object]]:
        """Yield (path, value) of the state of one index. Vectors are cut as their flat parameter is."""
        span = param.span(rank)
        if span is None:
            return
        states = [self._states.get(str(member.path[-1]), {}) for member in param.members]
        for name in dict.fromkeys(name for state in states for name in state):
            values = [state[name] for state in states if name in state]
            if _is_vector(values[0], param):
                vectors = [value for value in values if isinstance(value, OutTensor)]
                if len(vectors) < len(param.members):
                    raise _incomplete(param, name, states)
                yield (*at, *name), _cut(param, vectors, span, storages)
            else:
                yield (*at, *name), _written(values[0], storages)


def _is_vector(value: object, param: _Param) -> bool:
    return isinstance(value, OutTensor) and bool(value.info.shape) and param.flat is not None


def _cut(
    param: _Param, values: Sequence[OutTensor], span: tuple[int, int], storages: list[Storage]
) -> StorageTensor:
    """Return the rank's part of the vector that the values make, in a storage that is appended.

    `[n0, ...], [n1, ...] -> [shard_numel]`, padded with zeros; without padding for a named parameter
    """
    assert param.flat is not None, "only state of a flat parameter is cut"
    dtype, itemsize = values[0].info.dtype, values[0].info.itemsize
    pieces = [
        piece
        for member, value in zip(param.members, values, strict=True)
        for piece in pieces_in_range(value, param.flat.members[member.path][1], *span)
    ]
    filled = span[1] - span[0]
    numel = filled if param.named else param.flat.shard_numel
    if numel > filled:
        content = bytes((numel - filled) * itemsize)
        pieces.append(FlatPiece(filled * itemsize, len(content), content=content))
    key = str(len(storages))
    storages.append(Storage(key, numel * ITEMSIZE[dtype], pieces))
    return StorageTensor(key, dtype, numel, 0, (numel,), (1,))


def _written(value: object, storages: list[Storage]) -> object:
    """Return the value with a StorageTensor in place of each tensor in it."""
    if isinstance(value, OutTensor):
        return whole(value, storages)
    if isinstance(value, dict):
        return {key: _written(item, storages) for key, item in value.items()}
    return value


def _incomplete(param: _Param, name: Path, states: Sequence[Mapping[Path, object]]) -> PlanError:
    lost = next(m for m, state in zip(param.members, states, strict=True) if name not in state)
    return PlanError(
        "CKM504",
        f"{lost.path[-1]}: has no {'.'.join(map(str, name))}, others of its flat parameter"
        f" {param.name!r} have it",
        "choose --use-orig-params, where each parameter has state of its own, or --optimizer drop",
    )
