"""Write optimizer state as bitsandbytes' own `load_state_dict` takes it: the reverse of `lowbit_bnb`.

    exp_avg, exp_avg_sq       ->  state1, state2, and of 8 bits absmax1, qmap1, absmax2, qmap2
    exp_avg, exp_avg_slow     ->  state1 [2, shape], absmax1 [2, blocks]     AdEMAMix
    momentum_buffer, square_avg, sum, or exp_avg alone  ->  state1

All of them lie in the dict `__bnb_optimizer_quant_state__`, beside `step`. No value changes.

Source: bitsandbytes 0.50, optim/optimizer.py: `Optimizer8bit.load_state_dict`, `init_state`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from ckptmap.errors import PlanError
from ckptmap.optim.lowbit import CODES, QMAP, SCALE, LowBit
from ckptmap.optim.lowbit_bnb import FIRST, HIDDEN, ONE_STATE, SECOND, SLOW, UNNAMED
from ckptmap.optim.state import PARAMS, SCRATCH, Optimizer, ParamGroup, StateLeaf
from ckptmap.protocols import Group
from ckptmap.quantization.dense import Dense
from ckptmap.sharding.flat_range_boxes import rectangles
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Box, Chunk, Region, StoredTensor, TensorInfo

TWO_STATES = {"alpha", "t_alpha", "t_beta3"}
"""Hyper-parameters that all of its optimizers with two states have in their groups."""
_DENSE = Dense()


def is_bnb(optimizer: Optimizer) -> bool:
    """Return whether bitsandbytes' optimizers keep such state: by its encoding, else by the
    hyper-parameters, which it names as Adam's whatever the algorithm is."""
    lazy = [one for state in optimizer.tensors.values() for one in state.values()]
    if any(one.encoding == "bnb8bit" for one in lazy):
        return True
    return any(_is_group_of_bnb(group, optimizer) for group in optimizer.groups)


def _is_group_of_bnb(group: ParamGroup, optimizer: Optimizer) -> bool:
    if group.keys() >= TWO_STATES:
        return True
    states = (set(optimizer.tensors.get(fqn, ())) - SCRATCH for fqn in group[PARAMS])
    names = next(filter(None, states), set())
    one_state = len(names) == 1 and names <= {*ONE_STATE, UNNAMED}
    if names == {FIRST}:  # Lion, which has an eps of 0 here and none elsewhere
        one_state = group.get("eps") == 0
    return one_state and {"betas", "eps"} <= group.keys()


def as_bnb(optimizer: Optimizer) -> Optimizer:
    """Return the state with the tensors and names of bitsandbytes.

    Raises PlanError CKM203 for moments that its step could not go on with."""
    leaves: list[StateLeaf] = []
    by_key: dict[str, list[StateLeaf]] = {}
    for leaf in optimizer.leaves:
        by_key.setdefault(leaf.key, []).append(leaf)
    for some in by_key.values():
        leaves += _leaves(some)
    return replace(optimizer, leaves=leaves)


def _leaves(leaves: Sequence[StateLeaf]) -> Iterator[StateLeaf]:
    """Yield the state of one parameter in bitsandbytes' names."""
    moments = {
        leaf.title: leaf.value
        for leaf in leaves
        if isinstance(leaf.value, LazyTensor) and leaf.title not in ("step", *SCRATCH)
    }
    for leaf in leaves:
        if leaf.title in SCRATCH:
            yield replace(leaf, name=(HIDDEN, leaf.title))
        elif leaf.title not in moments:
            yield leaf
    for number, names in _numbered(leaves[0].key, moments):
        rows = [moments[name] for name in names]
        for part, lazy in _parts(leaves[0].key, rows).items():
            title = f"{part}{number}"
            yield StateLeaf(leaves[0].key, (HIDDEN, title), lazy.named(f"{leaves[0].key}.{title}"))


def _numbered(fqn: str, names: Mapping[str, object]) -> list[tuple[str, tuple[str, ...]]]:
    """Return the number of each state, and the moments that are its rows."""
    known: dict[frozenset[str], list[tuple[str, tuple[str, ...]]]] = {
        frozenset(): [],
        frozenset({FIRST, SLOW, SECOND}): [("1", (FIRST, SLOW)), ("2", (SECOND,))],
        frozenset({FIRST, SECOND}): [("1", (FIRST,)), ("2", (SECOND,))],
        **{frozenset({name}): [("1", (name,))] for name in (*ONE_STATE, UNNAMED)},
    }
    found = known.get(frozenset(names))
    if found is None:
        raise _refusal(fqn, f"bitsandbytes has no optimizer with {', '.join(names)}")
    return found


