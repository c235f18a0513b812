"""What a tensor becomes that is encoded anew: worked out once for all tensors of one form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptmap.checkpoint.cast_tensor import TensorInDtype
from ckptmap.core.printable import advised
from ckptmap.core.quantized_codes import CodeGrid
from ckptmap.core.slot_columns import Form
from ckptmap.errors import PlanError
from ckptmap.planning.conversion import Conversion
from ckptmap.planning.kept_codes import code_grid, kept_fidelity
from ckptmap.protocols import Encoding, Refusal
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import TensorInfo


@dataclass(frozen=True, slots=True, eq=False)
class EncodingTarget:
    """What all logical tensors of one form become that are encoded alike.

    parts    part -> the stored tensor that holds it
    forms    how each part is cut; None: that depends on the tensor's name
    keeps    the codes that are kept bit for bit; None: it is decoded and encoded
    step     how the tensor is converted
    record   its metadata; None: it needs none
    """

    encoding: Encoding
    parts: Mapping[str, TensorInfo]
    forms: Sequence[Form] | None
    fidelity: str
    keeps: CodeGrid | None
    step: Conversion
    record: Mapping[str, object] | None


def parts_of(lazy: LazyTensor, encoding: Encoding) -> Mapping[str, TensorInfo]:
    """Return the parts of the tensor in an encoding. Raises PlanError CKM203 where it cannot have it."""
    parts = encoding.parts(lazy.info)
    if isinstance(parts, Refusal):
        raise PlanError(
            "CKM203", f"{lazy.fqn}: cannot be {encoding.name}: {parts.reason}",
            f"leave it as it is with {advised(no_encode=lazy.fqn)}",
        )  # fmt: skip
    return parts


def target_of(
    lazy: LazyTensor,
    role: str,
    encoding: Encoding,
    parts: Mapping[str, TensorInfo],
    forms: Sequence[Form] | None,
) -> EncodingTarget:
    """Return what a tensor becomes whose parts are cut so."""
    grid = code_grid(lazy)
    kept = kept_fidelity(lazy, encoding, grid)
    fidelity = kept or _fidelity(lazy, encoding, parts)
    kind = kind_of(encoding, parts[""] if encoding.name == "dense" else lazy.info)
    nbytes = sum(info.nbytes for info in parts.values())
    return EncodingTarget(
        encoding, parts, forms, fidelity, grid if kept else None,
        conversion(lazy, role, kind, fidelity, nbytes), encoding.record(lazy.info),
    )  # fmt: skip


def conversion(lazy: LazyTensor, role: str, target: str, fidelity: str, nbytes: int) -> Conversion:
    """Return how a tensor is converted to `nbytes` of a target."""
    source = kind_of(lazy.encoding_, lazy.info)
    if isinstance(lazy, TensorInDtype):  # the cast is a part of the encoding
        source = kind_of(lazy.inner.encoding_, lazy.inner.info)
    return Conversion(role, lazy.shape, source, target, fidelity, lazy.nbytes, nbytes)


def kind_of(encoding: Encoding, info: TensorInfo) -> str:
    """Return dtype or encoding as a plan shows it."""
    return info.dtype if encoding.name == "dense" else f"{encoding.name}({info.dtype})"


def _fidelity(lazy: LazyTensor, encoding: Encoding, parts: Mapping[str, TensorInfo]) -> str:
    if encoding.name != "dense":
        return "requantize" if lazy.quantized else "quantize"
    return "exact" if parts[""].dtype == lazy.dtype and not lazy.lossy else "cast"
