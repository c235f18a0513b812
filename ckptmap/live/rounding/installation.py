"""install(): put rounding by position into torchao's optimizers, and take it out again.

The optimizer keeps its class. Its `step` and `_new_buffer` are replaced on the instance, so that other
optimizers of the process are as they were. A hook after the step notices where somebody calls the old one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptmap.core import argument_checks
from ckptmap.errors import ArgumentError, LoadError
from ckptmap.live.model.flat_params import is_fsdp1
from ckptmap.live.optimizer.family import is_a, local_of
from ckptmap.live.optimizer.several_optimizers import SeveralOptimizers
from ckptmap.live.optimizer.unwrap import inner_optimizers, is_offloaded, unwrapped
from ckptmap.live.rounding import moments, stepping, torchao_source
from ckptmap.live.rounding.blocks_around import decode, is_around
from ckptmap.live.rounding.record import ATTRIBUTE, LOWEST, RoundingRecord, record_of
from ckptmap.mapping.wrappers import strip_wrappers

if TYPE_CHECKING:
    import torch

SCHEDULED = "_wrapped_by_lr_sched"
"""Attribute of a `step` that a learning rate scheduler of torch has wrapped."""
Names = dict[int, "tuple[torch.Tensor, str]"]
"""id of a parameter -> (the parameter, its FQN)."""


@dataclass(eq=False)
class InstalledRounding:
    """Rounding by position in one optimizer; as a context, it ends with `uninstall`."""

    _records: list[tuple[Any, RoundingRecord]]
    _undo: list[Callable[[], None]] = field(default_factory=list)

    @property
    def seed(self) -> int:
        """The seed of all bits: that of `install`, or of the checkpoint that was loaded since."""
        return self._records[0][1].seed

    def blocks_of_shards(self) -> tuple[str, ...]:
        """Return the FQNs of parameters whose moments are quantized in blocks of each rank's shard, because a rank
        holds several pieces of them, or their ranks have no way to exchange what is on their device: another number
        of ranks rounds these moments in another way."""
        found = []
        for optimizer, record in self._records:
            for group in optimizer.param_groups:
                for param in group["params"]:
                    place = stepping.place_of(record, param, optimizer.block_size)
                    found += [place.fqn] if place.grid == moments.SHARD else []
        return tuple(found)

    def uninstall(self) -> None:
        """Give the optimizer its own step back, with torchao's random bits. Moments stay as they are; those of
        which ranks share blocks are decoded, into float32."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> InstalledRounding:
        return self

    def __exit__(self, *_: object) -> None:
        self.uninstall()


def install(
    optimizer: torch.optim.Optimizer,
    *,
    seed: int,
    model: torch.nn.Module | None = None,
    fqns: Mapping[str, torch.Tensor] | None = None,
    same_gradients: bool = False,
) -> InstalledRounding:
    """Let an optimizer of torchao round bfloat16 weights by bits of (seed, step, FQN, position).

    optimizer       `_AdamW`, `AdamW8bit`, `AdamW4bit`, `AdamWFp8`, or their Adam, made with
                    `bf16_stochastic_round=True`; or `CPUOffloadOptimizer` of such a class. Its
                    parameters are plain tensors or DTensors (FSDP2, HSDP, TP)
    seed            an integer, the same on all ranks; `ckptmap.save` records it, `ckptmap.load` restores it
    model           the model that has the parameters, wrapped or not: gives their FQNs
    fqns            in place of it, FQN -> parameter, as `dict(model.named_parameters())`. Neither is needed
                    where the optimizer was made from `model.named_parameters()`
    same_gradients  True: the caller states that every gradient has the same bits on any number of ranks, so
                    that `load(exact=True)` accepts another one. That is so where sums do not depend on
                    their order: equal batches on 1, 2 or 4 ranks, or gradients that are exact in their
                    dtype. ckptmap cannot know it; a report of `load` for other numbers of ranks notes
                    that sums of equal gradients, too, are rounded there

    8- and 4-bit moments are quantized in blocks of the whole tensor. Where rows are cut inside a block, its ranks
    exchange its gradients in each step; where columns are, they agree on its scale. A step of such moments is a
    collective call. `InstalledRounding.blocks_of_shards` names parameters whose moments are quantized by shard.

    Raises ArgumentError CKM516, and LoadError CKM520 for an optimizer, a parameter or a release of torchao
    that it cannot be put into. Nothing is changed then.
    """
    argument_checks.integer("seed", seed, LOWEST)
    inner = _inner(optimizer)
    _require_rounding(optimizer, inner)
    torchao_source.require_known()
    name_of = partial(_names, optimizer, model, fqns)
    records = [RoundingRecord(int(seed), bool(same_gradients), name_of) for _ in inner]
    for one, record in zip(inner, records, strict=True):
        _require_own_step(one)
        for group in one.param_groups:
            for param in group["params"]:
                stepping.place_of(record, param, one.block_size)
    installed = InstalledRounding(list(zip(inner, records, strict=True)))
    for one, record in installed._records:
        installed._undo += _put_in(one, record)
    return installed


