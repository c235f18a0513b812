"""`quantization_config` of the output's config.json, which must be true of the weights that are written.

transformers loads quantized weights by it: which library, which block sizes, which modules are not
quantized. Each scheme knows what its library expects there, and returns it by the protocols below.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, runtime_checkable

from ckptmap import registry
from ckptmap.core.columns import distinct, few
from ckptmap.core.formatting import counted
from ckptmap.core.tensor_table import listed
from ckptmap.errors import PlanError
from ckptmap.formats.huggingface.loaded_names import loaded_as
from ckptmap.formats.huggingface.tied_heads import copies, unstored
from ckptmap.mapping.model_config import types_within
from ckptmap.planning.packed_layers import require_initializable
from ckptmap.planning.renamed_layers import require_found
from ckptmap.planning.stacked_experts import StacksExperts, misread_experts, require_experts_found
from ckptmap.protocols import Encoding
from ckptmap.protocols.encodings import Encoded
from ckptmap.protocols.offers import offers
from ckptmap.tensors import TensorInfo

QUANTIZATION = "quantization_config"
OWN_LAYERS = frozenset({"falcon", "ibert", "RefinedWeb", "RefinedWebModel"})
"""Model types whose linear layers are of a class of their own, into which no library's codes are loaded."""


WHILE_LOADING = frozenset({"bitnet"})
"""Methods by which transformers quantizes dense weights while it loads them; the others expect their own parts."""
STACKED = ".feed_forward.experts.gate_up_proj"
"""The experts of a layer of Llama 4, in one tensor."""
TAKE_APART = frozenset({"bitsandbytes", "compressed-tensors"})
"""Libraries for which transformers replaces these experts by one module each (5.23, quantizers/base.py
`MODULES_TO_PATCH_FOR_QUANTIZATION`)."""


@runtime_checkable
class Declares(Protocol):
    """A scheme that transformers loads by `quantization_config`."""

    name: str

    def quantization_config(
        self, encoded: Mapping[str, TensorInfo], dense: Collection[str]
    ) -> Mapping[str, object]:
        """Return the `quantization_config` for weights of this scheme, `encoded` by name.

        `dense` are the names of the modules whose 2-D weights are not quantized.
        """


@runtime_checkable
class DeclaresEach(Protocol):
    """A scheme whose config depends on how each weight is quantized.

    `declares` are the names of the encodings that one config of its library can declare together.
    """

    name: str
    declares: Collection[str]

    def quantization_config_of(
        self,
        encoded: Mapping[str, Encoded],
        dense: Collection[str],
        beyond: Mapping[str, object],
    ) -> Mapping[str, object]:
        """Return as `Declares.quantization_config`; `beyond` is what `beyond_weights` returned of the
        source's config."""

    def beyond_weights(
        self, config: Mapping[str, object], names: Collection[str]
    ) -> Mapping[str, object]:
        """Return the entries of a config that are not about weights, such as a quantized KV cache, as
        they hold for a model with weights of these `names`."""


@runtime_checkable
class ServesModels(Protocol):
    """A scheme whose library loads it into models of some types only, `model_type` of config.json."""

    model_types: Collection[str]


@runtime_checkable
class Outdates(Protocol):
    """A scheme whose library no longer reads every config that it once wrote. The tensors are written
    as it reads them now."""

    def outdated(self, config: Mapping[str, object]) -> bool:
        """Return whether the library no longer reads this config."""


@runtime_checkable
class ReadBySome(Protocol):
    """An encoding with forms that its own library, or transformers, no longer loads."""

    def unread(self) -> str:
        """Return why this form is not loaded, and by whom it is; "" where it is loaded."""


@runtime_checkable
class RoundedOnLoading(Protocol):
    """An encoding whose scales transformers casts to the dtype of the model while it loads them."""

    def rounded(self, info: TensorInfo) -> str:
        """Return how it rounds the scales of a weight; "" where their dtype is that of the weight."""


