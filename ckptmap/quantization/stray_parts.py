"""Find what is left of quantized weights that are not whole: scales without codes, codes without scales.

    fc.weight_scale, fc.weight_shape, and no fc.weight_packed  ->  both are stray

Left among the weights they would be converted as weights of the model. A part is stray where something
states its form: the `quantization_config` of the config.json beside it, a record in its file, or parts beside
it that no other form has. By its name alone it may be a parameter of a dense model: then there is a note.
`part_names` has the keys that the libraries write.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ckptmap.core.columns import few
from ckptmap.formats.safetensors.torchao_metadata import SCHEME as TORCHAO
from ckptmap.formats.safetensors.torchao_metadata import part_key, parts_of
from ckptmap.protocols.encodings import Records
from ckptmap.protocols.file_systems import Mounts
from ckptmap.quantization.blockwise.group_checks import malformed
from ckptmap.quantization.part_names import FORMS, FP8, STATE, PartNames
from ckptmap.quantization.unsupported_schemes import foreign_tensors, payloads_without_scales
from ckptmap.tensors import StoredTensor, TensorInfo

REPAIR = "copy the checkpoint again, or save it again, with all parts of the weight"


class Stray(NamedTuple):
    """A tensor that is no weight by itself, and why."""

    key: str
    reason: str


_FLOAT = frozenset({"float64", "float32", "float16", "bfloat16"})
_INT = frozenset({"int8", "uint8", "int32", "int64"})
_EXPONENT = frozenset({"uint8", "float8_e8m0fnu"})
_ONE = (0, 1)
_KINDS: Mapping[str, tuple[frozenset[str], tuple[int, ...]]] = {
    "_scales": (_EXPONENT, (2, 3, 4)), ".scales": (_FLOAT, (2, 3)), ".qzeros": (_INT | _FLOAT, (2, 3)),
    ".g_idx": (_INT, (1, 2)), ".weight_g_idx": (_INT, (1, 2)), ".weight_shape": (_INT, (1, 2)),
    ".absmax": (_FLOAT | _INT, (1, 2)), ".quant_map": (_FLOAT, (1,)), ".nested_absmax": (_FLOAT, (1,)),
    ".nested_quant_map": (_FLOAT, (1,)), ".SCB": (_FLOAT, (1, 2)), ".weight_format": (_INT, _ONE),
    ".input_zero_point": (_INT | FP8, _ONE), ".output_zero_point": (_INT | FP8, _ONE),
    ".input_global_scale": (_FLOAT, _ONE), "_scale_inv": (_FLOAT | _EXPONENT, (0, 1, 2, 3)),
    ".activation_scale": (_FLOAT, _ONE), ".qscale_act": (_FLOAT, _ONE),
}  # fmt: skip
"""Dtypes and numbers of dims that a part of this name may have; a tensor of another kind is a parameter
that has the name by chance. Stacked weights of experts have one dim more."""
_NOTED = frozenset({
    ".weight_scale", ".weight_shape", ".weight_zero_point", ".weight_g_idx", ".weight_global_scale",
    ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".SCB", ".qzeros", ".qscale_weight",
})  # fmt: skip
"""Names of parts that a dense model hardly has: alone and without any statement they get a note."""
_LAST = tuple({end.removeprefix(".") for form in FORMS for end in form.parts})
_FLAT_PARTS = ("_qdata", "_scale", "_zero_point")
_FLAT = re.compile(r"(?P<stem>(?:.*\.)?)_(?P<name>[^.]+)_(?:qdata|scale|zero_point)")
"""A key of torchao's flattening: fc._weight_qdata."""
_METHOD_OF_CT = "compressed-tensors"


def stray_parts(
    dense: Mapping[str, StoredTensor],
    infos: Mapping[str, TensorInfo],
    records: Records,
    mounts: Mounts,
) -> tuple[list[Stray], list[str]]:
    """Return the parts of quantized weights that are not whole, and notes on those that may be.

    dense    the stored tensors that no scheme took, by key
    infos    shape and dtype of all tensors by key; those that are not dense were put together by schemes
    records  encoding records by FQN

    Raises SourceError CKM115 for a record that no scheme reads: then nothing tells which tensors it is of.
    """
    for fqn, record in records.items():
        scheme = record.get("scheme")
        if scheme not in (None, TORCHAO) and (fqn in dense or fqn not in infos):
            raise malformed(
                fqn,
                f"its encoding record states scheme {str(scheme)[:40]!r}, which nothing here reads",
                "upgrade ckptmap, or install the package that wrote the file",
            )
    found = _Strays(dense, infos, records, mounts)
    strays = {stray.key: stray for stray in found.all()}
    return list(strays.values()), found.notes


