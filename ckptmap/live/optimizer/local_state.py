"""The tensors of a live model and its optimizer that this rank holds, by their stored names.

    model      layers.0.weight, Shard(0) of 2    -> ("model", "layers.0.weight"), rows 0..64
    optimizer  state[p]["exp_avg"] of 8 bits     -> cells of codes, with their scales
               state[p]["step"]                  -> ("optimizer", "state", FQN, "step")

Nothing is copied: a LocalShard is a view of the live tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

from ckptmap.core.strided_dims import flat_span
from ckptmap.errors import LoadError
from ckptmap.live.model.flat_params import FlatParamTensor
from ckptmap.live.model.live_form import stored_form
from ckptmap.live.model.live_tensor import LiveTensor, cut, is_dtensor
from ckptmap.live.model.plain_values import has_plain_classes, simplified
from ckptmap.live.model.tensor_reader import window
from ckptmap.live.model.tuples import holds_tensor
from ckptmap.live.model.values_in_memory import require_memory, without_values
from ckptmap.live.optimizer.family import Codes, Moment, OptimizerParam, codes_of, local_of
from ckptmap.live.optimizer.unwrap import parts_of
from ckptmap.optim import lowbit_codes
from ckptmap.optim.lowbit import LOGICAL, LowBit
from ckptmap.tensors import Box, Path, TensorInfo

if TYPE_CHECKING:
    import torch

STATE: Path = ("optimizer", "state")


@dataclass(frozen=True, eq=False)
class LocalShard:
    """A box of a stored tensor, and a view of the live values."""

    box: Box
    values: torch.Tensor


@dataclass(frozen=True, eq=False)
class LocalCodes:
    """A box of a moment, and its quantized values."""

    box: Box
    codes: Codes


@dataclass(frozen=True, eq=False)
class LocalTensor:
    """A stored tensor, and the boxes of it that this rank holds.

    primary    does this rank save its boxes, of all ranks that hold them? None: each rank holds the
               whole tensor, and the ranks agree on the one that saves it
    checked    must all ranks that hold the tensor hold the same values?
    is_buffer  a buffer of the model: ranks may differ, one is saved, and a note says so
    is_own     ranks may differ, one is saved here, and all beside it (see `own_values`)
    """

    path: Path
    info: TensorInfo
    pieces: Sequence[LocalShard | LocalCodes]
    primary: bool | None
    checked: bool = False
    is_buffer: bool = False
    is_own: bool = False


@dataclass(frozen=True)
class HeldGroup:
    """A parameter group of this rank, as values that nobody changes: tensors are copies on the CPU.

    optimizer  the class, after the name where it is one of several by name
    part, at   number of the optimizer of several, and of the group in it
    values     hyper-parameters by name
    params     FQNs
    """

    optimizer: str
    part: int
    at: int
    values: Mapping[str, object]
    params: Sequence[str]


@dataclass
class LocalState:
    """Everything that this rank holds."""

    holdings: list[LocalTensor] = field(default_factory=list)
    records: dict[str, Mapping[str, object]] = field(default_factory=dict)
    values: dict[Path, object] = field(default_factory=dict)
    """Plain values; those of the lowest rank that has them are stored."""
    decoded: list[str] = field(default_factory=list)
    """Moments that are stored decoded, since a block of their codes may span two parameters."""
    settings: dict[str, object] = field(default_factory=dict)
    """Settings of this rank that an exact continuation depends on."""
    notes: list[str] = field(default_factory=list)
    """What is not saved, for the caller."""
    simplified: list[str] = field(default_factory=list)
    """Plain values of optimizer state that are stored as values of a simpler class."""
    placements: dict[str, dict[str, object]] = field(default_factory=dict)
    """How optimizer state is placed (see `state_placement`)."""
    own: dict[Path, torch.Tensor] = field(default_factory=dict)
    """Copies of what each rank may have of its own in optimizer state, by FQN and name."""
    groups: list[HeldGroup] = field(default_factory=list)
    """The parameter groups, which become one list with those of other ranks."""


def info_of(shape: Sequence[int], values: torch.Tensor) -> TensorInfo:
    return TensorInfo(tuple(shape), _name_of(values.dtype))


@lru_cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ------------------------------------------------------------------------------- the model


def hold_model(state: LocalState, targets: Sequence[LiveTensor]) -> None:
    """Add the boxes of every tensor of the model. Raises LoadError CKM505 for one on meta."""
    for target in targets:
        if target.local.is_meta and not target.is_flat:
            raise LoadError(
                "CKM505", f"model: {target.fqn} is on meta and has no values", "load it first"
            )
        require_memory("CKM505", f"model: {target.fqn}", target.local)
        for fqn in target.names:
            hold_tensor(state, target, ("model", fqn))


def hold_tensor(state: LocalState, target: LiveTensor, path: Path) -> None:
    """Add the boxes of one tensor; of a quantized weight, those of its codes and scales."""
    stored = stored_form(target, str(path[-1]))
    if stored is None:
        state.holdings.append(_dense(target, path, target.local))
        return
    for part in stored.parts:
        primary = None if part.everywhere else _primary(target)
        piece = LocalShard(part.box, part.values)
        state.holdings.append(
            LocalTensor((*path[:-1], part.key), part.info, [piece], primary, True)
        )
    if stored.record is not None:
        state.records[".".join(map(str, path))] = stored.record


def _dense(target: LiveTensor, path: Path, local: torch.Tensor) -> LocalTensor:
    """Return the boxes of a dense tensor."""
    info = info_of(target.tensor.shape, local)
    pieces = [LocalShard(box, view) for box, view in target.windows(local)]
    if not target.is_cut and not pieces:
        pieces = [LocalShard(Box.whole(info.shape), local)]  # an empty tensor is a tensor
    buffer = target.is_buffer
    return LocalTensor(path, info, pieces, _primary(target), not buffer, buffer)


def _primary(target: LiveTensor) -> bool | None:
    return target.is_primary if target.is_cut else None


# ------------------------------------------------------------------------------- the optimizer


class ParamMember(NamedTuple):
    """A tensor of the model, and its offset in the flat parameter that holds it (None: no flat one)."""

    target: LiveTensor
    offset: int | None


@dataclass(frozen=True, eq=False)
class ParamOwner:
    """A parameter of the optimizer, and the tensors of the model in it: one, or those of a flat parameter."""

    part: OptimizerParam
    members: Sequence[ParamMember]

    def windows(
        self, local: torch.Tensor
    ) -> Iterator[tuple[LiveTensor, list[tuple[Box, torch.Tensor]]]]:
        """Yield each tensor with the (box, view) pairs of `local`, which is this rank's shard of the
        parameter or of a moment of it."""
        for target, offset in self.members:
            part = local
            if offset is not None and isinstance(target, FlatParamTensor):
                part = local.reshape(-1).narrow(0, offset, target.count)
            yield target, target.windows(part)

    @cached_property
    def is_flat(self) -> bool:
        return any(target.is_flat for target, _ in self.members)

    @property
    def is_cut(self) -> bool:
        return any(target.is_cut for target, _ in self.members)

    @property
    def fqn(self) -> str:
        return self.members[0].target.fqn


def owners(optimizer: object, targets: Sequence[LiveTensor]) -> list[ParamOwner]:
    """Return every parameter of the optimizer, in its order, with the model's tensors. Raises LoadError CKM508 for
    a parameter that is not the model's."""
    by_id: dict[int, list[ParamMember]] = {}
    for target in targets:
        if isinstance(target, FlatParamTensor):
            if target.param is not None:
                for module, name in target.places:
                    named_param = getattr(module, name, None)
                    by_id.setdefault(id(named_param), [ParamMember(target, 0)])
                by_id.setdefault(id(target.param), [ParamMember(target, 0)])
            of_flat = by_id.setdefault(id(target.handle.flat_param), [])
            of_flat.append(ParamMember(target, target.at))
        else:
            by_id[id(target.tensor)] = [ParamMember(target, None)]
    found = []
    for number, param in enumerate(parts_of(optimizer)):
        members = by_id.get(id(param.model))
        if members is None:
            raise LoadError(
                "CKM508",
                f"optimizer: parameter {number} {tuple(param.model.shape)} is not the model's",
                "build the optimizer after wrapping the model, from model.parameters()",
            )
        found.append(ParamOwner(param, members))
    _refuse_shared(found)
    return found