def _put_in(optimizer: Any, record: RoundingRecord) -> list[Callable[[], None]]:
    """Replace the step of one optimizer, and return what undoes it."""
    kept = {name: vars(optimizer)[name] for name in ("step",) if name in vars(optimizer)}
    mine = {
        ATTRIBUTE: record,
        "step": _step(optimizer, "step" in kept),
        "_new_buffer": partial(moments.new_buffer, optimizer),
    }
    vars(optimizer).update(mine)
    hook = optimizer.register_step_post_hook(partial(_notice_other_step, record))

    def undo() -> None:
        hook.remove()
        for name, value in mine.items():
            if vars(optimizer).get(name) is value:  # else a scheduler has wrapped it since
                del vars(optimizer)[name]
                vars(optimizer).update({name: kept[name]} if name in kept else {})
        _decode_shared(optimizer)

    return [undo]


def _decode_shared(optimizer: Any) -> None:
    """Replace moments that torchao's own step cannot read by their values."""
    import torch

    with torch.no_grad():
        for state in optimizer.state.values():
            shared = [name for name, value in state.items() if is_around(local_of(value))]
            state.update({name: decode(state[name]) for name in shared})


def _step(optimizer: Any, scheduled: bool) -> Any:
    """Return the step of this optimizer, with torch's hooks and profiling around it. Where the rounding is
    uninstalled, and something still calls this one, it is torchao's."""
    import torch

    theirs = inspect.unwrap(type(optimizer).step)

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        record = record_of(self)
        if record is None:
            return theirs(self, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepping.run(self, record)
        record.went_through = True
        if scheduled:
            self._opt_called = True  # what the scheduler's own wrapper notes
        return loss

    step.__wrapped__ = theirs  # type: ignore[attr-defined]  # for `_require_own_step`, after an uninstall
    hooked: Any = torch.optim.Optimizer.profile_hook_step(step)
    hooked.hooked = True
    if scheduled:
        setattr(hooked, SCHEDULED, True)
    return hooked.__get__(optimizer)


def _notice_other_step(record: RoundingRecord, optimizer: Any, *_: object) -> None:
    """Raise LoadError CKM520 where another step ran than the installed one."""
    if not record.went_through:
        raise LoadError(
            "CKM520",
            f"{type(optimizer).__name__}: its own step was called, kept from before the rounding was"
            " installed: the weights were rounded with bits of the random generator",
            "install the rounding before anything takes optimizer.step",
        )
    record.went_through = False


# ------------------------------------------------------------------------------- what it can be put into


def _inner(optimizer: object) -> list[Any]:
    """Return the optimizers that keep the state of one optimizer."""
    found = unwrapped(optimizer)
    if isinstance(found, SeveralOptimizers):
        names = ", ".join(found.by_name)
        raise _refusal(f"these are several optimizers: {names}", "install it in each of them")
    return [*inner_optimizers(found)]


def _require_rounding(optimizer: object, inner: list[Any]) -> None:
    for one in inner or [optimizer]:
        name = type(one).__name__
        if not is_a(one, "torchao", "_AdamBase"):
            raise _refusal(
                f"{name} is none of torchao's Adam optimizers",
                "use _AdamW, AdamW8bit, AdamW4bit or AdamWFp8 of torchao.optim",
            )
        if not one.bf16_stochastic_round:
            raise _refusal(
                f"{name} does not round stochastically", "make it with bf16_stochastic_round=True"
            )
        if record_of(one) is not None:
            raise _refusal(f"{name} has it already", "uninstall() the first one before")


def _require_own_step(optimizer: Any) -> None:
    """Raise LoadError CKM520 where the step is not torchao's own, or one that a scheduler has wrapped."""
    from torchao.optim.adam import _AdamBase

    base: Any = _AdamBase
    own = inspect.unwrap(type(optimizer).step) is inspect.unwrap(base.step)
    put = vars(optimizer).get("step")
    if not own or (put is not None and inspect.unwrap(put) is not inspect.unwrap(base.step)):
        raise _refusal(
            f"{type(optimizer).__name__}: something has replaced its step",
            "install the rounding before other wrappers, on torchao's own class",
        )


def _refusal(what: str, hint: str) -> LoadError:
    return LoadError("CKM520", f"rounding by position: {what}", hint)


# ------------------------------------------------------------------------------- names


def _names(
    optimizer: Any, model: torch.nn.Module | None, fqns: Mapping[str, torch.Tensor] | None
) -> Names:
    """Return the parameters with their plain FQNs, the first of names that are tied; of copies that
    CPUOffloadOptimizer steps, those of the model's own."""
    if fqns is not None and model is not None:
        raise ArgumentError("CKM516", "model and fqns: expected one of them", "leave out one")
    outer = unwrapped(optimizer)
    if model is not None:
        argument_checks.module("model", model)
        if any(map(is_fsdp1, model.modules())):
            raise _refusal("the model is wrapped by FSDP1", "wrap it with fully_shard")
        fqns = dict(model.named_parameters(remove_duplicate=False))
    elif fqns is None:
        fqns = _names_in_groups(outer)
    plain = strip_wrappers([*fqns], "model")
    names: Names = {}
    for key, param in fqns.items():
        names.setdefault(id(param), (param, plain[key]))
    if is_offloaded(outer):
        for device, host in outer.param_d2h_map.items():
            if id(device) in names:
                names[id(host)] = (host, names[id(device)][1])
    return names


def _names_in_groups(optimizer: Any) -> dict[str, torch.Tensor]:
    """Return FQN -> parameter, where the optimizer was made from named parameters."""
    groups = optimizer.param_groups
    if not all("param_names" in group for group in groups):
        raise ArgumentError(
            "CKM516", "model, fqns: expected one of them, got none", "pass the model: model=model"
        )
    return {
        name: param
        for group in groups
        for name, param in zip(group["param_names"], group["params"], strict=True)
    }
