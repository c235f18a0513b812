"""The step of torchao's Adam, with its last line replaced: the new weight is rounded by position.

    torchao   p = round(single_param_adam(p, grad, moments))      bits of the default generator
    here      w = p.float();  single_param_adam(w, grad, moments);  p = round_at(w, rows)

The arithmetic up to the rounding is torchao's own function, on float32. The loop over parameters is
written anew, because torchao's passes no name and no position to it. It works on this rank's shards,
not on DTensors: every operation is elementwise. Where ranks share some blocks of a moment, it works on all elements of
these blocks, and the weights of this rank are taken out of the result. Where they share most, it works on moments in
float32, which are quantized when the ranks have agreed on scales: the new weight depends on no new scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from ckptmap.errors import LoadError
from ckptmap.live.model.live_tensor import is_dtensor
from ckptmap.live.optimizer.family import STEP, local_of
from ckptmap.live.rounding.blocks_around import codes_of_cut, decode, is_around
from ckptmap.live.rounding.cut_params import cut_blocks
from ckptmap.live.rounding.moments import AROUND, CUT, grid_of
from ckptmap.live.rounding.position_bits import key_of, round_at
from ckptmap.live.rounding.positions import boxes_of, positions
from ckptmap.live.rounding.record import ParamPlace, RoundingRecord
from ckptmap.live.rounding.shared_blocks import shared_blocks
from ckptmap.live.rounding.shared_gradients import Edges, around, exchange
from ckptmap.live.rounding.shared_scales import SharedScales, require_gradients

if TYPE_CHECKING:
    import torch

Kernel = Callable[..., None]


@cache
def kernel() -> Kernel:
    """Return the step of one parameter, of this rank's shards; torch.compile makes one kernel of it."""
    import torch
    from torchao.optim.adam import single_param_adam

    def step_of_param(
        param: torch.Tensor,
        grad: torch.Tensor,
        moments: tuple[torch.Tensor | None, ...],
        numbers: tuple[Any, ...],
        rows: torch.Tensor | None,
        width: int,
        key: tuple[torch.Tensor, ...],
    ) -> None:
        if rows is None:
            single_param_adam(param, grad, *moments, *numbers, False)
            return
        wide = param.to(torch.float32, copy=True)
        single_param_adam(wide, grad, *moments, *numbers, False)
        param.copy_(round_at(wide, rows, width, key))

    return step_of_param


@cache
def kernel_around() -> Kernel:
    """Return the step of one parameter with moments in the blocks around its shard."""
    from torchao.optim.adam import single_param_adam

    def step_of_blocks(
        param: torch.Tensor,
        wide: torch.Tensor,
        grad: torch.Tensor,
        moments: tuple[torch.Tensor | None, ...],
        numbers: tuple[Any, ...],
        at: tuple[torch.Tensor | None, int, int],
        key: tuple[torch.Tensor, ...],
    ) -> None:
        rows, width, lead = at
        single_param_adam(wide, grad, *moments, *numbers, False)
        inside = wide.narrow(0, lead, param.numel()).view(param.shape)
        param.copy_(inside if rows is None else round_at(inside, rows, width, key))

    return step_of_blocks


LIKE_EAGER = (
    "emulate_precision_casts", "eager_numerics.disable_ftz", "eager_numerics.division_rounding",
    "emulate_divison_rounding",
)  # fmt: skip
"""Options of torch's inductor, the last one by its name in older releases: without them a kernel for a GPU divides
approximately, rounds a product and a sum once, and drops subnormal values."""


@cache
def compiled(make: Callable[[], Kernel], kind: str) -> Kernel:
    """Return torch.compile's wrapper of a kernel for a kind of device: to make one takes 0.2 ms, and a step would for
    each parameter.

    Moments that ranks share are decoded and quantized outside of kernels, operation by operation: on a device, others
    are computed with the same bits only so.
    """
    import torch

    known = () if kind == "cpu" else torch._inductor.list_options()
    options: dict[str, Any] = {name: True for name in LIKE_EAGER if name in known}
    found: Kernel = torch.compile(make(), fullgraph=True, dynamic=False, options=options or None)
    return found