def _parts(key: str, rows: Sequence[LazyTensor]) -> dict[str, LazyTensor]:
    """Return `state`, and of 8 bits `absmax` and `qmap`, of the moments that are its rows."""
    for lazy in rows:
        _require_one_run(lazy)
    first = rows[0]
    if first.encoding == "dense":
        return {"state": _joined(key, rows, lambda lazy: lazy.parts[""])}
    return {
        "state": _joined(key, rows, lambda lazy: reshaped(lazy.parts[CODES], lazy.shape)),
        "absmax": _joined(key, rows, lambda lazy: lazy.parts[SCALE]),
        "qmap": _dense(key, first.parts[QMAP], first),
    }


def _require_one_run(lazy: LazyTensor) -> None:
    encoding = lazy.encoding_
    if isinstance(encoding, LowBit):
        if encoding.name != "bnb8bit":
            raise _refusal(lazy.fqn, f"is {encoding.name}, expected codes of bitsandbytes")
        if encoding.cells:
            ranks = f"was quantized in {len(encoding.cells)} parts, one on each rank"
            raise _refusal(lazy.fqn, f"{ranks}, expected blocks of the whole tensor")
    elif lazy.encoding != "dense" or lazy.dtype != "float32":
        raise _refusal(
            lazy.fqn, f"is {lazy.encoding} {lazy.dtype}, expected float32 or 8-bit codes"
        )


def _refusal(fqn: str, problem: str) -> PlanError:
    return PlanError(
        "CKM203",
        f"{fqn}: {problem}: bitsandbytes' load_state_dict could not go on with it",
        "load the checkpoint as it is into the live optimizer, which takes it in any form:"
        " ckptmap.load(path, model, optimizer); or leave the state behind with --optimizer drop",
    )


def _joined(
    key: str, rows: Sequence[LazyTensor], part: Callable[[LazyTensor], StoredTensor]
) -> LazyTensor:
    """Return the parts of several moments as the rows of one tensor; of one moment, its part itself."""
    stored = [part(lazy) for lazy in rows]
    if len(stored) == 1:
        return _dense(key, stored[0], rows[0])
    info = TensorInfo((len(stored), *stored[0].info.shape), stored[0].info.dtype)

    def chunks() -> list[Chunk]:
        return [_row(chunk, number) for number, one in enumerate(stored) for chunk in one.chunks]

    return _dense(key, StoredTensor(info, chunks), rows[0])


def _row(chunk: Chunk, number: int) -> Chunk:
    region = chunk.region
    box = Box((number, *chunk.box.offsets), (1, *chunk.box.sizes))
    wide = region._replace(sizes=(1, *region.sizes), strides=(region.nbytes, *region.strides))
    return Chunk(box, wide, chunk.crc32)


def _dense(key: str, stored: StoredTensor, like: LazyTensor) -> LazyTensor:
    return LazyTensor(key, Group(key, stored.info, _DENSE, {"": stored}), like.files)


def reshaped(flat: StoredTensor, shape: Sequence[int]) -> StoredTensor:
    """Return a tensor of one dim as one of `shape`, in row-major order."""

    def chunks() -> list[Chunk]:
        return [one for chunk in flat.chunks for one in _rectangles(chunk, shape)]

    replicas = [one for chunk in flat.replicas for one in _rectangles(chunk, shape)]
    return StoredTensor(TensorInfo(tuple(shape), flat.info.dtype), chunks, replicas)


def _rectangles(chunk: Chunk, shape: Sequence[int]) -> Iterator[Chunk]:
    (start,), (numel,) = chunk.box.offsets, chunk.box.sizes
    region = chunk.region
    for box, at in rectangles(shape, start, start + numel):
        offset = region.offset + (at - start) * region.itemsize
        part = Region.contiguous(region.file, offset, box.sizes, region.itemsize)
        yield Chunk(box, part, chunk.crc32 if box.numel == numel else None)
