"""What an output's config.json says of quantization: true of the tensors that are written."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from ckptmap.errors import PlanError
from ckptmap.formats.huggingface.loaded_names import UNKNOWN, loaded_as
from ckptmap.formats.huggingface.tied_heads import unstored
from ckptmap.protocols import Encoding
from ckptmap.tensors import TensorInfo

QUANTIZATION = "quantization_config"
OWN_LAYERS = frozenset({"falcon", "RefinedWeb", "RefinedWebModel"})
"""Model types whose linear layers are of a subclass of `nn.Linear` that no library quantizes."""


@runtime_checkable
class Declares(Protocol):
    """A scheme that a library knows by `quantization_config` in a config.json."""

    name: str

    def quantization_config(
        self, encoded: Mapping[str, TensorInfo], dense: Collection[str]
    ) -> Mapping[str, Any]:
        """`encoded`: names of the weights that are of this scheme; `dense`: names of the modules
        whose 2-D weights are not quantized."""


@runtime_checkable
class DeclaresEach(Protocol):
    """The same, for a scheme whose config depends on how each weight is quantized: `declares` are
    the names of the encodings that one config of its library can tell of together."""

    name: str
    declares: Collection[str]

    def quantization_config_of(
        self,
        encoded: Mapping[str, tuple[Encoding, TensorInfo]],
        dense: Collection[str],
        beyond: Mapping[str, Any],
    ) -> Mapping[str, Any]:
        """As `Declares.quantization_config`, with what `beyond_weights` found in the source's."""

    def beyond_weights(
        self, config: Mapping[str, Any], names: Collection[str]
    ) -> Mapping[str, Any]:
        """What a config of its library says of anything but weights, such as a quantized cache,
        by its key, as it is true of a model of these `names`."""


@runtime_checkable
class FindsByLoadedName(Protocol):
    """A scheme whose library looks a weight up by what it is called once it is loaded."""

    by_loaded_name: bool


@runtime_checkable
class Outdates(Protocol):
    """A scheme whose library does not read every config that it once wrote, though its tensors are
    written as it reads them now."""

    def outdated(self, config: Mapping[str, Any]) -> bool: ...


@dataclass(frozen=True)
class WrittenWeights:
    """What is written, by the names of the output.

    encodings  weights with their encodings and logical infos
    fresh      some of the encoded ones were encoded by this plan
    keep       what the source says is kept where it says something: no encoding was asked for, or
               parts of a scheme that is not known move as bytes
    schemes    those of the registry, by name
    foreign    parts of schemes that are not known here, which move as bytes beside them
    dense_source  no weight of the source is in an encoding: what its config says of quantization
               is done to dense ones, as BitNet does
    """

    encodings: Mapping[str, tuple[Encoding, TensorInfo]]
    fresh: bool
    keep: bool
    schemes: Mapping[str, object]
    foreign: Mapping[str, str] = field(default_factory=dict)
    dense_source: bool = False

    def config(
        self, present: Mapping[str, Any] | None, heads: Collection[str] = ()
    ) -> Mapping[str, Any] | None:
        """`quantization_config` of the output, given the source's; None: it must have none.
        `heads`: modules whose weight is tied to another; dense where no file holds it."""
        encoded: dict[str, dict[str, TensorInfo]] = {}
        dense = unstored(self.encodings, heads)
        for name, (encoding, info) in self.encodings.items():
            if encoding.name != "dense":
                encoded.setdefault(encoding.name, {})[name] = info
            elif len(info.shape) == 2 and name.endswith(".weight"):
                dense.append(name.removesuffix(".weight"))
        kept = self.keep or (encoded and not self.fresh)
        if present is not None and kept and not self._is_outdated(present, encoded):
            return present
        dense += self._loaded(dense)
        said = {name: self._said(name, infos, dense, present) for name, infos in encoded.items()}
        if None in said.values():  # only we read those: no other reader is to be promised the rest
            return None
        declared = {name: config for name, config in said.items() if config is not None}
        _check_one_library(declared, encoded)
        return next(iter(declared.values()), None)

    def undeclared(
        self, present: Mapping[str, Any] | None, wanted: Mapping[str, Any] | None
    ) -> list[str]:
        """Notes on what the source's config says of anything but weights, and the output's not."""
        lost = {
            key: None
            for each in self.schemes.values()
            if isinstance(each, DeclaresEach) and present is not None
            for key in each.beyond_weights(present, self.encodings)
            if not (wanted or {}).get(key)
        }
        methods = [(config or {}).get("quant_method") for config in (present, wanted)]
        if methods[0] and methods[0] != methods[1] and self.dense_source and not lost:
            lost = {QUANTIZATION: None}
        return [
            f"config.json no longer says {key} of {methods[0]}: the model"
            " computes without it, and scales stored for it go along unread"
            for key in lost
        ]

    def unread(self) -> list[str]:
        """Notes on encodings of this plan that config.json has no word for, so that transformers
        refuses the weights, with those that it loads."""
        if not self.fresh:
            return []
        loaded = {name for name, scheme in self.schemes.items() if isinstance(scheme, Declares)}
        for scheme in self.schemes.values():
            loaded |= set(scheme.declares) if isinstance(scheme, DeclaresEach) else set()
        names = {encoding.name for encoding, _ in self.encodings.values()} - {"dense"} - loaded
        return [
            f"transformers does not load {name}, ckptmap.load does; what it loads:"
            f" {', '.join(f'--to hf-{k}' for k in self.schemes if k in loaded and name in k.split('-')) or '--to hf'}"
            for name in sorted(names)
        ]

    def check(self, document: Mapping[str, Any]) -> None:
        """Raises PlanError CKM203 where weights were encoded for a library that looks them up by
        names which are not known for this model, that has no place for them in it, or beside what
        another library wrote."""
        coded = [
            (f, encoding.name)
            for f, (encoding, _) in self.encodings.items()
            if encoding.name != "dense"
        ]
        if not (self.fresh and coded):
            return
        _check_foreign(self.foreign, *coded[0])
        kinds = set(_model_types(document))
        if QUANTIZATION in document:
            _check_layers(*coded[0], sorted(OWN_LAYERS & kinds))
        named = [c for c in coded if isinstance(self.schemes.get(c[1]), FindsByLoadedName)]
        strange = sorted(UNKNOWN & kinds)
        if strange and named:
            fqn, scheme = named[0]
            raise PlanError(
                "CKM203",
                f"{fqn}: cannot be {scheme} beside a config.json: transformers renames the weights"
                f" of {strange[0]} while loading, and would not find {scheme} of the names on disk",
                "choose --to hf-bnb-int8, which it finds by module; or --to full-"
                f"{scheme}, which ckptmap.load takes",
            )

    def _is_outdated(self, present: Mapping[str, Any], encoded: Collection[str]) -> bool:
        """Where parts of other schemes stay, only the source's own config tells of them."""
        schemes = () if self.foreign else [self.schemes.get(name) for name in encoded]
        return any(isinstance(each, Outdates) and each.outdated(present) for each in schemes)

    def _loaded(self, modules: Collection[str]) -> list[str]:
        """What dense modules are called once loaded, where that may be another name. One of a
        quantized weight's module is left out."""
        others = loaded_as(self.encodings)
        written = {name.removesuffix(".weight") for name in self.encodings}
        return [other for name in modules for other in others(name) if other not in written]

    def _said(
        self,
        name: str,
        infos: Mapping[str, TensorInfo],
        dense: Collection[str],
        present: Mapping[str, Any] | None,
    ) -> Mapping[str, Any] | None:
        """What the scheme of this name says of its weights."""
        for each in self.schemes.values():
            if isinstance(each, DeclaresEach) and name in each.declares:
                of = {k: v for k, v in self.encodings.items() if v[0].name in each.declares}
                beyond = each.beyond_weights(present or {}, self.encodings)
                return each.quantization_config_of(of, dense, beyond)
        scheme = self.schemes.get(name)
        return scheme.quantization_config(infos, dense) if isinstance(scheme, Declares) else None


