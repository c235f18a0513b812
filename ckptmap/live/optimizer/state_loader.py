"""Load the optimizer state of one parameter, entry by entry.

checkpoint exp_avg (any encoding, any sharding)  ->  exp_avg in the live optimizer's class
    codes     scheme and block boundaries agree: codes and scales are copied
    values    dense, in the dtype that the optimizer steps with
    recoded   decoded, and quantized by the optimizer's own library; the error is measured
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING

from ckptmap.live.model.live_tensor import cut, is_dtensor, local_boxes
from ckptmap.live.model.load_report import CastTensor, Recoded
from ckptmap.live.model.tensor_reader import TensorReader, window
from ckptmap.live.optimizer import state_placement
from ckptmap.live.optimizer.as_saved import AsSaved
from ckptmap.live.optimizer.code_blocks import (
    copy_codes,
    encode,
    encode_cut,
    relative_error,
    takes_codes,
    values_of_span,
)
from ckptmap.live.optimizer.family import STEP, Codes, Moment, codes_of, local_of
from ckptmap.live.optimizer.flat_lowbit import FlatCodes, fill_entry
from ckptmap.live.optimizer.local_state import ParamOwner, decoded, is_cut_alike
from ckptmap.live.optimizer.stored_state import Source, derivation, most_stepped, step_like, step_of
from ckptmap.optim.lowbit import LowBit
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Box

if TYPE_CHECKING:
    import torch


@dataclass
class StateNotes:
    """Names of the entries that were loaded, by how, for the report."""

    loaded: list[str] = field(default_factory=list)
    copied: list[str] = field(default_factory=list)
    cast: list[CastTensor] = field(default_factory=list)
    recoded: list[Recoded] = field(default_factory=list)
    derived: list[str] = field(default_factory=list)
    initialised: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def extend(self, more: StateNotes) -> None:
        """Add the names of other notes to the end of these."""
        for item in fields(self):
            getattr(self, item.name).extend(getattr(more, item.name))


@dataclass(frozen=True)
class Policy:
    """How moments may be stored.

    precision  "keep", "target" or "fp32"
    schemes    low-bit schemes that occur in the checkpoint
    """

    precision: str
    schemes: frozenset[str]


class StateLoader:
    """Fills the state of one parameter; `sources` has the state of each of its tensors, in order.

    total  the notes of the whole load, to which those of this parameter are added
    """

    def __init__(
        self, owner: ParamOwner, sources: Sequence[Source], policy: Policy, total: StateNotes,
        betas: Sequence[float] = (), exact: Mapping[str, FlatCodes] | None = None,
        placements: Mapping[str, object] | None = None,
    ) -> None:  # fmt: skip
        self.owner = owner
        self.sources = sources
        self.policy = policy
        self.total = total
        self.notes = StateNotes()
        self.betas = betas
        self.exact = exact or {}
        self.placements = placements or {}
        self.lead = most_stepped(sources)

    @property
    def param_nbytes(self) -> int:
        """The bytes of the parameter on this rank, to which its state is in proportion."""
        return sum(target.local.nbytes for target, _ in self.owner.members)

    def __call__(self, reader: TensorReader) -> None:
        """Fill the parameter's state."""
        self.read(reader)()

    def read(self, reader: TensorReader) -> Callable[[], None]:
        """Read the parameter's state; return what puts it into the optimizer. May be called again after an
        error, and by several threads for different parameters."""
        part = self.owner.part
        self.notes = StateNotes()
        blank = part.family.present(part) or part.family.blank(part, self.lead)
        values = {name: self._entry(name, live, reader) for name, live in blank.items()}
        return partial(self._install, values)

    def _install(self, values: Mapping[str, object]) -> None:
        part = self.owner.part
        if values:
            part.family.install(part, values)
            for (target, _), source in zip(self.owner.members, self.sources, strict=True):
                used = {derivation(name, source, self.betas)[0] for name in values}
                self.notes.left += [f"{target.fqn}.{name}" for name in source if name not in used]
        self.total.extend(self.notes)

    def _entry(self, name: str, live: object, reader: TensorReader) -> object:
        import torch

        if name == STEP and not isinstance(self.owner.part.family, AsSaved):
            return step_like(live, step_of(self.lead) or 0)
        if not isinstance(live, torch.Tensor | Codes):
            return live
        live = self._placed(name, live)
        if isinstance(live, torch.Tensor) and not self._is_cut_as_param(live):
            return self._load_own_shape(name, live, reader)
        if name in self.exact:
            saved_moment = self._load_exact_codes(name, live, reader)
            if saved_moment is not None:
                return saved_moment
        live = self._choose_form(name, live)
        with torch.no_grad():
            codes = codes_of(live)
            if codes is not None:
                if not self._copy(name, codes, reader):
                    self._recode(name, live, codes, reader)
            elif isinstance(live, torch.Tensor):
                self._load_plain(name, live, reader)
        return live

    def _placed(self, name: str, live: Moment) -> Moment:
        """Return the entry as it was placed when it was saved."""
        lazy = self._lazy(name, self.lead)
        if lazy is None:
            return live
        return state_placement.placed(
            live, self.placements.get(name), self.owner.part.param, lazy.shape
        )

    def _is_cut_as_param(self, live: torch.Tensor) -> bool:
        part = self.owner.part
        if self.owner.is_flat:
            return tuple(live.shape) == tuple(part.model.shape)
        return is_cut_alike(live, part.model)

    def _load_exact_codes(self, name: str, live: Moment, reader: TensorReader) -> Moment | None:
        """Return the live entry with the codes that this flat shard had; None: the optimizer's form is
        another."""
        import torch

        with torch.no_grad():
            moment = fill_entry(self.exact[name], live, self.owner.part, reader)
        if moment is not None:
            titles = [f"{target.fqn}.{name}" for target, _ in self.owner.members]
            self.notes.loaded += titles
            self.notes.copied += titles if codes_of(moment) is not None else ()
        return moment

    # ------------------------------------------------------------------ which form

    def _choose_form(self, name: str, live: Moment) -> Moment:
        """Return the live entry in the form that `precision` asks for: the optimizer's own, or another
        that it can step with."""
        import torch

        part = self.owner.part
        family, codes = part.family, codes_of(live)
        if not family.mixed or self.policy.precision == "target":
            return live
        if self.policy.precision == "fp32":
            local = local_of(live)
            if codes is None and isinstance(local, torch.Tensor) and local.dtype == torch.float32:
                return live
            return family.plain(part, torch.float32)
        stored = self._stored_form(name)
        if codes is None:
            if isinstance(stored, str):  # quantized in the checkpoint, and not by this optimizer
                quantized = family.coded(part, stored, name != "exp_avg_sq" and "max" not in name)
                if quantized is None or not self._takes(name, _codes(quantized)):
                    return family.plain(part, torch.float32)
                return quantized
            return live if stored is None else family.plain(part, stored)
        if codes.scheme in self.policy.schemes and isinstance(stored, torch.dtype):
            return family.plain(part, stored)  # it was too small to be quantized
        if codes.scheme in self.policy.schemes and not self._takes(name, codes):
            return family.plain(part, torch.float32)  # its blocks are not this rank's
        return live

    def _stored_form(self, name: str) -> torch.dtype | str | None:
        """Return the form of this rank's boxes as stored: a scheme, a dtype or "mixed"; None: none."""
        import torch

        forms: set[torch.dtype | str] = set()
        for (target, _), source in zip(self.owner.members, self.sources, strict=True):
            lazy = self._lazy(name, source)
            if lazy is None:
                continue
            encoding = lazy.encoding_
            if not isinstance(encoding, LowBit):
                forms.add(lazy.torch_dtype)
                continue
            cells = encoding.cells
            for box, _ in target.windows(target.local):
                touched = [c for c in cells if c.box.intersect(box)]
                plain: torch.dtype = getattr(torch, encoding.plain)
                kinds = {encoding.name if c.quantized else plain for c in touched}
                forms |= kinds if cells else {encoding.name}
        if len(forms) > 1:
            return "mixed"
        return next(iter(forms), None)

    def _lazy(self, name: str, source: Source) -> LazyTensor | None:
        origin, _ = derivation(name, source, self.betas)
        value = source.get(origin)
        return value if isinstance(value, LazyTensor) else None

    # ------------------------------------------------------------------ filling

    def _load_plain(self, name: str, live: torch.Tensor, reader: TensorReader) -> None:
        local = local_of(live)
        for (target, boxes), source in zip(self.owner.windows(local), self.sources, strict=True):
            lazy, title = self._lazy(name, source), f"{target.fqn}.{name}"
            if lazy is None:
                self.notes.initialised.append(f"{title}: the checkpoint has none")
                if not source:  # the flat parameter may have been stepped before
                    _zero(view for _, view in boxes)
                continue
            _, factor = derivation(name, source, self.betas)
            for box, view in boxes:
                (reader.dense if lazy.encoding == "dense" else reader.decoded)(lazy, box, view)
                if factor is not None:
                    view.mul_(factor)
            if boxes:
                self._note(title, lazy, str(local.dtype).removeprefix("torch."), factor)
            else:  # this rank has none of its values, and so none that were cast
                self.notes.loaded.append(title)

    def _note(self, title: str, lazy: LazyTensor, dtype: str, factor: float | None) -> None:
        notes = self.notes
        notes.loaded.append(title)
        if factor is not None:
            notes.derived.append(title)
        stored = lazy.dtype
        if isinstance(lazy.encoding_, LowBit) and not isinstance(
            self._stored_form(title.rpartition(".")[2]), str
        ):
            stored = lazy.encoding_.plain  # this rank's boxes are not quantized
        elif lazy.encoding != "dense":
            error = None if dtype == "float32" else 2.0**-9
            notes.recoded.append(Recoded(title, lazy.encoding, dtype, error or 0.0))
            return
        if stored != dtype:
            notes.cast.append(CastTensor(title, stored, dtype))

    def _copy(self, name: str, codes: Codes, reader: TensorReader) -> bool:
        """Copy codes and scales where scheme, table and block boundaries agree; return whether."""
        (target, _), source = self.owner.members[0], self.sources[0]
        lazy = self._lazy(name, source)
        if lazy is None or not self._takes(name, codes):
            return False
        if not copy_codes(reader, lazy, codes, local_boxes(target)):
            return False
        self.notes.loaded.append(f"{target.fqn}.{name}")
        self.notes.copied.append(f"{target.fqn}.{name}")
        return True

    def _takes(self, name: str, codes: Codes) -> bool:
        """Return whether the stored codes and scales of this rank's blocks can be copied."""
        (target, _), source = self.owner.members[0], self.sources[0]
        lazy = self._lazy(name, source)
        if lazy is None or self.owner.is_flat or name not in source:
            return False
        return takes_codes(lazy, codes, local_boxes(target))

    def _recode(self, name: str, live: Moment, codes: Codes, reader: TensorReader) -> None:
        """Decode this rank's boxes to float32, and quantize them by the optimizer's own library."""
        import torch

        if codes.span is not None:
            self._recode_around(name, codes.span, live, codes, reader)
            return
        local = local_of(self.owner.part.param)
        values = torch.zeros(local.shape, dtype=torch.float32, device=local.device)
        with reader.meter.hold(values.nbytes, values.device):
            for (target, boxes), source in zip(
                self.owner.windows(values), self.sources, strict=True
            ):
                lazy = self._lazy(name, source)
                if lazy is None:
                    self.notes.initialised.append(f"{target.fqn}.{name}: the checkpoint has none")
                    continue
                _, factor = derivation(name, source, self.betas)
                for box, view in boxes:
                    reader.decoded(lazy, box, view)
                    if factor is not None:
                        view.mul_(factor)
            self._encode(name, live, codes, values, reader)
            error = relative_error(values, decoded(codes).view(values.shape))
        for (target, _), source in zip(self.owner.members, self.sources, strict=True):
            lazy = self._lazy(name, source)
            if lazy is not None:
                title = f"{target.fqn}.{name}"
                self.notes.loaded.append(title)
                form = lazy.dtype if lazy.encoding == "dense" else lazy.encoding
                self.notes.recoded.append(Recoded(title, form, codes.scheme, error))

    def _encode(
        self, name: str, live: Moment, codes: Codes, values: torch.Tensor, reader: TensorReader
    ) -> None:
        source = self.sources[0]
        lazy = self._lazy(name, source)
        if codes.segments is None:
            encode(live, codes, values)
        elif lazy is not None:  # else they are zeros, as they were made
            encode_cut(reader, lazy, codes, values, derivation(name, source, self.betas)[1] or 1.0)

    def _recode_around(
        self, name: str, span: tuple[int, int], live: Moment, codes: Codes, reader: TensorReader
    ) -> None:
        """Likewise, of all blocks that this rank's shard touches."""
        (target, _), source = self.owner.members[0], self.sources[0]
        lazy, title = self._lazy(name, source), f"{target.fqn}.{name}"
        if lazy is None:
            self.notes.initialised.append(f"{title}: the checkpoint has none")
            return
        values = values_of_span(reader, lazy, span, codes.codes.device)
        _, factor = derivation(name, source, self.betas)
        if factor is not None:
            values.mul_(factor)
        encode(live, codes, values)
        self.notes.loaded.append(title)
        form = lazy.dtype if lazy.encoding == "dense" else lazy.encoding
        error = relative_error(values, decoded(codes))
        self.notes.recoded.append(Recoded(title, form, codes.scheme, error))

    def _load_own_shape(self, name: str, live: torch.Tensor, reader: TensorReader) -> torch.Tensor:
        """Load a tensor of a shape of its own, a step or a row, cut as the live one."""
        lazy = self._lazy(name, self.lead)
        title = f"{self.owner.fqn}.{name}"
        if lazy is None and name in self.owner.part.family.scratch:
            return live
        if lazy is None or lazy.shape != tuple(live.shape):
            self.notes.initialised.append(f"{title}: the checkpoint has none of this shape")
            return live
        local = local_of(live)
        boxes = [(Box.whole(lazy.shape), Box.whole(lazy.shape))]
        if is_dtensor(live):
            mesh, place_of_rank = live.device_mesh, live.device_mesh.get_coordinate()
            assert place_of_rank is not None, "a rank that holds the entry is part of its mesh"
            boxes = cut(lazy.shape, mesh.shape, place_of_rank, live.placements, title)
        for box, place in boxes:
            reader.dense(lazy, box, window(local, place))
        self._note(title, lazy, str(local.dtype).removeprefix("torch."), None)
        return live


def _zero(views: Iterable[torch.Tensor]) -> None:
    for view in views:
        view.zero_()


def _codes(value: object) -> Codes:
    codes = codes_of(value)
    assert codes is not None
    return codes