@dataclass
class _Strays:
    """The search in one checkpoint: its config.json is read once, and only if a key asks for it."""

    dense: Mapping[str, StoredTensor]
    infos: Mapping[str, TensorInfo]
    records: Records
    mounts: Mounts
    notes: list[str] = field(default_factory=list)
    _configs: list[Mapping[str, object]] = field(default_factory=list)

    def all(self) -> Iterator[Stray]:
        keys = [key for key in self.dense if key.endswith(_LAST) or STATE in key]
        for form in FORMS if keys else ():
            yield from self._parts_of(form, keys)
        yield from self._codes()
        yield from self._flattened()
        yield from self._below_weights()

    # ------------------------------------------------------------------ parts without codes

    def _parts_of(self, form: PartNames, keys: Sequence[str]) -> Iterator[Stray]:
        by_stem: dict[str, dict[str, str]] = {}
        for key in keys:
            end = _end(form.parts, key)
            if end is not None and _may_be(end, self.infos[key]):
                by_stem.setdefault(_stem(key, end), {})[end] = key
        for stem, parts in by_stem.items():
            why = self._missing(form, stem, parts)
            if why is None:
                continue
            wrong, missing = why
            stated = self._stated(form, parts)
            if stated:
                for key in wrong:
                    yield Stray(
                        key, f"is part of a quantized weight that is not whole: {stated}, {missing}"
                    )
            elif any(end in _NOTED for end in parts) and self._foreign.isdisjoint(parts.values()):
                self.notes.append(
                    f"{next(iter(parts.values()))}: has the name of a part of a quantized weight, but"
                    f" {missing}; nothing states its form: it is converted as a weight"
                )  # fmt: skip

    def _missing(
        self, form: PartNames, stem: str, parts: Mapping[str, str]
    ) -> tuple[Sequence[str], str] | None:
        """Return the stray ones of the parts, and what is there and what is missing; None: none is."""
        shown = f"{_named(stem)} has {', '.join(map(_last, parts.values()))}"
        names = [_key(stem, end) for end in form.codes]
        if any(name in self.infos and name not in self.dense for name in names):
            # Activations of a layer may be scaled whatever the form of its weight.
            left = [key for end, key in parts.items() if end not in form.activations]
            return (left, f"{shown}, which the form of its codes does not have") if left else None
        if not form.codes:
            return [*parts.values()], f"{shown}, and {form.lacks}"
        there = next((name for name in names if name in self.dense), None)
        if there is None:
            wanted = [_last(name) for name in names if name != stem] or [_last(stem)]
            return [*parts.values()], f"{shown} and no codes, {' or '.join(wanted[:2])}"
        info = self.infos[there]
        if info.dtype in _FLOAT and all(  # the activations of one layer have one scale
            end in form.activations and self.infos[key].numel > 1 for end, key in parts.items()
        ):
            return None
        is_dense = (
            form.methods != (_METHOD_OF_CT,) and form.dtypes and info.dtype not in form.dtypes
        )
        if is_dense:  # compressed-tensors keeps the scales of weights that are not yet compressed
            return [*parts.values()], f"{shown}, but {there} {info} holds no codes"
        return None

    def _stated(self, form: PartNames, parts: Mapping[str, str]) -> str:
        """Return what states the form of these parts; empty: nothing does."""
        method = self._method(next(iter(parts.values())))
        if method in form.methods:
            return f"config.json states quant_method {method!r}"
        if not form.schemes.isdisjoint(self._schemes):
            return "the encoding records state weights of this form"
        if any(group <= parts.keys() for group in form.certain):
            return "no other form has these parts"
        return ""

    @cached_property
    def _foreign(self) -> frozenset[str]:
        """The parts of foreign schemes, some of which have names that another form has, too."""
        return frozenset(foreign_tensors({key: self.infos[key] for key in self.dense}))

    def _config(self, key: str) -> Mapping[str, object]:
        """Return the `quantization_config` beside the tensor that is asked for first."""
        if not self._configs:
            from ckptmap.quantization.blockwise.read_config import quantization_config

            self._configs.append(quantization_config(self.dense[key], self.mounts))
        return self._configs[0]

    def _method(self, key: str) -> str:
        """Return the `quant_method` of the config.json beside a tensor, "" where none is stated."""
        config = self._config(key)
        method = config.get("quant_method", "")
        if not method and "config_groups" in config:
            return _METHOD_OF_CT
        return method if isinstance(method, str) else ""

    def _below_weights(self) -> Iterator[Stray]:
        """Yield tensors named below a weight that is put together: a parameter has nothing below it."""
        if len(self.dense) == len(self.infos):
            return
        for key in self.dense:
            weight = f"{key.partition('.weight.')[0]}.weight" if ".weight." in key else ""
            if weight in self.infos and weight not in self.dense:
                yield Stray(
                    key, f"stands below {weight}, a quantized weight whose form has no such part"
                )

    # ------------------------------------------------------------------ codes without scales

    def _codes(self) -> Iterator[Stray]:
        if not any(_may_be_codes(info) for info in few(self.infos)):
            return
        for key in payloads_without_scales(self.infos):
            is_payload = key in self.dense and self.infos[key].dtype == "uint8"
            if is_payload and self._method(key) == "bitsandbytes" and self._has_whole_weights():
                yield Stray(key, self._alone(key, "absmax, quant_map and quant_state"))
        for key in self.dense:
            info = self.infos[key]
            if not _may_be_codes(info):
                continue
            for form in FORMS:
                if self._method(key) in form.methods:
                    yield from self._without_scale(form, key, info)

    @cached_property
    def _schemes(self) -> frozenset[str]:
        return frozenset(str(record.get("scheme")) for record in self.records.values())

    def _without_scale(self, form: PartNames, key: str, info: TensorInfo) -> Iterator[Stray]:
        end = _end(form.codes, key)
        if end is None or not form.codes[end]:
            return
        if end in ("", ".weight") and (info.dtype not in form.dtypes or len(info.shape) < 2):
            return
        stem = _stem(key, end)
        if form.methods == ("bitsandbytes",) and not self._has_whole_weights():
            return  # as FSDP2 saves them: --base restores the scales
        names = [_key(stem, scale) for scale in form.codes[end]]
        if end == ".weight_packed" and self._has_two_scales(key, stem):
            names = [_key(stem, ".weight_global_scale")] if names[0] in self.dense else names
        if not any(name in self.dense for name in names):
            yield Stray(key, self._alone(key, " or ".join(map(_last, names))))

    def _alone(self, key: str, scale: str) -> str:
        return (
            "is codes of a quantized weight that is not whole: config.json states quant_method"
            f" {self._method(key)!r}, {key} is {self.infos[key]}, and there is no scale, {scale}"
        )

    def _has_whole_weights(self) -> bool:
        """Return whether schemes put any weight together."""
        return len(self.dense) < len(self.infos)

    def _has_two_scales(self, key: str, module: str) -> bool:
        """Return whether config.json states NVFP4 for a module: its blocks' scales have a scale, too."""
        from ckptmap.quantization.compressed_tensors.config_json import groups_said

        config = self._config(key)
        forms = [config, *groups_said(config, module)]
        return any(str(form.get("format")).startswith("nvfp4") for form in forms)

    # ------------------------------------------------------------------ torchao

    def _flattened(self) -> Iterator[Stray]:
        entries = {fqn: r for fqn, r in self.records.items() if r.get("scheme") == TORCHAO}
        if entries:
            yield from self._beside_flattened(entries)
        keys = [key for key in self.dense if key.endswith(_FLAT_PARTS)]
        flat = {key: match for key in keys if (match := _FLAT.fullmatch(key))}
        if not flat:
            return
        known = {key for fqn, record in entries.items() for key in parts_of(fqn, record)}
        for key, match in flat.items():
            if key in known:
                continue
            weight = f"{match['stem']}{match['name']}"
            stated = "torchao's metadata in the file" if entries else ""
            if self._method(key) == TORCHAO:
                stated = stated or "config.json states quant_method 'torchao', but the file"
            if stated:
                yield Stray(
                    key, f"is part of a quantized weight: {stated} has no entry of {weight}"
                )

    def _beside_flattened(self, entries: Mapping[str, Mapping[str, object]]) -> Iterator[Stray]:
        """Yield tensors whose names begin as those of a weight's parts do, and are none of them: torchao
        takes every tensor of such a name for a part."""
        weights = {part_key(fqn, ""): fqn for fqn in entries}
        for key in self.dense:
            module, dot, last = key.rpartition(".")
            if not last.startswith("_"):
                continue
            words = last.split("_")
            for count in range(2, len(words)):
                fqn = weights.get(f"{module}{dot}{'_'.join(words[:count])}_")
                if fqn is not None and key not in parts_of(fqn, entries[fqn]):
                    names = ", ".join(map(_last, parts_of(fqn, entries[fqn])))
                    yield Stray(
                        key,
                        f"has the name of a part of {fqn}, of which torchao's metadata in the file"
                        f" lists {names}",
                    )


def _may_be(end: str, info: TensorInfo) -> bool:
    """Return whether a tensor of this dtype and shape can be a part whose name has this end."""
    dtypes, dims = _KINDS.get(end, (frozenset({info.dtype}), (len(info.shape),)))
    return info.dtype in dtypes and len(info.shape) in dims


def _may_be_codes(info: TensorInfo) -> bool:
    return info.dtype in ("int8", "uint8", "int32", "float8_e4m3fn")


def _end(ends: Iterable[str], key: str) -> str | None:
    """Return the longest of the ends that the key has; None: it has none of them."""
    if STATE in key and STATE in ends:
        return STATE
    return max((end for end in ends if f".{key}".endswith(end)), key=len, default=None)


def _stem(key: str, end: str) -> str:
    """Return what stands before the end; at the root a key has no dot before it: weight_scale."""
    if end == STATE:
        return key.partition(STATE)[0]
    return f".{key}".removesuffix(end)[1:]


def _key(stem: str, end: str) -> str:
    return f"{stem}{end}" if stem else end.removeprefix(".")


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _named(stem: str) -> str:
    return stem or "the module"
