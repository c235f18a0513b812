"""Choose the encoding of one weight: one that keeps its codes, else the one that the scheme has for it.

A scheme is what `--to SETUP-SCHEME` names: nf4, int8, a cast such as bf16. It makes an encoding for a
tensor of given shape and dtype, or leaves the tensor as it is.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.core.name_globs import matches_any
from ckptmap.core.printable import advised
from ckptmap.core.quantized_codes import KeepsCodes, Repairs
from ckptmap.errors import PlanError
from ckptmap.planning.kept_codes import code_grid
from ckptmap.planning.options import Options
from ckptmap.planning.quantization_config import Declares, DeclaresEach
from ckptmap.planning.stacked_experts import StacksExperts
from ckptmap.protocols import Demands, Encoding, Refusal, Scheme
from ckptmap.protocols.offers import offers
from ckptmap.quantization.dense import Dense, DenseAs
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import FLOATING, TensorInfo


@runtime_checkable
class OfOneFormat(Protocol):
    """An encoding of one file format, `only_in`, whose codes no library reads from other files."""

    only_in: str


@runtime_checkable
class TakesModules(Protocol):
    """A scheme of a library that quantizes, and loads, only some kinds of modules."""

    def takes(self, fqn: str) -> bool:
        """Return whether the weight with this name may be one of such a module."""


@runtime_checkable
class ScalesExactly(Protocol):
    """A scheme with a form whose scales are stored without loss, at the cost of some bits."""

    def exactly(self, encoding: Encoding, info: TensorInfo) -> Encoding:
        """Return that form of an encoding, which `target` or `encoding` of this scheme returned."""


def encoding_for(
    lazy: LazyTensor, scheme: Scheme | None, options: Options, *, declared: bool = False
) -> Encoding | None:
    """Return the encoding that a tensor is encoded in anew; None: it is stored as it is.

    `declared`: a config.json tells the scheme's library which modules are quantized. Raises PlanError
    CKM203 where --encode names a tensor that the scheme cannot hold, or the library would not load it.
    """
    if scheme is None or lazy.encoding == scheme.name or matches_any(lazy.fqn, options.no_encode):
        return _repaired(lazy)
    encoding = _chosen(lazy, scheme, options)
    if declared and not options.encode and _only_decoded(lazy, scheme, encoding):
        return Dense()
    if encoding is None:
        return _repaired(lazy)
    if declared:
        _require_module(lazy, scheme)
        if _is_misread(lazy, scheme, encoding) and not options.encode:
            return Dense()
    return encoding


def as_demanded(demands: Demands, lazy: LazyTensor, chosen: Encoding | None) -> Encoding | None:
    """Return the encoding in which the format's loader wants the tensor, where it is not the one that is chosen.

    Raises PlanError CKM203 where the format holds no tensor of that encoding.
    """
    dtype = demands.dtype(lazy.fqn, lazy.info)
    if dtype is not None:
        if dtype == lazy.dtype:
            return None if lazy.encoding == "dense" else Dense()
        return DenseAs(dtype)
    encoding = lazy.encoding_ if chosen is None else chosen
    written = encoding.dtype if isinstance(encoding, DenseAs) else lazy.dtype
    reason = demands.refusal(encoding.name, written)
    if reason is not None:
        hint = "say in which dtype or blocks to write it: --to gguf-bf16, --to gguf-q8_0"
        if lazy.dtype not in FLOATING:  # which no setup casts
            hint = f"leave it out with {advised(exclude=lazy.fqn)}"
        raise PlanError("CKM203", f"{lazy.fqn}: {reason}", hint)
    return chosen


def _chosen(lazy: LazyTensor, scheme: Scheme, options: Options) -> Encoding | None:
    exact = matches_any(lazy.fqn, options.exact_scales)
    named = matches_any(lazy.fqn, options.encode)
    if options.encode and not named:
        return None
    if offers(scheme, KeepsCodes):
        grid = code_grid(lazy)
        keeping = None if grid is None else scheme.keeping(lazy.info, grid, exact)
        if keeping is not None:
            return keeping
    encoding = _fresh(lazy, scheme, named)
    if encoding is not None and exact and offers(scheme, ScalesExactly):
        return scheme.exactly(encoding, lazy.info)
    return encoding


def _only_decoded(lazy: LazyTensor, scheme: Scheme, encoding: Encoding | None) -> bool:
    """Return whether transformers, which reads codes of the scheme, could not read those of this tensor beside them."""
    loads = offers(scheme, Declares) or offers(scheme, DeclaresEach)
    if not loads or not offers(lazy.encoding_, OfOneFormat):
        return False
    return encoding is None or not _takes_module(lazy, scheme)


def _takes_module(lazy: LazyTensor, scheme: Scheme) -> bool:
    return not offers(scheme, TakesModules) or scheme.takes(lazy.fqn)


def _is_misread(lazy: LazyTensor, scheme: Scheme, encoding: Encoding) -> bool:
    return offers(scheme, StacksExperts) and bool(scheme.misread(lazy.fqn, encoding, lazy.info))


def _require_module(lazy: LazyTensor, scheme: Scheme) -> None:
    """Raise PlanError CKM203 where the scheme's library would not find the weight by its name."""
    if not _takes_module(lazy, scheme):
        raise PlanError(
            "CKM203",
            f"{lazy.fqn}: cannot be {scheme.name}: by its name it is not the weight of one linear"
            " module, and transformers would not load it",
            f"leave it as it is with {advised(no_encode=lazy.fqn)}, or write it without a config.json,"
            f" --to full-{scheme.suffix}; from codes of another scheme: first --to hf-bf16",
        )


def _fresh(lazy: LazyTensor, scheme: Scheme, named: bool) -> Encoding | None:
    """Return the encoding for the tensor's values; `named`: --encode asks for it, whatever the name."""
    if not named:
        return scheme.target(lazy.fqn, lazy.info)
    forced = scheme.encoding(lazy.info)
    if isinstance(forced, Refusal):
        raise PlanError(
            "CKM203", f"{lazy.fqn}: cannot be {scheme.name}: {forced.reason}",
            f"narrow --encode, or leave it out with {advised(no_encode=lazy.fqn)}",
        )  # fmt: skip
    return forced


def beside_ties(ckpt: Checkpoint, scheme: Scheme | None, options: Options) -> dict[str, str]:
    """Return the weights that stay as they are because a weight of the same storage does, with why.

    A head tied to an embedding stays dense with it; encoded alone it would be another tensor.
    """
    if scheme is None or options.encode:
        return {}
    reasons: dict[str, str] = {}
    for tied in ckpt.sharing():
        left = [fqn for fqn in tied if not _takes(scheme, ckpt[fqn], options)]
        if left and len(left) < len(tied):
            why = f"is one tensor with {left[0]}, which stays"
            reasons.update({fqn: why for fqn in tied if fqn not in left})
    return reasons


def _takes(scheme: Scheme, lazy: LazyTensor, options: Options) -> bool:
    encoding = scheme.target(lazy.fqn, lazy.info)
    return encoding is not None and not matches_any(lazy.fqn, options.no_encode)


def _repaired(lazy: LazyTensor) -> Encoding | None:
    """Return the encoding that a tensor which is stored malformed is written in; None: as it is."""
    encoding = lazy.encoding_
    return encoding.repaired() if offers(encoding, Repairs) else None