def run(optimizer: Any, record: RoundingRecord) -> None:
    """Step every parameter that has a gradient. Raises LoadError CKM520, before any is stepped, for one
    that has no FQN or cannot be rounded by position."""
    import torch
    from torch._dynamo.utils import disable_cache_limit

    every = [
        (group, place_of(record, param, optimizer.block_size))
        for group in optimizer.param_groups
        for param in group["params"]
        if param.grad is not None or (param.requires_grad and is_dtensor(param))
    ]
    work = [(group, place) for group, place in every if place.param.grad is not None]
    with torch.no_grad(), disable_cache_limit():
        grads = {id(place.param): _local_grad(place.param) for _, place in work}
        require_gradients([place for _, place in every], grads)
        edges = exchange([place for _, place in every], grads, not optimizer.is_adamw)
        scales = SharedScales()
        for group, place in work:
            _step(optimizer, record.seed, group, place, grads.pop(id(place.param)), edges, scales)
        scales.agree()


def _step(
    optimizer: Any, seed: int, group: dict[str, Any], place: ParamPlace,
    grad: torch.Tensor, edges: dict[int, Edges], scales: SharedScales,
) -> None:  # fmt: skip
    param = place.param
    state = _state(optimizer, group, param)
    state[STEP] += 1
    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    held = [_local_moment(state[name]) if name in state else None for name in names]
    if place.cut is None:
        _update(optimizer, seed, group, place, grad, state[STEP], held, edges)
        return
    coded = {at: codes for at, one in enumerate(held) if (codes := codes_of_cut(one)) is not None}
    wide: list[Any] = [decode(one) if at in coded else one for at, one in enumerate(held)]
    _update(optimizer, seed, group, place, grad, state[STEP], wide, edges)
    count = sum(one is not None for one in held)
    scales.add(place, count, [(codes, wide[at]) for at, codes in coded.items()])


def _update(
    optimizer: Any, seed: int, group: dict[str, Any], place: ParamPlace, grad: torch.Tensor,
    step: torch.Tensor, held: Sequence[Any], edges: dict[int, Edges],
) -> None:  # fmt: skip
    """Compute the new weight and moments of a parameter; `held` are this rank's moments."""
    local = local_of(place.param.detach())
    if not local.numel():
        return
    numbers = (
        _tensor_lr(group), *group["betas"], group["weight_decay"], group["eps"], optimizer.is_adamw
    )  # fmt: skip
    at = place.positions
    key = key_of(seed, int(step.item()), place.fqn).tensors() if at else ()
    rows, width = (at.rows, at.width) if at else (None, 0)
    if place.shared is None or not all(one is None or is_around(one) for one in held):
        compiled(kernel, local.device.type)(local, grad, (step, *held), numbers, rows, width, key)
        return
    lead, span, mine = place.shared.lead, place.shared.span, edges[id(place.param)]
    compiled(kernel_around, local.device.type)(
        local, around(local, lead, span, mine.weights), around(grad, lead, span, mine.grads),
        (step, *(None if one is None else _rewrapped(one.blocks) for one in held)), numbers, (rows, width, lead), key,
    )  # fmt: skip


def _state(optimizer: Any, group: dict[str, Any], param: torch.Tensor) -> dict[str, Any]:
    """Return the parameter's state, made where it has none. A count in 16 bits, of a process whose default
    dtype was such a one, would stop at 256: it goes on in float32."""
    import torch

    state: dict[str, Any] = optimizer.state[param]
    if not state:
        state[STEP] = torch.zeros((), dtype=torch.float32, device="cpu")
        state["exp_avg"] = optimizer._new_buffer(param, True)
        state["exp_avg_sq"] = optimizer._new_buffer(param, False)
        if group["amsgrad"]:
            state["max_exp_avg_sq"] = optimizer._new_buffer(param, False)
    if state[STEP].dtype in (torch.bfloat16, torch.float16):
        state[STEP] = state[STEP].float()
    return state