@dataclass(frozen=True)
class WrittenWeights:
    """The weights that are written, by their names in the output.

    encodings     each weight's encoding and logical info
    fresh         did this plan encode some of them?
    keep          is the config of the source kept, if it has one? True where no encoding was asked
                  for, or parts of an unknown scheme move as bytes
    foreign       parts of unknown schemes that move as bytes -> their scheme
    dense_source  are all weights of the source dense? Its config then quantizes dense weights while
                  it loads them, as BitNet does
    given         is the config that of another checkpoint, by --config-from?
    """

    encodings: Mapping[str, Encoded]
    fresh: bool
    keep: bool
    foreign: Mapping[str, str] = field(default_factory=dict)
    dense_source: bool = False
    given: bool = False

    @property
    def keeps_form(self) -> bool:
        """Whether all weights are stored as in the source, beside whose weights the config lies."""
        return self.keep and not self.fresh and not (self.given and self.dense_source)

    @cached_property
    def schemes(self) -> Mapping[str, object]:
        """The schemes of the registry, by name: for outputs with encoded weights."""
        return {scheme.name: scheme for scheme in registry.schemes()}

    def config(
        self, present: Mapping[str, object] | None, heads: Collection[str] = ()
    ) -> Mapping[str, object] | None:
        """Return the `quantization_config` of the output; None: it must have none.

        `present` is the source's. `heads` are modules whose weight is tied to another; they are dense
        where no file holds the weight.
        """
        encoded: dict[str, dict[str, TensorInfo]] = {}
        for name, (encoding, info) in self.encodings.items():
            if encoding.name != "dense":
                encoded.setdefault(encoding.name, {})[name] = info
        keeps_config = self.keep or (encoded and not self.fresh)
        if present is not None and not encoded and self._is_of_other_weights(present):
            return None
        if present is not None and keeps_config and not self._is_outdated(present, encoded):
            return present
        if not encoded:
            return None
        dense = self._dense_modules(heads)
        declared: dict[str, Mapping[str, object]] = {}
        for name, infos in encoded.items():
            config = self._declare(name, infos, dense, present)
            if config is None:  # ckptmap alone reads these, so no other reader is promised the rest
                return None
            declared[name] = config
        _require_one_library(declared, encoded)
        return next(iter(declared.values()), None)

    def _is_of_other_weights(self, present: Mapping[str, object]) -> bool:
        """Return whether the config of another checkpoint says how that one's weights are stored: it is a
        low-bit release, and these weights were trained from its values."""
        method = present.get("quant_method")
        return self.given and self.dense_source and not self.foreign and method not in WHILE_LOADING

    def undeclared(
        self, present: Mapping[str, object] | None, written: Mapping[str, object] | None
    ) -> list[str]:
        """Return notes on what the source's config declares besides weights, and the output's not."""
        undeclared_keys = {
            key: None
            for scheme in registry.schemes_of_method((present or {}).get("quant_method"))
            if isinstance(scheme, DeclaresEach) and present is not None
            for key in scheme.beyond_weights(present, self.encodings)
            if not (written or {}).get(key)
        }
        methods = [(config or {}).get("quant_method") for config in (present, written)]
        if methods[0] and methods[0] != methods[1] and self.dense_source and not undeclared_keys:
            if present is not None and self._is_of_other_weights(present):
                return [] if written else [_left_out(methods[0])]
            undeclared_keys = {QUANTIZATION: None}
        return [
            f"config.json no longer says {key} of {methods[0]}: the model"
            " computes without it, and scales stored for it stay in the output unread"
            for key in undeclared_keys
        ]

    def unread(self) -> list[str]:
        """Return notes on encodings that config.json cannot declare, so that transformers refuses the
        weights; they name the encodings that it loads. Then notes on forms that only others load."""
        kinds = distinct([encoding for encoding, _ in few(self.encodings)]).values()
        some = (
            {
                fqn: encoding.unread()
                for fqn, (encoding, _) in self.encodings.items()
                if offers(encoding, ReadBySome)
            }
            if any(offers(kind, ReadBySome) for kind in kinds)
            else {}
        )
        notes = listed("not loaded by all", {fqn: reason for fqn, reason in some.items() if reason})
        if not self.fresh:
            return notes
        rounded = {
            fqn: encoding.rounded(info)
            for fqn, (encoding, info) in self.encodings.items()
            if offers(encoding, RoundedOnLoading)
        }
        notes += listed(
            "rounded by transformers", {fqn: how for fqn, how in rounded.items() if how}
        )
        loaded = {name for name, scheme in self.schemes.items() if isinstance(scheme, Declares)}
        for scheme in self.schemes.values():
            loaded |= set(scheme.declares) if isinstance(scheme, DeclaresEach) else set()
        names = {encoding.name for encoding, _ in self.encodings.values()} - {"dense"} - loaded
        notes += [self._unread_note(name, loaded) for name in sorted(names)]
        return notes + misread_experts(self.encodings, self._misread)

    def _misread(self, fqn: str, encoding: Encoding, info: TensorInfo) -> str:
        scheme = self.schemes.get(encoding.name)
        return scheme.misread(fqn, encoding, info) if isinstance(scheme, StacksExperts) else ""

    def _unread_note(self, name: str, loaded: Collection[str]) -> str:
        similar = [other for other in self.schemes if other in loaded and name in other.split("-")]
        setups = ", ".join(f"--to hf-{other}" for other in similar) or "--to hf"
        return f"transformers does not load {name}, ckptmap.load does; what it loads: {setups}"

    def check(self, document: Mapping[str, object]) -> None:
        """Raise PlanError CKM203 where the library could not load what this plan encoded.

        It may look weights up by names that are not known for this model, have no place for them in
        it, or find beside them what another library wrote.
        """
        if not self.fresh:
            return
        encoded = [
            (fqn, encoding.name)
            for fqn, (encoding, _) in self.encodings.items()
            if encoding.name != "dense"
        ]
        if not encoded:
            return
        _require_no_foreign(self.foreign, *encoded[0])
        model_types = set(types_within(document))
        if QUANTIZATION in document:
            _require_torch_linear(*encoded[0], sorted(OWN_LAYERS & model_types))
            self._require_experts_found(*encoded[0], document[QUANTIZATION])
            require_experts_found(self.encodings, document[QUANTIZATION])
            require_initializable(self.encodings, document, model_types)
        self._require_served(encoded, model_types)
        require_found(self.encodings, self.schemes, document.get(QUANTIZATION), model_types)

    def _require_experts_found(self, fqn: str, scheme: str, settings: object) -> None:
        """Raise PlanError CKM203 where transformers takes the stacked experts of Llama 4 apart for the
        library, and finds none of them by its new names."""
        method = settings.get("quant_method") if isinstance(settings, dict) else None
        stacked = next((name for name in self.encodings if name.endswith(STACKED)), None)
        if stacked is None or method not in TAKE_APART:
            return
        raise PlanError(
            "CKM203",
            f"{fqn}: cannot be {scheme} beside a config.json: transformers takes {stacked} apart for"
            f" {method}, and would initialize the experts at random",
            "give each expert a module of its own, --names hf-modules; or choose --to hf-int8, with which they stay",
        )

    def _require_served(self, encoded: Collection[tuple[str, str]], types: Collection[str]) -> None:
        """Raise PlanError CKM203 where the library does not load an encoding into such a model."""
        for fqn, name in encoded:
            scheme = self.schemes.get(name)
            if not isinstance(scheme, ServesModels) or not types:
                continue
            if set(scheme.model_types).isdisjoint(types):
                raise PlanError(
                    "CKM203",
                    f"{fqn}: cannot be {name} beside a config.json of {sorted(types)[0]}: transformers"
                    f" loads {name} into {', '.join(scheme.model_types)} alone",
                    f"choose another encoding; or --to full-{name}, which ckptmap.load takes",
                )

    def _is_outdated(self, present: Mapping[str, object], encoded: Collection[str]) -> bool:
        """Return whether the library of an encoding no longer reads the source's config."""
        if self.foreign:  # only the source's config tells of parts that move as bytes
            return False
        schemes = [self.schemes.get(name) for name in encoded]
        return any(isinstance(scheme, Outdates) and scheme.outdated(present) for scheme in schemes)

    def _dense_modules(self, heads: Collection[str]) -> list[str]:
        """Return the modules whose matrix is not quantized, by all names that they may have."""
        dense = unstored(self.encodings, heads)
        for name, (encoding, info) in self.encodings.items():
            if encoding.name == "dense" and len(info.shape) == 2 and name.endswith(".weight"):
                dense.append(name.removesuffix(".weight"))
        dense += copies(dense, self.encodings)
        return dense + self._names_once_loaded(dense)

    def _names_once_loaded(self, modules: Collection[str]) -> list[str]:
        """Return the other names that dense modules may have in the loaded model, but those of modules
        with a weight in the output."""
        others = loaded_as(self.encodings)
        written = {name.removesuffix(".weight") for name in self.encodings}
        return [other for name in modules for other in others(name) if other not in written]

    def _declare(
        self,
        name: str,
        infos: Mapping[str, TensorInfo],
        dense: Collection[str],
        present: Mapping[str, object] | None,
    ) -> Mapping[str, object] | None:
        """Return the `quantization_config` of the encoding of this name; None: no library reads it."""
        for each in self.schemes.values():
            if isinstance(each, DeclaresEach) and name in each.declares:
                encoded = {k: v for k, v in self.encodings.items() if v[0].name in each.declares}
                beyond = each.beyond_weights(present or {}, self.encodings)
                return each.quantization_config_of(encoded, dense, beyond)
        scheme = self.schemes.get(name)
        return scheme.quantization_config(infos, dense) if isinstance(scheme, Declares) else None


