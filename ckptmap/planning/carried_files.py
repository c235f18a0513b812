"""Files beside the weights that the output has, too: config.json, tokenizer, and files copied whole."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ckptmap.core.columns import distinct
from ckptmap.core.formatting import some
from ckptmap.planning.key_selection import Selection
from ckptmap.planning.layout_builder import TensorLayout
from ckptmap.planning.output_names import OutputNames, unknown_to_transformers
from ckptmap.planning.quantization_config import WrittenWeights
from ckptmap.planning.remarks import Remarks
from ckptmap.planning.request import Request
from ckptmap.planning.weight_encodings import WeightEncodings
from ckptmap.protocols import CarriedFile, through
from ckptmap.tensors import FLOATING

CACHE_PARTS = {
    "*.[kv]_scale": (".k_scale", ".v_scale"),
    "*.[kv]_zero_point": (".k_zero_point", ".v_zero_point"),
}
"""Pattern -> the ends of the names of parts of a KV cache: ModelOpt, compressed-tensors, vLLM."""


@dataclass(frozen=True)
class CarriedFiles:
    """Files beside the weights, by name in the output; `stem` begins the names of weight files
    where the library that loads them asks for one (None: as the writer has them)."""

    files: Mapping[str, CarriedFile]
    stem: str | None = None
    remarks: Remarks = field(default_factory=Remarks)
    inner: Mapping[str, CarriedFile] = field(default_factory=dict)
    """Files that the writer puts into its own, in some form of its format's."""


class AsItIs:
    """The weights of the output are stored as those of the config.json that is carried."""

    keeps_form = True

    def config(
        self, present: Mapping[str, object] | None, heads: Collection[str]
    ) -> Mapping[str, object] | None:
        return present

    def undeclared(
        self, present: Mapping[str, object] | None, wanted: Mapping[str, object] | None
    ) -> Sequence[str]:
        return ()

    def check(self, document: Mapping[str, object]) -> None:
        """Do nothing: the reference is loaded with this config, and the output is like it."""


def carried_files(
    request: Request,
    selection: Selection,
    names: OutputNames,
    encodings: WeightEncodings,
    layout: TensorLayout,
    so_far: Remarks,
) -> CarriedFiles:
    """Return the files that are carried; `so_far` has the keys that are dropped or unresolved.

    Raises PlanError CKM203 where config.json could not declare the encodings of the weights.
    """
    copied, carrier = selection.copied.files, request.carrier
    inner, notes = _inner_files(request)
    if carrier is None:
        return CarriedFiles(copied, remarks=Remarks(notes=notes), inner=inner)
    if request.reference is not None:
        files, notes = carrier.files(
            request.siblings, request.options.config_from, (), AsItIs(), ()
        )
        return CarriedFiles(files, carrier.stem(files), Remarks(notes=notes), inner)
    infos = [form.info for form in distinct(layout.tensors.forms).values()]
    dtypes = {info.dtype for info in infos if info.dtype in FLOATING and len(info.shape) > 1}
    weights = _written_weights(request, names, encodings, layout, so_far)
    config_from, untied = request.options.config_from, request.ckpt.untied
    files, notes = carrier.files(request.siblings, config_from, sorted(dtypes), weights, untied)
    files = {**files, **copied}
    notes = [*notes, *weights.unread(), *unknown_to_transformers(names.weights)]
    if request.aim.scheme is not None:
        notes += _cache_notes(names, files)
    return CarriedFiles(files, carrier.stem(files), Remarks(notes=notes))


def _cache_notes(names: OutputNames, files: Mapping[str, CarriedFile]) -> list[str]:
    """Return notes on parts of a quantized KV cache beside a config.json that declares no such cache."""
    found = {
        pattern: [name for name in names.weights.values() if name.endswith(ends)]
        for pattern, ends in CACHE_PARTS.items()
    }
    config = files.get("config.json") if any(found.values()) else None
    if config is not None and b'"kv_cache' in config.read():
        return []
    return [
        f"{some(parts, 1)}: part of a quantized KV cache, which the new config.json does not declare: transformers"
        f" passes over it; leave such parts out with --exclude '{pattern}'"
        for pattern, parts in found.items()
        if parts
    ]


def _inner_files(request: Request) -> tuple[Mapping[str, CarriedFile], list[str]]:
    """Return what the writer puts into its own files, and notes."""
    inner, ckpt, reference = request.setup.inner, request.ckpt, request.reference
    if inner is None:
        return {}, _unused_config(request)
    same = ckpt.index.container == request.setup.writer
    return through(inner, ckpt.files.mounts).files(
        request.siblings,
        request.options.config_from,
        ckpt.path if same else None,
        None if reference is None else reference.ckpt.path,
    )


def _unused_config(request: Request) -> list[str]:
    """Return a note where --config-from has told no names, and is not written either."""
    given, setup = request.options.config_from, request.setup.name
    if given is None or request.ckpt.translation is not None:
        return []
    return [f"--config-from {given}: is not carried over, {setup} holds no config.json"]


def _written_weights(
    request: Request,
    names: OutputNames,
    encodings: WeightEncodings,
    layout: TensorLayout,
    so_far: Remarks,
) -> WrittenWeights:
    foreign = {} if so_far.unresolved else encodings.foreign
    return WrittenWeights(
        encodings=dict(
            zip(
                map(names.weights.__getitem__, encodings.written),
                encodings.written.values(),
                strict=True,
            )
        ),
        fresh=any(
            form.encoding.name != "dense" for form in distinct(layout.encoded.forms).values()
        ),
        keep=request.aim.scheme is None or bool(encodings.foreign),
        foreign={fqn: name for fqn, name in foreign.items() if fqn not in so_far.dropped},
        dense_source=set(request.ckpt.encodings) <= {"dense"},
        given=request.options.config_from is not None,
    )