def _local_moment(moment: Any) -> Any:
    """Return this rank's shard of a moment. One that is quantized is wrapped anew, around the same codes: in
    a DTensor it is a view, of which torchao lost the dtype (see `torchao_lowbit_fix`), and torch.compile
    asks for it."""
    local: Any = local_of(moment)
    return local if local is moment or not hasattr(local, "codes") else _rewrapped(local)


def _rewrapped(local: Any) -> Any:
    names, context = local.__tensor_flatten__()
    parts = {name: getattr(local, name) for name in names}
    return type(local).__tensor_unflatten__(parts, context)


def _tensor_lr(group: dict[str, Any]) -> torch.Tensor:
    import torch

    rate = group["lr"]
    if not isinstance(rate, torch.Tensor):
        raise RuntimeError(
            f"lr is a {type(rate).__name__}, torchao's optimizers need a tensor: change it by"
            " optimizer.param_groups[0]['lr'].fill_(...)"
        )
    return rate


def _local_grad(param: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of the gradient, cut as the parameter is."""
    grad: Any = param.grad
    if grad.is_sparse:
        raise RuntimeError("Sparse gradient is not supported")
    if is_dtensor(param) and is_dtensor(grad) and grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    local: Any = local_of(grad)
    wait = getattr(local, "wait", None)  # of a collective that is under way
    found: torch.Tensor = local if wait is None else wait()
    return found


# ------------------------------------------------------------------------------- where it lies


def place_of(record: RoundingRecord, param: torch.Tensor, block: float) -> ParamPlace:
    """Return the FQN and the positions of a parameter, computed once for each way that it is cut."""
    facts = (tuple(param.shape), param.dtype, param.device, *_cut_facts(param))
    known = record.places.get(id(param))
    if known is not None and known.param is param and known.facts == facts:
        return known
    fqn = _fqn(record, param)
    place = _placed(param, fqn, facts, block)
    record.places[id(param)] = place
    return place


def _cut_facts(param: torch.Tensor) -> Iterator[object]:
    if is_dtensor(param):
        yield from (param.device_mesh, tuple(param.placements))


def _fqn(record: RoundingRecord, param: torch.Tensor) -> str:
    found = record.names.get(id(param))
    if found is None or found[0] is not param:
        record.names = record.name_of()
        found = record.names.get(id(param))
    if found is not None and found[0] is param:
        return found[1]
    raise LoadError(
        "CKM520",
        f"optimizer: a parameter {tuple(param.shape)} has no FQN, so that it has no random bits",
        "uninstall() the rounding, and install it with the model that has the parameter",
    )


def _placed(param: torch.Tensor, fqn: str, facts: tuple[object, ...], block: float) -> ParamPlace:
    import torch

    local = local_of(param)
    if getattr(param, "_fsdp_flattened", False) or getattr(param, "_is_flat_param", False):
        raise _unknown(
            fqn, "is part of a flat parameter of FSDP1", "wrap the model with fully_shard"
        )
    if type(local) not in (torch.Tensor, torch.nn.Parameter):
        raise _unknown(
            fqn, f"is a {type(local).__name__}, which draws random bits of its own",
            "train a dense parameter",
        )  # fmt: skip
    grid = grid_of(param, block)
    shared = shared_blocks(param, int(block)) if grid == AROUND else None
    cut = cut_blocks(param, int(block)) if grid == CUT else None
    at, boxes = None, boxes_of(param)
    if param.dtype == torch.bfloat16 and boxes:
        at = positions(tuple(param.shape), boxes, tuple(local.shape), local.device)
    return ParamPlace(param, fqn, facts, at, grid, shared, cut)


def _unknown(fqn: str, what: str, hint: str) -> LoadError:
    return LoadError(
        "CKM520", f"optimizer: {fqn} {what}, expected a dense tensor or a DTensor", hint
    )