def _left_out(method: object) -> str:
    return (
        f"{QUANTIZATION} of {method} is left out of config.json: the weights are dense; to give them the form"
        " of that checkpoint: --as PATH in place of --to"
    )


def _require_no_foreign(foreign: Mapping[str, str], fqn: str, scheme: str) -> None:
    """Raise PlanError CKM203 where parts of an unknown scheme stay beside an encoded weight."""
    for part, name in foreign.items():
        raise PlanError(
            "CKM203",
            f"{fqn}: cannot be {scheme} where {part} stays {name}, since one config.json cannot"
            " declare both",
            "quantize nothing beside it, --to hf or hf-bf16; or keep both where there is no"
            f" config.json, --to full-{scheme}",
        )


def _require_torch_linear(fqn: str, scheme: str, own_layers: list[str]) -> None:
    """Raise PlanError CKM203 where the model has linear layers of its own class (`OWN_LAYERS`)."""
    if own_layers:
        raise PlanError(
            "CKM203",
            f"{fqn}: cannot be {scheme} beside a config.json: transformers builds the linear layers"
            f" of {own_layers[0]} of a class of its own, and would not load {scheme} into them",
            f"leave them as they are, --to hf or hf-bf16; or --to full-{scheme}, which ckptmap.load"
            " takes",
        )


def _require_one_library(
    declared: Mapping[str, Mapping[str, object]], encoded: Mapping[str, Mapping[str, TensorInfo]]
) -> None:
    """Raise PlanError CKM203 where the weights need more than one library.

    A config.json names one; weights of another would be left as they were initialized.
    """
    libraries: dict[tuple[object, object], str] = {}
    for name, config in declared.items():
        libraries.setdefault((config.get("quant_method"), config.get("load_in_8bit")), name)
    if len(libraries) < 2:
        return
    fewest, *_, most = sorted(libraries.values(), key=lambda name: len(encoded[name]))
    fqn, others = next(iter(encoded[fewest])), len(encoded[fewest]) - 1
    more = f" and {others} more stay" if others else ": stays"
    raise PlanError(
        "CKM203",
        f"{fqn}{more} {fewest}, expected {most} as {counted(len(encoded[most]), 'other weight')}, since one"
        " config.json cannot declare both",
        f"decode them all with --to hf-bf16 (-fp16, -fp32), and from that --to hf-{most}; or keep"
        " both as they are where there is no config.json, --to full",
    )