def _refuse_shared(param_owners: Sequence[ParamOwner]) -> None:
    """Raise LoadError CKM508 for a parameter that two optimizers step: each has a state of it."""
    first: dict[str, object] = {}
    for owner in param_owners:
        if first.setdefault(owner.fqn, owner.part.optimizer) is not owner.part.optimizer:
            raise LoadError(
                "CKM508",
                f"optimizer: {owner.fqn} is stepped by two optimizers, expected one",
                "save or load one of the two, and the other's state_dict() as extra=",
            )


def hold_optimizer(state: LocalState, param_owners: Sequence[ParamOwner]) -> None:
    """Add the state of every parameter, entry by entry."""
    for owner in param_owners:
        if owner.is_flat and not owner.part.param.numel():
            continue  # other ranks hold all of it: this rank counts no step
        for name, value in owner.part.family.entries(owner.part.state).items():
            _hold_entry(state, owner, name, value)


def _hold_entry(state: LocalState, owner: ParamOwner, name: str, value: object) -> None:
    """Add one entry of a parameter's state, under the FQN of every tensor in it. One that is tied has the
    state of its first name, as it has one place in the groups."""
    import torch

    codes = codes_of(value)
    if is_decoded(value, owner):
        if codes is not None:
            value = decoded(codes).view(codes.shape)
        elif isinstance(value, torch.Tensor):
            value = value.float()
        codes = None
        state.decoded.append(f"{owner.fqn}.{name}")
    if codes is not None:
        _hold_codes(state, owner, name, codes)
    elif not isinstance(value, torch.Tensor):
        _refuse_nested(owner, name, value)
        if not has_plain_classes(value):
            state.simplified.append(f"{owner.fqn}.{name}")
        state.values |= {path: simplified(value) for path in _paths(owner, name)}
    else:
        _hold_values(state, owner, name, value)


