"""Check that a LoRA adapter fits its base: shapes, dtypes, and whether a matrix is transposed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.logical_tensors import DENSE
from ckptmap.checkpoint.lora.adapter_files import Adapter, LowRankUpdate
from ckptmap.core.printable import join
from ckptmap.errors import SourceError
from ckptmap.protocols import Group
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import StoredTensor

WEIGHTS = ("float64", "float32", "bfloat16", "float16")
"""Dtypes of values that something can be added to."""


@dataclass(frozen=True)
class ShapeChecks:
    """The tensors of one adapter held against those of its base.

    named    the adapter's names -> the base's
    foreign  tensors of the base whose codes cannot be decoded, each with the reason
    """

    ckpt: Checkpoint
    adapter: Adapter
    named: Callable[[str], str]
    foreign: Mapping[str, str]

    def dense(self, lazy: LazyTensor) -> StoredTensor:
        if lazy.encoding_ != DENSE or lazy.dtype not in WEIGHTS:
            raise SourceError(
                "CKM322",
                f"{self.adapter.path}: {lazy.fqn} is {lazy.encoding} {lazy.info}, expected plain float values",
                "save the adapter in bf16 or fp32",
            )
        return lazy.parts[""]

    def check_base(self, low: LowRankUpdate, base: Group, ndim: int = 2) -> None:
        foreign = self.foreign.get(base.fqn, "")
        if len(base.info.shape) != ndim or base.info.dtype not in WEIGHTS or foreign:
            raise SourceError(
                "CKM322",
                f"{self.adapter.path}: {low.module}: the base's {base.fqn} is {base.info}"
                f"{f' ({foreign})' if foreign else ''}, expected a"
                f" {('vector', 'matrix', 'stack')[ndim - 1]} of values that can be decoded",
                "linear layers, Conv1D, embeddings and stacks of experts can be merged; packed codes without their"
                " scales are made whole with ckptmap convert --base",
            )

    def check_shape(self, lazy: LazyTensor, expected: Iterable[int], base: Group) -> None:
        shape = tuple(expected)
        if lazy.shape != shape:
            config = self.adapter.config
            raise SourceError(
                "CKM322",
                f"{self.adapter.path}: {lazy.fqn} is {list(lazy.shape)}, expected {list(shape)} for"
                f" {base.fqn} {base.info} (r={config.r} in the config)",
                "its shards were not gathered: gather them from all ranks, then save it again"
                if not lazy.info.numel
                else "give the base that it was trained on, and the adapter_config.json that was saved with it",
            )

    def is_flipped(self, low: LowRankUpdate) -> bool:
        """Return whether the base's matrix is stored [in, out], as GPT-2's Conv1D stores it.

        Its shape tells. A square matrix is as those of modules with the same last name, else as
        `fan_in_fan_out` says. That setting is one for all modules, and peft changes it with each
        module it meets, so it counts only where no shape contradicts it.
        """
        mine = self._turned(low)
        if mine is not None:
            return mine
        asked, leaf = self.adapter.config.fan_in_fan_out, low.module.rpartition(".")[2]
        others = {
            other.module: turned
            for other in self.adapter.lows.values()
            if not (other.embedding or other.wrapped)
            and (turned := self._turned(other)) is not None
        }
        alike = {t for module, t in others.items() if module.rpartition(".")[2] == leaf}
        orders = alike or {asked, *others.values()}
        if len(orders) > 1:
            raise SourceError(
                "CKM322",
                f"{self.adapter.path}: {low.module} is square, so its shape does not tell whether it is stored"
                f" [in, out]: fan_in_fan_out is {asked} in the config, and other modules are not so",
                "correct fan_in_fan_out in the config, or merge with peft (model.merge_and_unload())",
            )
        return orders.pop()

    def _turned(self, low: LowRankUpdate) -> bool | None:
        """Return whether the base's matrix is the transpose of B @ A; None if the shapes do not tell."""
        fqn = self.named(f"{low.module}.weight")
        shape = self.ckpt.group(fqn).info.shape if fqn in self.ckpt else ()
        made = (*low.b.shape[:1], *low.a.shape[1:])
        return None if made == made[::-1] or made not in (shape, shape[::-1]) else made != shape


def require_stored(groups: Collection[str], ckpt: Checkpoint, adapter: Adapter) -> None:
    """Raise SourceError CKM322 where a merged tensor is computed from several of the base's when it is read."""
    computed = {} if ckpt.translation is None else ckpt.translation.decoded
    fqn = next((fqn for fqn in groups if fqn in computed), None)
    if fqn is not None:
        convert = join(["ckptmap", "convert", ckpt.path, "NAMED", "--to", "hf-fp32"])
        merge = join(["ckptmap", "merge", "NAMED", adapter.path, "DST"])
        raise SourceError(
            "CKM322",
            f"{adapter.path}: {fqn}: is computed from other tensors of the base {ckpt.shown}, expected one tensor there",
            f"give the base its names first: {convert}, then {merge}",
        )
