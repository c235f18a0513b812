"""Find the files of one model where accelerate has saved several models together.

    accelerator.prepare(m1, m2, o1, o2)  ->  (0, m1, 0, o1), (1, m2, 1, o2)
    out/model.safetensors, optimizer.bin           number 0
    out/model_1.safetensors, optimizer_1.bin       number 1
    out/pytorch_model_fsdp_1/, optimizer_1/        number 1 of FSDP

Source: accelerate 1.15, accelerator.py `save_state`, checkpointing.py, utils/fsdp_utils.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ckptmap.errors import LoadError
from ckptmap.live.optimizer.unwrap import unwrapped
from ckptmap.protocols import Member, Members, Place

if TYPE_CHECKING:
    import torch
    from torch.utils.hooks import RemovableHandle

OPTIMIZER = "optimizer"
_RANK = re.compile(r"_rank\d+\.bin$")
_NAME = re.compile(
    r"(?P<head>pytorch_model_fsdp|pytorch_model|model|optimizer)(_(?P<number>\d+))?"
    r"(?P<tail>(_rank\d+)?\.bin|\.safetensors|)"
)


class Accelerator(Protocol):
    """What is used of accelerate's Accelerator."""

    @property
    def _models(self) -> Sequence[torch.nn.Module]: ...
    @property
    def _optimizers(self) -> Sequence[object]: ...
    @property
    def save_state(self) -> Callable[..., object]: ...
    @property
    def load_state(self) -> Callable[..., object]: ...
    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle: ...
    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle: ...


@dataclass(frozen=True)
class Prepared:
    """A model with its number, and the optimizer of its parameters with its own; None: none."""

    number: int
    model: torch.nn.Module
    optimizer_number: int | None
    optimizer: torch.optim.Optimizer | None

    @property
    def title(self) -> str:
        """The name that accelerate gives to the model's file."""
        return f"model_{self.number}" if self.number else "model"


def prepared(accelerator: Accelerator) -> list[Prepared]:
    """Return the prepared models with their optimizers. Raises LoadError CKM505 where an optimizer has
    parameters of several models, or a model has two optimizers."""
    models = list(accelerator._models)
    optimizers = [unwrapped(one) for one in accelerator._optimizers]
    of: dict[int, int] = {}
    known = [{id(param) for param in model.parameters()} for model in models]
    for number, optimizer in enumerate(optimizers):
        mine = {id(param) for group in optimizer.param_groups for param in group["params"]}
        owners = [place for place, params in enumerate(known) if mine & params]
        if len(models) == 1:
            owners = [0]  # `load` refuses parameters of another model
        if len(owners) != 1 or owners[0] in of:
            raise LoadError(
                "CKM505",
                f"accelerator: optimizer {number} of {len(optimizers)} has parameters of models"
                f" {owners}, expected one optimizer a model",
                "load each with ckptmap.load(path, model, optimizer)",
            )
        of[owners[0]] = number
    return [
        Prepared(place, model, of.get(place), optimizers[of[place]] if place in of else None)
        for place, model in enumerate(models)
    ]


class NumberedStates:
    """Reads accelerate's directory of `count` models as the checkpoint of one of them."""

    name = "accelerate"

    def __init__(self, one: Prepared, count: int) -> None:
        self.one, self.count = one, count

    def claims(self, place: Place) -> bool:
        return True

    def members(self, place: Place) -> Members:
        """Return the members of the model. Raises LoadError CKM505 for another number of models."""
        names = _numbered(place.names)
        numbers = {number for head, number, _ in names if head != OPTIMIZER}
        if numbers != set(range(self.count)):
            raise LoadError(
                "CKM505",
                f"{place.path}: has models {sorted(numbers)}, expected {self.count} as save_state"
                " numbers them",
                "load each with ckptmap.load(path, model, optimizer)",
            )
        members = [*_members(place, names, self.one.number, "model")]
        if self.one.optimizer_number is not None:
            members += _members(place, names, self.one.optimizer_number, OPTIMIZER)
        return Members(tuple(members))


def _numbered(names: Sequence[str]) -> list[tuple[str, int, str]]:
    """Return (head, number, name) of every file; a name without a number is of the first model."""
    matches = [(name, match) for name in names if (match := _NAME.fullmatch(name)) is not None]
    return [(match["head"], int(match["number"] or 0), name) for name, match in matches]


def _members(
    place: Place, names: Sequence[tuple[str, int, str]], number: int, role: str
) -> Iterator[Member]:
    """Yield the members of one model or optimizer: files of ranks as one member, any other file by
    itself."""
    mine = [name for head, n, name in names if n == number and (head == OPTIMIZER) is (
        role == OPTIMIZER
    )]  # fmt: skip
    ranks = tuple(name for name in mine if _RANK.search(name))
    if ranks:
        yield Member(place.path, role, names=ranks)
    for name in mine:
        if name not in ranks:
            path = Path(place.path) / name
            yield Member(str(path), role, (role,) if path.is_dir() else ())