def _hold_values(state: LocalState, owner: ParamOwner, name: str, value: torch.Tensor) -> None:
    """Add an entry that is a tensor, and is not quantized."""
    local = local_of(value)
    what = f"optimizer: {name} of {owner.fqn}"
    _require_values(what, local)
    require_memory("CKM508", what, local)
    if not _is_like_param(owner, value):
        if is_own := owner.is_cut and owner.part.may_be_of_shard(name, value):
            copy = value.detach().to("cpu", copy=True)
            state.own |= {(target.fqn, name): copy for target, _ in owner.members}
        state.holdings += [_own_shape_entry(value, path, is_own) for path in _paths(owner, name)]
        return
    for target, views in owner.windows(local):
        pieces = [LocalShard(box, view) for box, view in views]
        info = info_of(target.tensor.shape, value)
        path = (*STATE, target.fqn, name)
        state.holdings.append(LocalTensor(path, info, pieces, _primary(target), True))


def _require_values(what: str, local: torch.Tensor) -> None:
    """Raise LoadError CKM508 for an entry that has no plain values on this rank."""
    if odd := without_values(local):
        raise LoadError(
            "CKM508",
            f"{what} is a tensor {odd}, expected dense values",
            "save without the optimizer, and save its own state_dict() with torch.save",
        )