def _check_foreign(foreign: Mapping[str, str], fqn: str, scheme: str) -> None:
    """Raises PlanError CKM203 where there is such a part."""
    for part, name in foreign.items():
        raise PlanError(
            "CKM203",
            f"{fqn}: cannot be {scheme} where {part} stays {name}, since one config.json cannot"
            " declare both",
            "quantize nothing beside it, --to hf or hf-bf16; or keep both where there is no"
            f" config.json, --to full-{scheme}",
        )


def _check_layers(fqn: str, scheme: str, kinds: list[str]) -> None:
    """Raises PlanError CKM203 for model types of `OWN_LAYERS`."""
    if kinds:
        raise PlanError(
            "CKM203",
            f"{fqn}: cannot be {scheme} beside a config.json: transformers builds the linear layers"
            f" of {kinds[0]} of a class of its own, and would not load {scheme} into them",
            f"leave them as they are, --to hf or hf-bf16; or --to full-{scheme}, which ckptmap.load"
            " takes",
        )


def _model_types(config: object) -> list[str]:
    """Of a model and of the models that it consists of."""
    if not isinstance(config, dict):
        return []
    inner = [kind for value in config.values() for kind in _model_types(value)]
    found = config.get("model_type")
    return [found, *inner] if isinstance(found, str) else inner


def _check_one_library(
    said: Mapping[str, Mapping[str, Any]], encoded: Mapping[str, Mapping[str, TensorInfo]]
) -> None:
    """A config.json names one way of loading: weights of another would be left as they were
    initialised. Raises PlanError CKM203."""
    ways: dict[tuple[Any, Any], str] = {}
    for name, config in said.items():
        ways.setdefault((config.get("quant_method"), config.get("load_in_8bit")), name)
    if len(ways) < 2:
        return
    fewest, *_, most = sorted(ways.values(), key=lambda name: len(encoded[name]))
    fqn, others = next(iter(encoded[fewest])), len(encoded[fewest]) - 1
    more = f" and {others} more stay" if others else ": stays"
    raise PlanError(
        "CKM203",
        f"{fqn}{more} {fewest}, expected {most} as {len(encoded[most])} other weights, since one"
        " config.json cannot declare both",
        f"decode them all with --to hf-bf16 (-fp16, -fp32), and from that --to hf-{most}; or keep"
        " both as they are where there is no config.json, --to full",
    )
