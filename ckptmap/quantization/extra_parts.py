"""Parts that move with a quantized weight and do not change its values: the scales of activations, for one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar, TypeAlias

from ckptmap.protocols import part_key
from ckptmap.protocols.encodings import beside
from ckptmap.tensors import StoredTensor, TensorInfo

Extra: TypeAlias = tuple[tuple[str, str, tuple[int, ...]], ...]
"""Name, dtype and shape of each such part."""


class HasExtraParts:
    """The base of encodings with such parts. It is no dataclass: a subclass gives the field `extra` its place."""

    activations: ClassVar[Collection[str]] = ()
    """The names of the parts that scale activations."""

    extra: Extra

    def activation_keys(self, fqn: str) -> Sequence[str]:
        names = [name for name, _, _ in self.extra if name in self.activations]
        return [part_key(self, fqn, name) for name in names]

    @property
    def extra_infos(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(shape, dtype) for name, dtype, shape in self.extra}

    @property
    def extra_record(self) -> Sequence[object]:
        """The parts as JSON, which `ScaledRecord.extra` reads."""
        return [[name, dtype, list(shape)] for name, dtype, shape in self.extra]


def extra_parts(keys: Mapping[str, str], stored: Mapping[str, StoredTensor]) -> Extra:
    """Return those of the parts that are stored; `keys` has the stored key of each by its name."""
    return tuple(
        (name, tensor.info.dtype, tensor.info.shape)
        for name, key in keys.items()
        if (tensor := stored.get(key)) is not None
    )


def parts_beside(fqn: str, names: Collection[str], stored: Mapping[str, StoredTensor]) -> Extra:
    """Return those of the parts that are stored in the module of a weight: `fc.input_scale` beside `fc.weight`."""
    return extra_parts({name: beside(fqn, name) for name in names}, stored)
