"""Merge a LoRA adapter into its base checkpoint: W + scale * B @ A, computed when W is read.

    Checkpoint (base), Adapter  --names matched, shapes proven-->  Checkpoint

No tensor is read. The result is planned, converted and verified as any checkpoint: a merged tensor is
a Group of parts of the base and of the adapter, decoded box by box.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckptmap import setups
from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.logical_tensors import DENSE
from ckptmap.checkpoint.lora.adapter_files import Adapter, LowRankUpdate, open_adapter
from ckptmap.checkpoint.lora.adapter_names import names_in_base
from ckptmap.checkpoint.lora.expert_order import order_notes, stored_in_out
from ckptmap.checkpoint.lora.merged_tensor import (
    BIAS,
    A,
    B,
    Biased,
    Merged,
    Replaced,
    codes_part,
    dora,
    with_replica,
)
from ckptmap.checkpoint.lora.shape_checks import ShapeChecks, require_stored
from ckptmap.checkpoint.lora.target_checks import require_targeted, target_notes
from ckptmap.checkpoint.lora.untied_head import (
    Tied,
    config_of_base,
    is_head,
    may_be_tied,
    stem,
    tied_change_note,
    tied_in,
    untied_notes,
)
from ckptmap.checkpoint.lora.wrapped_model import own_weights, refuse_wrapped
from ckptmap.checkpoint.lora.wrapped_parameters import WrappedParameters, per_expert
from ckptmap.checkpoint.open import open_another
from ckptmap.checkpoint.translate_names import translated
from ckptmap.core.formatting import counted
from ckptmap.core.printable import advised, quote
from ckptmap.errors import SourceError
from ckptmap.mapping.rules import HUB
from ckptmap.protocols import Group, Scheme
from ckptmap.quantization.unsupported_schemes import foreign_tensors
from ckptmap.storage.hub.resolve import errors_by_given_path
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import TensorInfo

HALF = ("bfloat16", "float16")


def _merged_into(
    base: Checkpoint,
    adapter: Adapter,
    groups: Mapping[str, Group],
    leave: Sequence[str],
    untied: Mapping[str, str],
    in_out: bool | None,
    notes: Iterable[str],
) -> Checkpoint:
    """Return `base` with the merged `groups` in place of its own."""
    own = [name for name in adapter.trained if name in groups]
    record = {
        "config": adapter.config.text, "modules": len(adapter.lows), "trained": len(own),
        "files": {Path(file).name: os.stat(file).st_size for file in adapter.files},
        "leave": list(leave), "untied": dict(untied), **({} if in_out is None else {"in_out": in_out}),
    }  # fmt: skip
    return replace(
        base.with_groups(groups, adapter.files),
        names={**base.names, **{fqn: fqn for fqn in untied}},
        untied=dict(untied),
        merged=record,
        notes=[
            *base.notes,
            f"merged: {counted(len(adapter.lows), 'module')} of {adapter.path}",
            *own_weights(adapter, own, base),
            *(f"{key}: left in the adapter, {why}" for key, why in adapter.left.items()),
            *(f"{adapter.path}/{name}: is another adapter, not merged" for name in adapter.others),
            *untied_notes(untied),
            *order_notes(adapter.config, in_out),
            *notes,
        ],
    )


def merge_adapter(
    base: str | os.PathLike[str] | Checkpoint,
    adapter: str | os.PathLike[str] | Adapter,
    to: str | None = None,
    adapter_config: str | os.PathLike[str] | None = None,
    leave: Sequence[str] = (),
    config_from: str | os.PathLike[str] | None = None,
    untied: Mapping[str, str] | None = None,
    in_out: bool | None = None,
) -> Checkpoint:
    """Return the checkpoint at `base` with the adapter merged in, ready to be written for `to`.

    Merged tensors have the base's dtype; where `to` casts them, they are fp32, so that they are
    rounded once.

    leave        patterns of modules and tensors of the adapter that are not merged
    config_from  the config.json that tells whether the base ties its head, and its family; default: the base's own
    untied       the head that an earlier merge untied -> its embedding, in place of a config.json
    in_out       how an earlier merge took square matrices of experts

    Raises SourceError CKM320 to CKM322 where adapter and base do not fit together.
    """
    ckpt = in_adapters_names(
        base if isinstance(base, Checkpoint) else open_another(base), config_from
    )
    scheme = setups.parse(to).scheme if to is not None else None
    with errors_by_given_path(ckpt.files.mounts):
        if not isinstance(adapter, Adapter):
            adapter = open_adapter(adapter, ckpt.files.mounts, adapter_config)
        refuse_wrapped(ckpt, adapter)
        adapter = adapter.without(leave)
        if untied is None:
            tied = tied_in(ckpt, config_from)
        else:
            tied = next((Tied(embedding, head) for head, embedding in untied.items()), None)
        if in_out is None:
            in_out = stored_in_out(adapter.config, config_of_base(ckpt, config_from))
        merger = _Merger(ckpt, adapter, scheme, names_in_base(adapter, ckpt, tied), tied, in_out)
        groups = merger.groups()
        require_stored(groups, ckpt, adapter)
        require_targeted(adapter)
        notes = [*_copies_note(merger.copies), *merger.alike]
        notes += target_notes(adapter, ckpt, merger.named)
        if untied is None:
            notes += [
                f"{fqn}: is the adapter's; where the model ties its head to it, the head should stay"
                " as it was, which only a config.json can tell: give it with --config-from"
                for fqn in merger.embeddings
                if may_be_tied(ckpt, fqn, config_from)
            ]
        by_release = in_out if merger.wrapped.by_release else None
        return _merged_into(ckpt, adapter, groups, leave, merger.untied, by_release, notes)


def in_adapters_names(ckpt: Checkpoint, config_from: str | os.PathLike[str] | None) -> Checkpoint:
    """Return the base under Hugging Face's names, by which peft names modules, where its format has names of its
    own: GGUF. Raises PlanError as `translated` does."""
    if not ckpt.index.naming or ckpt.translation is not None:
        return ckpt
    config = None if config_from is None else os.fspath(config_from)
    return translated(ckpt, HUB, ckpt.index.naming, config)


def _copies_note(copies: Sequence[LazyTensor]) -> list[str]:
    if not copies:
        return []
    more = f" and {len(copies) - 1} more are" if len(copies) > 1 else " is"
    return [
        f"{copies[0].fqn}{more} a quantized copy of the base's weight ({copies[0].encoding}): left"
        " in the adapter, the base's own values are merged"
    ]


# --------------------------------------------------------------------------------- tensors


class _Merger:
    """Makes the merged tensors; every key of the adapter is used, or refused by name."""

    def __init__(
        self,
        ckpt: Checkpoint,
        adapter: Adapter,
        scheme: Scheme | None,
        named: Callable[[str], str],
        tied: Tied | None,
        in_out: bool | None,
    ) -> None:
        self.ckpt, self.adapter, self.scheme, self.named = ckpt, adapter, scheme, named
        self.tied = tied
        self.untied: dict[str, str] = {}
        self.where = adapter.path
        self.checks = ShapeChecks(ckpt, adapter, named, foreign_tensors(ckpt.infos()))
        self.wrapped = WrappedParameters(adapter, ckpt, named, in_out)
        self.copies: list[LazyTensor] = []
        self.alike: list[str] = []
        self.embeddings: list[str] = []
        """Embeddings that were trained as a whole, each on its own."""

    def groups(self) -> dict[str, Group]:
        if not self.adapter.lows and not self.adapter.trained:
            hint = "save the adapter again, or leave out less with --leave"
            raise SourceError("CKM320", f"{self.where}: holds no tensor to merge", hint)
        made: dict[str, Group] = {}
        for name, lazy in self.adapter.trained.items():
            fqn = self._base_name(name, lazy)
            made |= self._untie(fqn, lazy)
            group = (
                self._repeat_frozen(fqn, lazy)
                if _is_frozen(lazy)
                else self._replace_tensor(fqn, lazy)
            )
            if group is not None:
                made[fqn] = group
        tensors = self.wrapped
        for key, low in self.adapter.lows.items():
            name = tensors.name(key)
            fqn = self._base_name(name, low.a)
            base = made.get(fqn) or self._base(fqn)
            made[fqn] = (
                self._merge_parameter(low, name, base, tensors)
                if low.wrapped
                else self._merge_matrix(low, base)
            )
            if self.tied is not None and fqn == self.tied.embedding and not self._has_head():
                self.alike.append(tied_change_note(fqn, "its head"))
            if low.bias is not None:
                bias = self._base_name(f"{low.module}.bias", low.bias)
                made[bias] = self._merge_bias(
                    low, low.bias, made.get(bias) or self.ckpt.group(bias)
                )
        return {**made, **dict(self._ties(made))}

    def _base_name(self, name: str, lazy: LazyTensor) -> str:
        fqn = self.named(name)
        if fqn in self.ckpt:
            return fqn
        if self.tied is not None and self.tied.head and is_head(fqn):
            return self._untied_head()
        near, low = difflib.get_close_matches(fqn, list(self.ckpt), n=1), name.rpartition(".")[0]
        raise SourceError(
            "CKM321",
            f"{self.where}: {lazy.fqn}: the base has no {fqn}",
            (f"the nearest is {near[0]}; " if near else "")
            + (
                "if the base ties it to its embedding, --config-from with its config.json; else "
                if is_head(fqn) and self.tied is None
                else per_expert(self.ckpt, name)
            )
            + f"give the base that it was trained on (keys: ckptmap inspect {quote(self.ckpt.shown)}), or"
            f" leave it out with {advised(leave=name if lazy.fqn.endswith(name) else low)}",
        )

    def _ties(self, made: Mapping[str, Group]) -> Iterator[tuple[str, Group]]:
        """Yield the tensors that share storage with a merged tensor: they change with it."""
        shared = {
            _share(self.ckpt.group(fqn)): group
            for fqn, group in made.items()
            if isinstance(group.encoding, Merged) and fqn in self.ckpt
        }
        shared.pop(None, None)
        for fqn in self.ckpt if shared else ():
            group = shared.get(_share(self.ckpt.group(fqn)))
            if group is not None and fqn not in made:
                self.alike.append(tied_change_note(group.fqn, fqn))
                yield fqn, group._replace(fqn=fqn)

    # ------------------------------------------------------------------ one tensor

    def _merge_matrix(self, low: LowRankUpdate, base: Group) -> Group:
        self.checks.check_base(low, base)
        config = self.adapter.config
        rank = config.rank(low.module)
        flip = low.embedding or self.checks.is_flipped(low)
        a, b = self.checks.dense(low.a), self.checks.dense(low.b)
        rows, columns = reversed(base.info.shape) if flip else base.info.shape
        self.checks.check_shape(low.a, (rank, columns), base)
        self.checks.check_shape(low.b, (rows, rank), base)
        encoding = Merged(base.encoding, base.info.dtype, rank, config.scale(low.module), flip)
        info = TensorInfo(base.info.shape, self._dtype(base))
        group = Group(base.fqn, info, encoding, {**base.parts, A: a, B: b})
        if low.magnitude is None:
            if config.dora:
                raise SourceError(
                    "CKM322",
                    f"{self.where}: {low.module} has no lora_magnitude_vector, but use_dora is set",
                    "the adapter was saved in part: save it again, gathered from all ranks",
                )
            return group
        self.checks.check_shape(low.magnitude, (rows,), base)
        return dora(group, self.checks.dense(low.magnitude), self.ckpt.files)

    def _merge_parameter(
        self, low: LowRankUpdate, name: str, base: Group, tensors: WrappedParameters
    ) -> Group:
        """Return the merged form of a parameter that was targeted itself: a matrix, or one an expert."""
        self.checks.check_base(low, base, ndim=3 if len(base.info.shape) == 3 else 2)
        encoding, a, b = tensors.added(low, name, base)
        self.checks.check_shape(low.a, a, base)
        self.checks.check_shape(low.b, b, base)
        info = TensorInfo(base.info.shape, self._dtype(base))
        parts = {**base.parts, A: self.checks.dense(low.a), B: self.checks.dense(low.b)}
        return Group(base.fqn, info, encoding, parts)

    def _merge_bias(self, low: LowRankUpdate, bias: LazyTensor, base: Group) -> Group:
        self.checks.check_base(low, base, ndim=1)
        self.checks.check_shape(bias, base.info.shape, base)
        encoding = Biased(base.encoding, base.info.dtype, self.adapter.config.scale(low.module))
        info = TensorInfo(base.info.shape, self._dtype(base))
        return Group(base.fqn, info, encoding, {**base.parts, BIAS: self.checks.dense(bias)})

    def _replace_tensor(self, fqn: str, lazy: LazyTensor) -> Group:
        """Return a whole tensor of the adapter in the base's dtype; its own bytes if it has that dtype."""
        base = self._base(fqn)
        packed = base.parts.get("")
        if base.encoding != DENSE and packed is not None and lazy.info == packed.info:
            return with_replica(base, "", self.checks.dense(lazy))
        self.checks.check_shape(lazy, base.info.shape, base)
        stored = self.checks.dense(lazy)
        if lazy.dtype == base.info.dtype and base.encoding == DENSE:
            return Group(fqn, base.info, DENSE, {"": stored})
        info = TensorInfo(base.info.shape, self._dtype(base))
        return Group(fqn, info, Replaced(base.encoding, base.info.dtype), {"": stored})

    def _repeat_frozen(self, fqn: str, lazy: LazyTensor) -> Group | None:
        """Return a frozen quantized weight of the base that a checkpoint of QLoRA repeats.

        Where the base holds the same codes, the repeated ones become a replica. None: the base's
        own values stay. Scales are not compared: they may have been cut anew for other ranks.
        """
        base = self._base(fqn)
        self.checks.check_shape(lazy, base.info.shape, base)
        codes = codes_part(lazy)
        packed = base.parts.get(codes) if base.encoding.name == lazy.encoding else None
        if packed is None or packed.info != lazy.parts[codes].info:
            self.copies.append(lazy)
            return None
        return with_replica(base, codes, lazy.parts[codes])

    def _dtype(self, base: Group) -> str:
        """Return the dtype of merged values: fp32 if the target casts them, so that they are rounded once."""
        wide = TensorInfo(base.info.shape, "float32")
        encoding = None if self.scheme is None else self.scheme.target(base.fqn, wide)
        casts = encoding is not None and encoding.name == "dense"
        return "float32" if casts and base.info.dtype in HALF else base.info.dtype

    # ------------------------------------------------------------------ heads and embeddings

    def _untie(self, fqn: str, lazy: LazyTensor) -> Iterator[tuple[str, Group]]:
        """Yield the head of a model whose tied embedding the adapter trained as a whole.

        peft unties such an embedding, and the head stays as it was. If the base stores no head, the
        output gets one of its own.
        """
        tied, text = self.tied, self.adapter.config.text
        if self.adapter.config.ties or self._has_head():
            return
        if stem(fqn) not in (text.get("modules_to_save") or ()):
            return
        self.embeddings.append(fqn)
        if tied is None or fqn != tied.embedding:
            return
        if not tied.head:
            raise SourceError(
                "CKM322",
                f"{self.where}: {lazy.fqn} replaces the embedding {fqn}, which the base"
                " ties to its head: peft trained it alone and kept the head as it was, but this model"
                " cannot have a head of its own",
                "save the base with its head (tie_word_embeddings false) and give that as BASE, or"
                " merge with peft (model.merge_and_unload())",
            )
        yield tied.head, self._base(self._untied_head())

    def _has_head(self) -> bool:
        """Return whether the adapter changes the head, or holds one."""
        modules = (f"{low.module}.weight" for low in self.adapter.lows.values())
        return any(map(is_head, (*self.adapter.trained, *self.adapter.left, *modules)))

    def _untied_head(self) -> str:
        """Return the name of the head that the base does not store, and note that it is untied."""
        assert self.tied is not None, "asked of a base that ties it"
        self.untied[self.tied.head] = self.tied.embedding
        return self.tied.head

    def _base(self, fqn: str) -> Group:
        """Return the base's tensor that changes; for a head that the base ties, its embedding."""
        return self.ckpt.group(self.untied.get(fqn, fqn))._replace(fqn=fqn)


def _is_frozen(lazy: LazyTensor) -> bool:
    return lazy.encoding_ != DENSE and ".modules_to_save." not in lazy.fqn


def _share(group: Group) -> object:
    stored = group.parts.get("") if group.encoding == DENSE else None
    return None if stored is None else stored.share