def _refuse_nested(owner: ParamOwner, name: str, value: object) -> None:
    """Raise LoadError CKM508 for a list or dict of tensors, whose shapes do not tell what they belong to."""
    if holds_tensor(value):
        kind = type(owner.part.optimizer).__name__
        raise LoadError(
            "CKM508",
            f"optimizer: {kind} keeps {name} of {owner.fqn} as a {type(value).__name__} of"
            " tensors, expected a tensor or a plain value",
            "save without the optimizer, and save its own state_dict() with torch.save",
        )


def is_decoded(value: object, owner: ParamOwner) -> TypeGuard[Moment]:
    """Return whether an entry is stored decoded, in float32: one of a flat parameter that is quantized,
    whose blocks may span parameters, or one in 16 bits, which another rank may have quantized."""
    import torch

    if not owner.is_flat:
        return False
    narrow = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return codes_of(value) is not None or (owner.part.family.mixed and narrow)


def _paths(owner: ParamOwner, name: str) -> list[Path]:
    return [(*STATE, target.fqn, name) for target, _ in owner.members]


def _is_like_param(owner: ParamOwner, value: torch.Tensor) -> bool:
    """Return whether the entry has one element for each element of the parameter, cut as that is."""
    if owner.is_flat:
        counts = {int(local_of(one).numel()) for one in (value, owner.part.param)}
        return bool(value.dim()) and len(counts) == 1
    return is_cut_alike(value, owner.part.model)


def is_cut_alike(value: torch.Tensor, param: torch.Tensor) -> bool:
    """Return whether two tensors have one shape, and ranks hold the same elements of both: a plain
    tensor of the shape of a DTensor is whole on every rank."""
    if value.shape != param.shape:
        return False
    if not is_dtensor(value) or not is_dtensor(param):
        return is_dtensor(value) == is_dtensor(param)
    return bool(value.device_mesh == param.device_mesh and value.placements == param.placements)


def _own_shape_entry(value: torch.Tensor, path: Path, is_own: bool) -> LocalTensor:
    """Return the boxes of an entry with a shape and mesh of its own: a step, a row of a matrix."""
    local = local_of(value)
    info = info_of(value.shape, local)
    if not is_dtensor(value):
        piece = LocalShard(Box.whole(info.shape), local)
        return LocalTensor(path, info, [piece], None, not is_own, is_own=is_own)
    mesh = value.device_mesh
    place = mesh.get_coordinate()
    assert place is not None, "a rank that holds the entry is part of its mesh"
    boxes = cut(value.shape, mesh.shape, place, value.placements, str(path[-1]))
    primary = not any(at for at, p in zip(place, value.placements, strict=True) if p.is_replicate())
    pieces = [LocalShard(box, window(local, at)) for box, at in boxes]
    return LocalTensor(path, info, pieces, primary, True)


def _hold_codes(state: LocalState, owner: ParamOwner, name: str, codes: Codes) -> None:
    ((target, _),) = owner.members
    info = TensorInfo(tuple(target.tensor.shape), LOGICAL)
    boxes = target.own_boxes
    if len(boxes) != 1:
        raise LoadError(
            "CKM508",
            f"optimizer: {target.fqn}.{name} is quantized and has {len(boxes)} boxes on one rank",
            "save it with an optimizer in float32, or on a mesh of Shard placements",
        )
    piece = local_codes(boxes[0][0], codes, info.shape)
    state.holdings += [
        LocalTensor(path, info, [piece], _primary(target), True) for path in _paths(owner, name)
    ]


def local_codes(box: Box, codes: Codes, shape: Sequence[int]) -> LocalCodes:
    """Return the codes of this rank's box, without those of blocks that begin on other ranks."""
    return LocalCodes(box, codes if codes.start is None else codes.begun_in(flat_span(shape, box)))


def decoded(codes: Codes) -> torch.Tensor:
    """Return the decoded values, float32 and flat."""
    if codes.segments is not None:
        scales = codes.segments.of_each(codes.scale)
        return lowbit_codes.decode_each(codes.codes, codes.qmap, scales)
    return LowBit(codes.scheme, codes.block_size, codes.signed).values(codes.parts)
