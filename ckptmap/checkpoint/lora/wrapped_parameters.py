"""Find the base parameter that a low-rank update changes, where peft wrapped single parameters.

    mlp.experts.base_layer.lora_A [e r, h], lora_B [2 i, e r]  ->  mlp.experts.gate_up_proj [e, 2 i, h]
    mlp.experts.lora_A            [e r, i], lora_B [h, e r]    ->  mlp.experts.down_proj    [e, h, i]

`target_parameters` puts one wrapper around the other, in an order that no file has: shapes tell
which is whose, or nothing does. peft takes a stack as [e, out, in] or as [e, in, out], which is again told by shapes, and
where its matrices are square by `expert_order`.
"""

from __future__ import annotations

from collections.abc import Callable

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.lora.adapter_files import Adapter, LowRankUpdate
from ckptmap.checkpoint.lora.merged_tensor import Merged, Stacked
from ckptmap.core.printable import advised, quote
from ckptmap.errors import SourceError
from ckptmap.protocols import Group


class WrappedParameters:
    """The parameters that one adapter wraps.

    named       the adapter's names -> the base's
    in_out      whether square matrices of stacks are [in, out], where no shape tells; None: nothing does
    by_release  whether a stack was merged by `in_out`
    """

    def __init__(
        self,
        adapter: Adapter,
        ckpt: Checkpoint,
        named: Callable[[str], str],
        in_out: bool | None = None,
    ) -> None:
        self.adapter, self.ckpt, self.named, self.in_out = adapter, ckpt, named, in_out
        self.by_release = False

    def name(self, key: str) -> str:
        """Return the parameter that an update changes, by the adapter's name.

        Where the base has none of the candidates, it is the first of them. Raises SourceError
        CKM322 where shapes do not tell.
        """
        low = self.adapter.lows[key]
        if not low.wrapped:
            return low.names[0]
        there = [name for name in low.names if self.named(name) in self.ckpt]
        fits = [name for name in there if _fits(low, self._shape(name))]
        siblings = [
            other
            for other in self.adapter.lows.values()
            if other is not low and other.wrapped and other.module == low.module
        ]
        if len(fits) > 1 or any(_fits(other, self._shape(n)) for other in siblings for n in fits):
            raise self._undecided(
                low,
                f"fits {' and '.join(there)}, so its shape does not tell which of them it changes",
            )
        return next(iter(fits or there or low.names))

    def added(
        self, low: LowRankUpdate, name: str, base: Group
    ) -> tuple[Merged, tuple[int, int], tuple[int, int]]:
        """Return the encoding of the merged parameter, and the shapes that A and B must have."""
        config, shape, dtype = self.adapter.config, base.info.shape, base.info.dtype
        rank, scale = config.rank(name), config.scale(name)
        if len(shape) == 2:
            merged = Merged(base.encoding, dtype, rank, scale)
            return merged, (rank, shape[1]), (shape[0], rank)
        experts, rows, columns = shape
        flip = experts > 1 and self._is_flipped(low, shape)
        if flip:
            rows, columns = columns, rows
        stacked = Stacked(base.encoding, dtype, rank, scale, flip, experts=experts)
        return stacked, (rank * experts, columns), (rows, rank * experts)

    def _is_flipped(self, low: LowRankUpdate, shape: tuple[int, ...]) -> bool:
        """Return whether the stack of experts is stored [e, in, out].

        A stack of square matrices is as the others of its module; without others, as those of all
        modules. Raises SourceError CKM322 where shapes do not tell.
        """
        mine = _flipped(low, shape)
        if len(mine) == 1:
            return mine.pop()
        others = [other for other in self.adapter.lows.values() if other.wrapped]
        for kin in ([other for other in others if other.module == low.module], others):
            stacks = ((o, self._shape(n)) for o in kin for n in o.names)
            ways = (_flipped(o, shape) for o, shape in stacks if len(shape) == 3)
            orders = {way.pop() for way in ways if len(way) == 1}
            if len(orders) == 1:
                return orders.pop()
        if self.in_out is not None:
            self.by_release = True
            return self.in_out
        raise self._undecided(
            low,
            "its matrices are square, so their shape does not tell whether they are stored [in, out], nor do peft_version"
            " in the adapter's config and model_type in the base's config.json",
        )

    def _shape(self, name: str) -> tuple[int, ...]:
        fqn = self.named(name)
        return self.ckpt.group(fqn).info.shape if fqn in self.ckpt else ()

    def _undecided(self, low: LowRankUpdate, why: str) -> SourceError:
        return SourceError(
            "CKM322",
            f"{self.adapter.path}: {low.a.fqn} {list(low.a.shape)}: {why}",
            f"merge it with peft (model.merge_and_unload()), or leave it out: {advised(leave=low.module)}",
        )


def _fits(low: LowRankUpdate, shape: tuple[int, ...]) -> bool:
    return bool(_flipped(low, shape))


def _flipped(low: LowRankUpdate, shape: tuple[int, ...]) -> set[bool]:
    """Return the orders in which the halves fit a parameter of this shape: False for [e, out, in] and
    for a matrix [out, in], True for [e, in, out]. The rank is left to the config."""
    if len(low.a.shape) != 2 or len(low.b.shape) != 2 or len(shape) not in (2, 3):
        return set()
    made = (low.b.shape[0], low.a.shape[1])
    ways = {False: made, True: made[::-1]} if len(shape) == 3 else {False: made}
    return {flip for flip, dims in ways.items() if dims == shape[-2:]}


def per_expert(ckpt: Checkpoint, name: str) -> str:
    """Return the next step if the base has each expert by itself and the adapter is of their stack."""
    if ".experts." not in name or not any(".experts.0." in fqn for fqn in ckpt):
        return ""
    return (
        "the base has each expert by itself: join them first as transformers 5 does in memory, and give MEMORY as the"
        f" base: ckptmap convert {quote(ckpt.shown)} MEMORY --to hf --names hf-memory; else "
    )
