"""The encoding that each weight has in the output: the one it is stored in, or a new one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol, runtime_checkable

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.logical_tensors import DENSE
from ckptmap.core.columns import distinct, each, few
from ckptmap.core.name_globs import matches_any
from ckptmap.core.printable import advised
from ckptmap.core.quantized_codes import KeepsCodes, ScalesActivations
from ckptmap.core.tensor_table import listed
from ckptmap.core.weight_columns import WeightForm, WeightKind
from ckptmap.mapping.model_config import readable_config, types_within
from ckptmap.planning.encoding_choice import (
    OfOneFormat,
    as_demanded,
    beside_ties,
    encoding_for,
)
from ckptmap.planning.key_selection import Selection
from ckptmap.planning.options import Options
from ckptmap.planning.read_by_code import read_by_code
from ckptmap.planning.reference_encodings import reference_encodings
from ckptmap.planning.remarks import Remarks, Unresolved
from ckptmap.planning.request import Request
from ckptmap.protocols import Encoding, Refusal, Scheme
from ckptmap.protocols.encodings import Encoded
from ckptmap.protocols.offers import offers
from ckptmap.quantization.linear_weights import CONV1D_MODELS, is_expert
from ckptmap.quantization.unsupported_schemes import (
    CODES,
    INT8_WITHOUT_SCALES,
    RESTORE,
    WITHOUT_SCALES,
    codes_of_method,
    foreign_tensors,
    may_be_codes,
    who_reads,
)
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import TensorInfo

ROUND = 4096
"""A multiple of every block size. A weight that the scheme would take in a shape rounded up to it
stays as it is because of its shape."""


@runtime_checkable
class TakesByForm(Protocol):
    """A scheme whose `target` looks at shape and dtype, and at no name."""

    takes_by_form: bool


@runtime_checkable
class TakesConv1D(Protocol):
    """A scheme whose library quantizes `Conv1D` of GPT-2, too: the transpose of the stored weight."""

    def across(self, fqn: str, info: TensorInfo) -> Encoding | None:
        """Return the encoding of such a weight, of a model that is known to have these modules; None: it is none."""


@runtime_checkable
class FallsBack(Protocol):
    """A scheme that stores a weight which its blocks cannot hold in a dtype instead."""

    def fallback(self, encoding: Encoding, info: TensorInfo) -> str:
        """Return in which dtype, and why, if this is such an encoding of a weight; "" if not."""


@dataclass(frozen=True)
class WeightEncodings:
    """How each weight is encoded in the output.

    anew           FQN -> the encoding it is encoded in; other weights are stored as they are
    written        FQN of every weight that is written -> its encoding and logical info
    foreign        FQN of a part of a quantized tensor that cannot be decoded here -> its scheme
    beside_ties    FQN -> which tied weight keeps a weight from being encoded
    left_by_shape  FQN -> why a weight whose name the scheme takes, or that may hold codes, stays as it is
    """

    anew: Mapping[str, Encoding]
    written: Mapping[str, Encoded]
    foreign: Mapping[str, str]
    beside_ties: Mapping[str, str]
    left_by_shape: Mapping[str, str]
    remarks: Remarks


def weight_encodings(request: Request, selection: Selection) -> WeightEncodings:
    """Choose the encoding of each weight that is written.

    Raises PlanError CKM203 where --encode names a weight that the scheme cannot hold, CKM212 where the
    checkpoint of --as is of another model.
    """
    if request.reference is not None:
        anew, written, remarks = reference_encodings(request, selection, request.reference)
        return WeightEncodings(anew, written, {}, {}, {}, remarks)
    return _by_scheme(request, selection)


def _by_scheme(request: Request, selection: Selection) -> WeightEncodings:
    """Choose the encodings as `--to` says."""
    ckpt, scheme = request.ckpt, request.aim.scheme
    demands = request.setup.demands
    stored_dense = _stored_dense(ckpt) if scheme is None and demands is None else {}
    foreign = foreign_tensors(ckpt.infos()) if scheme is not None else {}
    if scheme is not None and not ckpt.groups.forms():
        foreign = _named_by_config(request, foreign) if foreign else _codes_of_a_method(request)
    unstated = _unstated(request, selection)
    if unstated:
        remarks = Remarks({}, unstated, [])
        return WeightEncodings({}, _dense(ckpt.infos(), selection), foreign, {}, {}, remarks)
    beside = beside_ties(ckpt, scheme, request.options)
    if scheme is not None and not request.options.encode:
        beside |= read_by_code(ckpt, scheme, types_within(_config(request)))
    dense = _dense(stored_dense, selection)
    if len(dense) == len(selection.written):
        return WeightEncodings({}, dense, foreign, beside, {}, Remarks())
    fqns = selection.written
    kinds = ckpt.kinds(fqns)
    choice = _Choice(request, foreign, beside)
    chosen = choice.of_all(fqns, kinds)
    anew = {fqn: one.encoding for fqn, one in zip(fqns, chosen, strict=True) if one.encoding}
    written = dict(zip(fqns, [one.written for one in chosen], strict=True))
    left: dict[str, str] = {}
    if any(one.left for one in distinct(chosen).values()):
        left = {fqn: one.left for fqn, one in zip(fqns, chosen, strict=True) if one.left}
    unresolved = [
        part
        for fqn in (fqns if foreign else ())
        if fqn in foreign
        for part in _foreign_part(request, fqn, foreign[fqn])
    ]
    scales: dict[str, str] = {}
    if not all(map(_is_silent, distinct(kinds).values())):
        scales = _activation_scales(ckpt, anew, dict(zip(fqns, kinds, strict=True)))
    notes = [*_decoded(ckpt, anew, scheme), *_fallbacks(written, scheme)]
    remarks = Remarks(scales, unresolved, notes)
    return WeightEncodings(anew, written, foreign, beside, left, remarks)


class _Chosen(NamedTuple):
    """What becomes of a weight.

    encoding  the new encoding; None: it is stored as it is
    written   the encoding that it has then, with its logical info
    left      why its shape alone keeps it from being encoded; "": it does not
    """

    encoding: Encoding | None
    written: Encoded
    left: str = ""


class _Choice:
    """Chooses the encoding of each weight; once for all of a kind where names do not matter."""

    def __init__(self, request: Request, foreign: Collection[str], beside: Collection[str]) -> None:
        self._request, self._foreign, self._beside = request, foreign, beside
        self._scheme, self._demands = request.aim.scheme, request.setup.demands
        self._made: dict[Encoding, Encoding] = {}

    def of_all(self, fqns: Sequence[str], kinds: Sequence[WeightKind]) -> list[_Chosen]:
        """Return what becomes of each weight, which is one object for all that become the same."""
        options = self._request.options
        by_name = bool(options.encode or options.no_encode or options.exact_scales)
        by_name |= self._scheme is not None and not offers(self._scheme, TakesByForm)
        by_name |= self._demands is not None
        if by_name:
            return list(map(self._of, fqns))
        keys: list[object] = list(map(id, kinds))
        if self._foreign or self._beside:
            alone = {*self._foreign, *self._beside}
            keys = [fqn if fqn in alone else key for fqn, key in zip(fqns, keys, strict=True)]
        chosen: dict[object, _Chosen] = {}
        for fqn, key in zip(fqns, keys, strict=True):
            if key not in chosen:
                chosen[key] = self._of(fqn)
        return list(map(chosen.__getitem__, keys))

    def _of(self, fqn: str) -> _Chosen:
        request, scheme = self._request, self._scheme
        lazy, encoding = request.ckpt[fqn], None
        if fqn not in self._foreign:
            encoding = self._across(lazy) or encoding_for(
                lazy,
                None if fqn in self._beside else scheme,
                request.options,
                declared=request.setup.carrier is not None,
            )
            if self._demands is not None:
                encoding = as_demanded(self._demands, lazy, encoding)
        if encoding is not None:
            encoding = _one_object(encoding, self._made)
            return _Chosen(encoding, (encoding, lazy.info))
        left = ""
        if scheme is not None and not request.options.encode:
            left = _left_by_shape(lazy, scheme, request.options)
        return _Chosen(None, (lazy.encoding_, lazy.info), left)

    def _across(self, lazy: LazyTensor) -> Encoding | None:
        """Return the encoding of a `Conv1D`, where config.json tells that the model has them."""
        scheme, options = self._scheme, self._request.options
        if scheme is None or not self._has_conv1d or lazy.encoding == scheme.name:
            return None
        asked = not options.encode or matches_any(lazy.fqn, options.encode)
        if not asked or matches_any(lazy.fqn, options.no_encode) or lazy.fqn in self._beside:
            return None
        return scheme.across(lazy.fqn, lazy.info) if offers(scheme, TakesConv1D) else None

    @cached_property
    def _has_conv1d(self) -> bool:
        if self._request.carrier is None or not offers(self._scheme, TakesConv1D):
            return False
        return str((_config(self._request) or {}).get("model_type")) in CONV1D_MODELS


def _config(request: Request) -> Mapping[str, object] | None:
    """Return the config.json of the model; None where there is none, or it cannot be read, which others refuse."""
    return _config_of(request, request.options.config_from)


def _config_of(request: Request, given: str | None) -> Mapping[str, object] | None:
    ckpt = request.ckpt
    return readable_config(ckpt.sidecar_dir, ckpt.files.mounts, given)


def _codes_of_a_method(request: Request) -> dict[str, str]:
    """Return what may be codes where nothing is decoded and config.json beside them states a quantization."""
    infos = request.ckpt.infos()
    if CODES.isdisjoint(info.dtype for info in few(infos)):
        return {}
    method = _stated_quantization(request).get("quant_method")
    return codes_of_method(infos, str(method)) if method else {}


def _named_by_config(request: Request, foreign: dict[str, str]) -> dict[str, str]:
    """Return foreign parts under the name of the form that config.json states, if their names are of a form that is read."""
    stated = _unread(request)
    return dict.fromkeys(foreign, stated) if stated else foreign


def _unstated(request: Request, selection: Selection) -> list[Unresolved]:
    """Return the parts of a form that config.json alone tells from another, for an output without one.

    There the codes would be decoded as the other form.
    """
    if request.setup.carrier is not None or request.ckpt.groups.forms():
        return []
    infos = request.ckpt.infos()
    if CODES.isdisjoint(info.dtype for info in few(infos)):
        return []
    stated = _unread(request)
    parts = foreign_tensors(infos) if stated else {}
    why = f"is part of a {stated} tensor, which only config.json tells, and {request.aim.text} has none"
    return [
        Unresolved(fqn, why, "keep it beside its config.json: --to hf")
        for fqn in selection.written
        if fqn in parts
    ]


def _unread(request: Request) -> str:
    from ckptmap.quantization.unread_statements import (
        unread_form,  # few have codes that nobody decodes
    )

    return unread_form(_stated_quantization(request))


def _stated_quantization(request: Request) -> Mapping[str, object]:
    stated = (_config_of(request, None) or {}).get("quantization_config")
    return stated if isinstance(stated, Mapping) else {}


def _decoded(ckpt: Checkpoint, anew: Mapping[str, Encoding], scheme: Scheme | None) -> list[str]:
    """Return notes on quantized weights that are dense in the output of a scheme that keeps other codes."""
    if scheme is None or not isinstance(scheme, KeepsCodes):
        return []
    expert = "is an expert, which transformers would not decode in the blocks of its codes"
    dense = [fqn for fqn, encoding in anew.items() if encoding.name == "dense"]
    before = {fqn: ckpt[fqn].encoding_ for fqn in dense}
    reasons = {
        fqn: f"has codes of {encoding.only_in} files, and is no layer that {scheme.name} takes"
        for fqn, encoding in before.items()
        if offers(encoding, OfOneFormat)
    }
    reasons |= {fqn: expert for fqn in dense if fqn not in reasons and is_expert(fqn)}
    return listed("is written dense", reasons)


def _fallbacks(written: Mapping[str, Encoded], scheme: Scheme | None) -> list[str]:
    """Return a note on weights that are in no blocks of the scheme, but in a dtype instead."""
    if not offers(scheme, FallsBack):
        return []
    reasons = {fqn: scheme.fallback(encoding, info) for fqn, (encoding, info) in written.items()}
    return listed("not in blocks", {fqn: reason for fqn, reason in reasons.items() if reason})


def _activation_scales(
    ckpt: Checkpoint, anew: Mapping[str, Encoding], kinds: Mapping[str, WeightKind]
) -> dict[str, str]:
    """Return the scales of activations that belong to weights of other encodings now, with why."""
    dropped: dict[str, str] = {}
    origins = ckpt.origins
    silent = {key for key, kind in distinct(kinds.values()).items() if _is_silent(kind)}
    for fqn in anew:
        if id(kinds[fqn]) in silent:
            continue
        for source in ckpt[fqn].sources:
            encoding = source.encoding_
            # A weight that is only renamed is its own source, by its new name.
            key = origins.get(fqn, (fqn,))[0] if source.fqn == fqn else source.fqn
            scales = encoding.activation_keys(key) if offers(encoding, ScalesActivations) else ()
            if scales:
                form = encoding.name.partition("+")[0]  # without a change by an adapter
                why = f"scales the activations of {key}, which is no longer stored as {form}"
                dropped |= dict.fromkeys(scales, why)
    return dropped


def _is_silent(kind: WeightKind) -> bool:
    """Return whether weights of this kind are known to have no scales of activations, whatever their names."""
    if not isinstance(kind, WeightForm):
        return isinstance(kind, TensorInfo)
    encoding = kind.encoding
    return not offers(encoding, ScalesActivations) or not encoding.activation_keys("weight")


def _one_object(encoding: Encoding, made: dict[Encoding, Encoding]) -> Encoding:
    """Return the encoding in `made` that equals this one: what follows works once for each object."""
    try:
        return made.setdefault(encoding, encoding)
    except TypeError:  # of somebody's package, and not hashable
        return encoding


def _stored_dense(ckpt: Checkpoint) -> Mapping[str, TensorInfo]:
    """Return the weights that are one plain tensor each."""
    encoded = ckpt.groups.forms()
    return {fqn: info for fqn, info in ckpt.infos().items() if fqn not in encoded}


def _dense(infos: Mapping[str, TensorInfo], selection: Selection) -> dict[str, Encoded]:
    fqns = [fqn for fqn in selection.written if fqn in infos] if infos else []
    kinds = each([infos[fqn] for fqn in fqns], lambda info: (DENSE, info))
    return dict(zip(fqns, kinds, strict=True))


def _foreign_part(request: Request, fqn: str, scheme: str) -> list[Unresolved]:
    """Return the part of a quantized tensor as unresolved, unless the user asks to keep its bytes."""
    if matches_any(fqn, request.options.no_encode):
        return []
    restorable = scheme in (WITHOUT_SCALES, INT8_WITHOUT_SCALES)
    restore = RESTORE if restorable else who_reads(scheme)
    return [
        Unresolved(
            fqn,
            f"is part of a {scheme} tensor, which cannot be decoded for {request.aim.text}",
            f"{restore}move it as bytes: --to {request.setup.name}, or {advised(no_encode=fqn)}",
        )
    ]


def _left_by_shape(lazy: LazyTensor, scheme: Scheme, options: Options) -> str:
    """Return why a weight stays as it is where its shape alone keeps it from being encoded, or a dtype of codes."""
    if lazy.encoding_.name != "dense" or matches_any(lazy.fqn, options.no_encode):
        return ""
    info = lazy.info
    rounded = TensorInfo(tuple(-(-extent // ROUND) * ROUND for extent in info.shape), info.dtype)
    if scheme.target(lazy.fqn, info) is not None:
        return ""
    if scheme.target(lazy.fqn, rounded) is None and not may_be_codes(info):
        return ""
    refused = scheme.encoding(info)
    if isinstance(refused, Refusal):
        return f"cannot be {scheme.name}: {refused.reason}"
    # The scheme can hold it, and leaves it for the sake of the library that loads it.
    return f"is not made {scheme.name} by default in shape {list(info.shape)}"
