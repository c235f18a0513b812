"""What the settings beside weights of GPTQ or AWQ state, and whether the stored tensors agree.

    {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": true, "desc_act": false,
     "checkpoint_format": "gptq"}
    {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": true, "version": "gemm"}

The stored tensors do not tell GPTQ's two versions apart, so without a statement their codes mean nothing. Sources:
`GPTQConfig` and `AwqConfig` of transformers 5.23 (utils/quantization_config.py), `QuantizeConfig` of gptqmodel 7.7
(quantization/config.py: `dynamic` states other values for some modules), auto-round 0.16 (`extra_config`
likewise; quant_method "auto-round" with a `packing_format` of theirs).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ckptmap.errors import PlanError, SourceError
from ckptmap.protocols.encodings import Encoded
from ckptmap.quantization.blockwise.group_checks import (
    CONTRADICTORY,
    contradiction,
    file_of,
    malformed,
)
from ckptmap.quantization.blockwise.word_packing import WORD
from ckptmap.quantization.gptq.columns import LISTED, ORDERED, UNORDERED, GroupedColumns
from ckptmap.quantization.gptq.encodings import AWQ_BITS, Awq, Gptq, GptqPlanes, GptqV2
from ckptmap.quantization.gptq.settings import CONFIG, Settings
from ckptmap.tensors import StoredTensor, TensorInfo

BITS = range(2, 9)
Kind: TypeAlias = type[GroupedColumns]
_PACKING: Mapping[str, Kind] = {
    "auto_round:auto_gptq": Gptq, "auto_round:gptqmodel": GptqV2, "auto_round:auto_awq": Awq,
}  # fmt: skip
_GPTQ_FORMATS: Mapping[str, Kind] = {"gptq": Gptq, "gptq_v2": GptqV2, "gptq_p": GptqPlanes}
_OVERRIDES = ("dynamic", "extra_config")
Infos: TypeAlias = Mapping[str, StoredTensor]
"""The parts of one weight that are stored, by their names."""


@dataclass(frozen=True)
class Statement:
    """What a config states for all of its quantized weights.

    bits, group   None: some modules have others, and the shapes tell
    group         -1: all inputs
    symmetric     are all zero points in the middle?
    ordered       are groups in any order, given by g_idx? None: it is not stated
    modules       the ends of names of quantized modules; empty: any
    file          the name of the file that states it
    """

    kind: Kind
    bits: int | None
    group: int | None
    symmetric: bool
    ordered: bool | None
    modules: tuple[str, ...] = ()
    file: str = CONFIG


def statement_of(settings: Settings) -> Statement | None:
    """Return what settings state; None: they are of no form that is read.

    Raise SourceError CKM115 where a number is none that the form allows.
    """
    config = settings.config
    kind = _kind(config)
    if kind is None:
        return None
    bits = _number(config, ("bits", "w_bit"), settings)
    group = _number(config, ("group_size", "q_group_size"), settings)
    if bits not in BITS or (kind is Awq and bits != AWQ_BITS):
        allowed = AWQ_BITS if kind is Awq else f"{BITS[0]} to {BITS[-1]}"
        raise _malformed(f"{kind.name} of {allowed} bits", f"bits {bits}", settings)
    if group < 1 and group != -1:
        raise _malformed("a group_size of 1 or more, or -1 for all inputs", str(group), settings)
    if any(config.get(name) for name in _OVERRIDES):
        return Statement(kind, None, None, False, None, file=settings.name)
    if kind is Awq:
        symmetric = config.get("zero_point") is False
        return Statement(kind, bits, group, symmetric, None, file=settings.name)
    ordered = config.get("desc_act")
    symmetric = config.get("sym") is True
    stated = ordered if isinstance(ordered, bool) else None
    return Statement(kind, bits, group, symmetric, stated, _modules(config), settings.name)


def _kind(config: Mapping[str, object]) -> Kind | None:
    method = config.get("quant_method")
    if config.get("is_marlin_format") is True:
        return None
    if method == "auto-round":
        return _PACKING.get(str(config.get("packing_format")))
    if method == "gptq":
        return _GPTQ_FORMATS.get(_layout(config, ("checkpoint_format", "format"), "gptq"))
    if method == "awq":
        form = _layout(config, ("version", "checkpoint_format", "format"), "gemm")
        return Awq if form == "gemm" else None
    return None


def _layout(config: Mapping[str, object], names: tuple[str, ...], default: str) -> str:
    """Return what the first of these entries states of the layout: gptqmodel has other names for AWQ than AutoAWQ."""
    stated = next((config[name] for name in names if config.get(name)), default)
    return str(stated).lower()


def _number(config: Mapping[str, object], names: tuple[str, ...], settings: Settings) -> int:
    value = next((config[name] for name in names if name in config), None)
    if type(value) is not int:
        raise _malformed(f"a number as {names[0]}", str(value)[:40], settings)
    return value


def _modules(config: Mapping[str, object]) -> tuple[str, ...]:
    """Return the entries of `modules_in_block_to_quantize`, a list of lists of names."""
    lists = config.get("modules_in_block_to_quantize")
    names = [
        name
        for some in (lists if isinstance(lists, list) else ())
        for name in (some if isinstance(some, list) else [some])
        if isinstance(name, str)
    ]
    return (*names, "lm_head") if names else ()


def _malformed(expected: str, found: str, settings: Settings) -> SourceError:
    return SourceError(
        "CKM115",
        f"{settings.section}, expected {expected}, found {found!r}: beside {settings.weights}",
        f"restore the {settings.name} that the weights were saved with",
    )


# ------------------------------------------------------------------------------- of one weight


def encoding_of(
    fqn: str, said: Statement, parts: Infos, dtype: str
) -> tuple[GroupedColumns, TensorInfo]:
    """Return the encoding and the logical info of a weight. Raise SourceError CKM115 for a contradiction."""
    codes, scales, zeros = parts["qweight"], parts["scales"], parts.get("qzeros")
    if zeros is None:
        raise malformed(fqn, f"qweight {codes.info} and scales, without qzeros: {file_of(codes)}")
    for part in (codes, scales, zeros):
        if len(part.info.shape) != 2 or not part.info.numel:
            said_so = f"{part.info}, expected a matrix: {file_of(part)}"
            raise malformed(fqn, said_so, CONTRADICTORY)
    groups, rows = scales.info.shape
    bits = said.bits or zeros.info.shape[1] * WORD // rows
    width = codes.info.shape[0] if said.kind is Awq else codes.info.shape[0] * WORD // max(1, bits)
    group = said.group if said.group is not None else -(-width // groups)
    group = width if group == -1 else min(group, width)
    order = _order(fqn, said, parts)
    encoding = said.kind(bits, group, scales.info.dtype, said.symmetric, order)
    info = TensorInfo((rows, width), dtype)
    for stated, shown, part in _contradictions(fqn, said, encoding, info, parts):
        raise contradiction(fqn, f"{said.file} states {stated}", shown, part)
    return encoding, info


def _order(fqn: str, said: Statement, parts: Infos) -> str:
    index = parts.get("g_idx")
    if index is None:
        if said.ordered:
            shown = f"no g_idx is stored beside qweight {parts['qweight'].info}"
            stated = f"{said.file} states desc_act true"
            raise contradiction(fqn, stated, shown, parts["qweight"])
        return UNORDERED
    return LISTED if said.ordered is False else ORDERED


def _contradictions(
    fqn: str, said: Statement, encoding: GroupedColumns, info: TensorInfo, parts: Infos
) -> Iterator[tuple[str, str, StoredTensor]]:
    """Yield (the config's statement, what a stored tensor shows, that tensor)."""
    rows, width = info.shape
    codes, scales, zeros = parts["qweight"], parts["scales"], parts["qzeros"]
    words = encoding.packing.words(rows)
    if zeros.info.shape[1] != words:
        have = zeros.info.shape[1] * WORD / rows
        shown = f"qzeros {zeros.info} beside scales {scales.info} have {have:g} bits"
        yield f"bits {encoding.bits}", shown, zeros
    across = codes.info.shape[1]
    if across != encoding.words(info)[1]:
        shown = f"qweight {codes.info} beside scales {scales.info} is not packed so"
        yield f"quant_method {encoding.name!r} of {encoding.bits} bits", shown, codes
    index = parts.get("g_idx")
    if index is not None and index.info.shape != (width,):
        shown = f"qweight {codes.info} has {width} inputs and g_idx {index.info} another number"
        yield f"bits {encoding.bits}", shown, index
    if -(-width // encoding.group) != scales.info.shape[0]:
        shown = f"scales {scales.info} of {width} inputs are not so many groups"
        yield f"group_size {said.group}", shown, scales
    if said.kind is Awq and width % encoding.group:
        shown = f"qweight {codes.info} has {width} inputs, not whole groups: rows of codes are missing, or too many"
        yield f"group_size {encoding.group}", shown, codes
    module = fqn.removesuffix(".weight")
    if said.modules and not any(f".{module}".endswith(f".{name}") for name in said.modules):
        shown = f"{module} is stored as codes, {codes.info}"
        yield f"modules_in_block_to_quantize {', '.join(said.modules)[:120]!r}", shown, codes


# ------------------------------------------------------------------------------- as it is written


def declared(
    name: str, encoded: Mapping[str, Encoded], dense: Collection[str]
) -> Mapping[str, object]:
    """Return the config of weights of one form. Raise PlanError CKM203 where they are of several."""
    forms: dict[tuple[Kind, int, int, bool, bool], str] = {}
    for fqn, (encoding, info) in encoded.items():
        if isinstance(encoding, GroupedColumns):
            group = -1 if encoding.group == info.shape[1] else encoding.group
            ordered = encoding.order == ORDERED
            form = type(encoding), encoding.bits, group, encoding.symmetric, ordered
            forms.setdefault(form, fqn)
    if len(forms) > 1:
        first, second, *_ = forms.values()
        raise PlanError(
            "CKM203",
            f"{first} and {second} are {name} of other bits or groups, which one config does not state",
            "put the config.json that they were saved with beside them; or decode them, --to hf-bf16",
        )
    (kind, bits, group, symmetric, ordered), *_ = forms
    config: dict[str, object] = {"quant_method": name, "bits": bits, "group_size": group}
    if kind is Awq:
        return config | {
            "version": "gemm", "zero_point": not symmetric, "modules_to_not_convert": sorted(dense),
        }  # fmt: skip
    version = next(form for form, made in _GPTQ_FORMATS.items() if made is kind)
    return config | {"sym": symmetric, "desc_act": ordered, "checkpoint_format": version}
