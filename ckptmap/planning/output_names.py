"""Decide the names and paths under which the output holds the selected tensors and values.

A path is the way through the nested state dict: ("model", "layers.0.weight"). The options --wrap and
--names-like decide the name of a weight, --root the dict that holds the weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import ne

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.module_extra_state import NO_STATES, States, states_of
from ckptmap.checkpoint.open import open_another
from ckptmap.checkpoint.split_roles import is_reserved_name
from ckptmap.core.formatting import some
from ckptmap.core.printable import advised
from ckptmap.core.state_paths import join, joined
from ckptmap.errors import PlanError
from ckptmap.mapping.prefixes import nearest_change
from ckptmap.mapping.wrappers import HEAD, wrap_prefix
from ckptmap.planning.kept_layout import (
    beside_weights,
    keeps_layout,
    kept_note,
    leaves_out_extra,
    paths_inside,
    source_path,
)
from ckptmap.planning.key_selection import Selection
from ckptmap.planning.reference import Reference
from ckptmap.planning.request import Request
from ckptmap.tensors import Path

NAMES_SHOWN = 3
"""Entries that an error shows."""


@dataclass(frozen=True)
class OutputNames:
    """Where in the output each leaf goes.

    weights       plain FQN -> name in the output
    root          path of the dict that holds the weights; empty: they are at the top
    module_state  extra state of modules, which goes beside the weights
    kept          every entry stays where it is in the source (--keep-layout)
    inside        with `kept`, weights below further dicts and lists: name in the output -> path below the root
    at_top        entries stand beside the weights, in no dict of their own (--root '')
    notes         remarks for the user
    """

    weights: Mapping[str, str]
    root: Path
    module_state: States
    ckpt: Checkpoint
    kept: bool = False
    inside: Mapping[str, Path] = field(default_factory=dict)
    at_top: bool = False
    notes: Sequence[str] = ()

    def of_weight(self, fqn: str) -> Path:
        """Return the path of a weight."""
        return self.of_weights((fqn,))[0]

    def of_weights(self, fqns: Sequence[str]) -> list[Path]:
        """Return the paths of weights."""
        names, root = list(map(self.weights.__getitem__, fqns)), self.root
        paths = [self.inside.get(name, (name,)) for name in names] if self.inside else zip(names)
        return [root + path for path in paths] if root else list(paths)

    def of_extra(self, path: Path) -> Path:
        """Return the path of a leaf that is neither weight nor optimizer state."""
        if path in self.module_state:
            return self.module_state.place(path, self.root)
        if self.kept:
            return self._source_path(path)
        if self.at_top and beside_weights(path, self._names, tensor=path in self.ckpt.other):
            return path
        return self.module_state.place(path, self.root)

    def places(self, paths: Iterable[Path]) -> list[tuple[Path, Path]]:
        """Return where each leaf that is neither weight nor optimizer state is in the source, and in the output."""
        return [(self._source_path(path), self.of_extra(path)) for path in paths]

    def _source_path(self, path: Path) -> Path:
        return source_path(self.ckpt, path, self._leaves_out_extra)

    @cached_property
    def _leaves_out_extra(self) -> bool:
        return leaves_out_extra(self.ckpt)

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self.weights.values())


def output_names(request: Request, selection: Selection) -> OutputNames:
    """Name what was selected.

    Raises PlanError CKM205 where the setup cannot hold weights at --root, and CKM114 where the
    weights would be read back under other names.
    """
    _require_names_unlike_ddp(selection, request.options.add_prefix)
    weights, notes = _weight_names(request)
    module_state = _module_state(request, weights)
    other_paths = (*selection.values, *selection.others)
    nested = selection.optimizer or any(path not in module_state for path in other_paths)
    kept = keeps_layout(request, nested)
    at_top = request.options.root == ""
    root = request.ckpt.roles.model_root if kept else _root(request, nested)
    inside = paths_inside(request.ckpt, weights.values()) if kept else {}
    names = OutputNames(weights, root, module_state, request.ckpt, kept, inside, at_top, notes)
    if not kept:
        return names
    unlike = replace(names, root=_root(request, nested), kept=False, inside={})
    note = kept_note(request, unlike.root, unlike.places(other_paths))
    return replace(names, notes=[*notes, *note])


def _weight_names(request: Request) -> tuple[dict[str, str], list[str]]:
    """Return the name in the output of every weight, by plain FQN, and remarks on them."""
    if request.reference is not None:
        theirs = request.reference.ckpt.names
        return {fqn: theirs.get(fqn, fqn) for fqn in request.ckpt}, []
    if request.options.names_like is not None:
        with open_another(request.options.names_like, request.ckpt.files.mounts) as like:
            _require_shared_names(request, like)
            lacking = [fqn for fqn in request.ckpt if fqn not in like]
            names = {fqn: like.names.get(fqn, fqn) for fqn in request.ckpt}
        return names, _keep_plain_names(lacking) if like.wrappers else []
    prefix = _wrapper_prefix(request)
    fqns = list(request.ckpt)
    named = [prefix + fqn for fqn in fqns] if prefix else fqns
    return dict(zip(fqns, named, strict=True)), []


def _keep_plain_names(lacking: Sequence[str]) -> list[str]:
    """Return a note on weights that the checkpoint of --names-like does not have."""
    if not lacking:
        return []
    return [
        f"{some(lacking, 1)}: not in the checkpoint of --names-like, so plain names are written"
    ]


def _require_shared_names(request: Request, like: Checkpoint) -> None:
    """Raise PlanError CKM618 where --names-like would change no name."""
    path, ckpt = request.options.names_like, request.ckpt
    if not any(fqn in like for fqn in ckpt):
        change = nearest_change(list(ckpt), list(like))
        hint = "give a checkpoint of the same model, or rename the weights first with --rename"
        if change is not None:
            hint = f"add {change.names_option}: {change.outcome}"
        raise PlanError(
            "CKM618",
            f"--names-like {path}: has none of the {len(ckpt)} names, the first here is"
            f" {next(iter(ckpt))!r}, there {next(iter(like), 'none')!r}",
            hint,
        )
    if not any(like.names.get(fqn, fqn) != fqn or ckpt.names.get(fqn, fqn) != fqn for fqn in ckpt):
        raise PlanError(
            "CKM618",
            f"--names-like {path}: changes nothing, both have plain names",
            "leave it out, or name wrappers with --wrap ddp,compile",
        )


def _wrapper_prefix(request: Request) -> str:
    """Return the segments that wrappers put before every name: `module._orig_mod.`."""
    if request.options.wrap is not None:
        return wrap_prefix(request.options.wrap)
    return "".join(segment + "." for segment in request.setup.wrap)


def _module_state(request: Request, weights: Mapping[str, str]) -> States:
    setup, ckpt = request.setup, request.ckpt
    if ckpt.translation is not None or setup.places or setup.filing:
        return NO_STATES
    paths = {**ckpt.plain, **ckpt.other}
    return states_of(paths, ckpt.roles.model_root, weights, _wrapper_prefix(request))


def _root(request: Request, nested: bool) -> Path:
    """Return the path of the dict that holds the weights; `nested`: the output holds more."""
    root_option, setup = request.options.root, request.setup
    if request.reference is not None and not setup.rooted:
        return _root_like(request, request.reference, nested)
    if root_option is None:
        return ("model",) if nested or setup.rooted else ()
    if setup.rooted:
        raise PlanError(
            "CKM205",
            f"--root {root_option}: the setup {setup.name} has a root of its own",
            "leave --root out",
        )
    if root_option and not setup.holds_extra:
        raise PlanError(
            "CKM205",
            f"--root {root_option}: {setup.name} holds names at its top level only, no dicts",
            "leave --root out, or choose a setup that nests, for example --to full",
        )
    root = tuple(root_option.split("/")) if root_option else ()
    if reserved := next((name for name in root if is_reserved_name(name)), None):
        raise PlanError(
            "CKM205",
            f"--root {root_option}: readers take no tensor below {reserved!r} for a weight",
            "choose another name, for example --root model",
        )
    return root


def _root_like(request: Request, reference: Reference, nested: bool) -> Path:
    """Return the path of the dict that holds the weights in the checkpoint of --as.

    Raises PlanError CKM205 where it holds nothing else, and the output would.
    """
    root = reference.ckpt.roles.model_root
    if root or not nested:
        return root
    paths = (*request.ckpt.plain, *request.ckpt.other)
    keys = sorted({str(path[0]) for path in paths if request.dropped_whole(join(path)) is None})
    left = [advised(drop=key) for key in keys]
    raise PlanError(
        "CKM205",
        f"--as {reference.shown}: holds weights at its top level alone, and {request.ckpt.shown} holds"
        f" {', '.join(keys[:NAMES_SHOWN])}, too",
        f"leave {'this' if len(left) == 1 else 'these'} behind: {' '.join(left)}",
    )


def _require_names_unlike_ddp(selection: Selection, added: str | None) -> None:
    """Raise PlanError CKM114 where every weight that is written is below a module called `module`.

    A reader takes that for the wrapper of DDP and strips it; one weight without it tells them apart.
    """
    if all(fqn.startswith(f"{HEAD}.") for fqn in selection.written):
        raise PlanError(
            "CKM114",
            f"{selection.written[0]}: all names that are left begin with '{HEAD}.', which readers"
            " take for the wrapper of DDP",
            f"use --wrap ddp in place of --add-prefix {HEAD}"
            if (added or "").startswith(HEAD)
            else f"add --strip-prefix {HEAD} for plain names; --wrap ddp puts the wrapper back",
        )


def require_distinct_keys(paths: Sequence[Path], fqns: Sequence[str]) -> None:
    """Raise PlanError CKM114 where two tensors have one path, or two paths give one dotted key, by which a manifest
    names tensors: ("extra", "a.b") and ("extra", "a", "b") are both `extra.a.b`."""
    keys = joined(paths)
    if len({*keys}) == len(keys):
        return
    repeated = Counter(keys).most_common(1)[0][0]
    at = [number for number, key in enumerate(keys) if key == repeated]
    twice = [paths[number] for number in at]
    if len({*twice}) < len(twice):
        fqn = fqns[at[-1]]
        raise PlanError(
            "CKM114",
            f"{fqn}: {repeated} would be written twice",
            f"leave one of them out with {advised(exclude=fqn)}",
        )
    raise PlanError(
        "CKM114",
        f"{repeated!r} would be written twice: as {twice[0]} and as {twice[1]}",
        f"leave both out with {advised(drop=repeated)}, or rename one where the checkpoint is saved",
    )


def unknown_to_transformers(names: Mapping[str, str]) -> list[str]:
    """Return a note where weights do not have their plain names; `names`: plain FQN -> as written.

    transformers loads by plain names, and initializes at random what it does not find.
    """
    if not any(map(ne, names, names.values())):
        return []
    renamed = [name for fqn, name in names.items() if name != fqn]
    return [
        f"transformers would not find {some(renamed, 1)}, and would initialize them at random: it"
        " loads plain names, without --wrap and --names-like"
    ]
