"""The encoding that each weight has in the checkpoint of --as, for the weights of the source.

unchanged                 the stored parts of the reference, byte for byte
dense in the reference    its dtype
encoded in the reference  its encoding with the same parameters, by the rule of its form
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.core.formatting import counted, some
from ckptmap.core.printable import advised
from ckptmap.core.quantized_codes import (
    EncodesSome,
    Repairs,
    ScalesActivations,
    WritesAfresh,
)
from ckptmap.errors import PlanError
from ckptmap.planning.kept_codes import code_grid, kept_fidelity
from ckptmap.planning.key_selection import Selection
from ckptmap.planning.reference import Reference
from ckptmap.planning.remarks import Remarks, Unresolved
from ckptmap.planning.request import Request
from ckptmap.protocols import Encoding, part_key
from ckptmap.protocols.encodings import Encoded
from ckptmap.protocols.offers import offers
from ckptmap.quantization.dense import Dense, DenseAs
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import FLOATING

LISTED = 3
"""Names that an error lists."""


def reference_encodings(
    request: Request, selection: Selection, reference: Reference
) -> tuple[dict[str, Encoding], dict[str, Encoded], Remarks]:
    """Return the weights that are encoded anew, each with its encoding; the encoding and logical info
    of every weight that is written; and remarks.

    Raises PlanError CKM212 where the two checkpoints are not of one model.
    """
    require_one_model(request, selection, reference)
    anew: dict[str, Encoding] = {}
    written: dict[str, Encoded] = {}
    unresolved: list[Unresolved] = []
    for fqn in selection.written:
        theirs = reference.ckpt[fqn]
        written[fqn] = (theirs.encoding_, theirs.info)
        if reference.keeps(fqn):
            continue
        encoding = _encoding(request.ckpt[fqn], theirs)
        if encoding is None:
            continue
        reason = _hindrance(request.ckpt[fqn], theirs, encoding)
        if reason is not None and reference.unchanged is not None:
            unresolved.append(Unresolved(fqn, reason, _HINT))
        anew[fqn] = encoding
    notes = [] if reference.unchanged is not None else [_to_compare(reference, len(written))]
    return anew, written, Remarks(unresolved=unresolved, notes=notes)


_HINT = "train the weights that it holds otherwise; or convert into a form that is written: --to hf-bf16"


def _to_compare(reference: Reference, count: int) -> str:
    return (
        f"{counted(count, 'weight')} will be compared with {reference.shown}: those with its values, bit"
        " for bit, come back as its bytes; the others are encoded as it says"
    )


def _encoding(mine: LazyTensor, theirs: LazyTensor) -> Encoding | None:
    """Return how the weight is encoded anew; None: it is stored as in the reference already."""
    encoding = theirs.encoding_
    if encoding.name == "dense":
        if mine.dtype == theirs.dtype:
            return None if mine.encoding == "dense" else Dense()
        return DenseAs(theirs.dtype)
    if encoding == mine.encoding_ and mine.info == theirs.info:
        return None
    repaired = encoding.repaired() if offers(encoding, Repairs) else None
    if repaired is not None:
        return repaired
    fresh = encoding.afresh() if offers(encoding, WritesAfresh) else encoding
    return fresh if fresh.name == encoding.name else encoding  # else it is not made anew


def _hindrance(mine: LazyTensor, theirs: LazyTensor, encoding: Encoding) -> str | None:
    """Return why the weight cannot be encoded as in the reference; None: it can."""
    if encoding.name == "dense" or kept_fidelity(mine, encoding, code_grid(mine)) is not None:
        return None
    refusal = encoding.cannot_encode(theirs.info) if offers(encoding, EncodesSome) else None
    if refusal is None:
        return None
    return f"has changed, and cannot be made {theirs.encoding} as in the checkpoint of --as: {refusal.reason}"


# ------------------------------------------------------------------------------- one model


def require_one_model(request: Request, selection: Selection, reference: Reference) -> None:
    """Raise PlanError CKM212 where names, shapes or kinds of values differ from the reference's."""
    ckpt, theirs = request.ckpt, reference.ckpt
    extra = [fqn for fqn in selection.written if fqn not in theirs]
    missing = _missing(ckpt, theirs, selection)
    if extra or missing:
        raise _other_names(request, reference, extra, missing)
    for fqn in selection.written:
        mine, wanted = ckpt[fqn].info, theirs[fqn].info
        if mine.shape != wanted.shape:
            raise _differs(request, reference, fqn, str(list(wanted.shape)), str(list(mine.shape)))
        if mine.dtype != wanted.dtype and not {mine.dtype, wanted.dtype} <= set(FLOATING):
            raise _differs(request, reference, fqn, wanted.dtype, mine.dtype)


def _missing(ckpt: Checkpoint, theirs: Checkpoint, selection: Selection) -> list[str]:
    """Return the weights of the reference that the source lacks."""
    return [fqn for fqn in theirs if fqn not in ckpt and fqn not in selection.ties]


def _other_names(
    request: Request, reference: Reference, extra: Sequence[str], missing: Sequence[str]
) -> PlanError:
    told = []
    if missing:
        told.append(f"{request.ckpt.shown} lacks {some(missing, LISTED)}")
    if extra:
        told.append(f"{reference.shown} lacks {some(extra, LISTED)}")
    hint = "give the checkpoint that this model came from: --as PATH"
    if extra and not missing:
        hint = f"{hint}; or leave out what it lacks: {advised(exclude=extra[0])}"
    return PlanError("CKM212", f"not of one model: {'; '.join(told)}", hint)


def _differs(request: Request, reference: Reference, fqn: str, want: str, got: str) -> PlanError:
    return PlanError(
        "CKM212",
        f"{fqn}: {got} in {request.ckpt.shown}, expected {want} as in {reference.shown}",
        "give the checkpoint that this model came from: --as PATH",
    )


def activation_parts(encoding: Encoding, names: Collection[str], fqn: str) -> frozenset[str]:
    """Return the parts that scale activations: an encoder does not make them, the reference has them."""
    keys = {part: part_key(encoding, fqn, part) for part in names}
    if not offers(encoding, ScalesActivations):
        return frozenset()
    scales = set(encoding.activation_keys(fqn))
    return frozenset(part for part, key in keys.items() if key in scales)
