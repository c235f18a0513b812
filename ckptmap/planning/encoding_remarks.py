"""What the user is told of encodings: weights that stay as they are, and patterns that match nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.core.name_table import listed
from ckptmap.planning.conversion import Steps
from ckptmap.planning.encoding_choice import ROUND, matches
from ckptmap.planning.options import Options
from ckptmap.planning.remarks import Remarks, Unresolved
from ckptmap.planning.request import Request
from ckptmap.planning.tensor_layout import TensorLayout
from ckptmap.planning.weight_encodings import WeightEncodings
from ckptmap.protocols import Refusal, Scheme
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import TensorInfo


def encoding_remarks(
    request: Request,
    layout: TensorLayout,
    encodings: WeightEncodings,
    dropped: Mapping[str, str],
    tied: Mapping[str, str],
) -> Remarks:
    """Return notes on what the options did not do; with --strict, these are unresolved, too."""
    ckpt, scheme, options = request.ckpt, request.aim.scheme, request.options
    loose = unmatched(options, ckpt, dropped)
    apart = written_apart(ckpt, {**dropped, **tied})
    left = left_by_shape(ckpt, layout.steps, scheme, options)
    empty = {} if left else none_taken(layout.steps, scheme, options)
    notes = [
        *(f"{pattern}: {why}" for pattern, why in loose.items()),
        *listed("tied, written under each name", apart),
        *listed("stays as it is", {**left, **encodings.beside_ties}),
        *(f"{why}: name weights with --encode GLOB" for why in empty.values()),
    ]
    return Remarks(unresolved=refused_if_strict(left, loose, empty, options), notes=notes)


def unmatched(options: Options, fqns: Collection[str], dropped: Collection[str]) -> dict[str, str]:
    """Patterns of the user's that nothing is named like: a name misspelt."""
    asked = {
        "include": fqns, "encode": fqns, "no-encode": fqns, "exclude": dropped, "drop": dropped
    }  # fmt: skip
    return {
        f"--{name} {pattern!r}": "nothing is named so"
        for name, keys in asked.items()
        for pattern in getattr(options, name.replace("-", "_"))
        if not any(key == pattern or fnmatchcase(key, pattern) for key in keys)
        and not any(fnmatchcase(key, f"{pattern}.*") for key in keys if keys is dropped)
    }


def written_apart(ckpt: Checkpoint, left: Mapping[str, str]) -> dict[str, str]:
    """Names of one tensor, beside those that are `left` out, that become tensors of their own, for
    the target knows no ties: each with the first of them."""
    found = {}
    for names in ckpt.sharing():
        written = [fqn for fqn in names if fqn not in left]
        found.update({fqn: written[0] for fqn in written[1:]})
    return found


def left_by_shape(
    ckpt: Mapping[str, LazyTensor], steps: Steps, scheme: Scheme | None, options: Options
) -> dict[str, str]:
    """Weights that stay as they are though the scheme takes such by name, each with its reason."""
    if scheme is None or options.encode:
        return {}
    found = {}
    for step in steps:
        if step.role != "model" or step.source != step.target or step.fqn not in ckpt:
            continue
        lazy = ckpt[step.fqn]
        if (
            scheme.target(step.fqn, lazy.info) is None
            and lazy.encoding_.name == "dense"
            and not matches(step.fqn, options.no_encode)
            and scheme.target(step.fqn, _rounded(lazy.info)) is not None
        ):
            found[step.fqn] = _why_left(lazy.info, scheme)
    return found


def _why_left(info: TensorInfo, scheme: Scheme) -> str:
    """What a shape has that keeps a weight out, or has not: a scheme may hold it all the same, and
    leave it for the sake of those that load it."""
    refused = scheme.encoding(info)
    if isinstance(refused, Refusal):
        return f"cannot be {scheme.name}: {refused.reason}"
    return f"is not made {scheme.name} by default in shape {list(info.shape)}"


def _rounded(info: TensorInfo) -> TensorInfo:
    return TensorInfo(tuple(-(-extent // ROUND) * ROUND for extent in info.shape), info.dtype)


def none_taken(steps: Steps, scheme: Scheme | None, options: Options) -> dict[str, str]:
    """The scheme that was asked for, where it takes nothing: Conv1D, what is quantized already, or
    what patterns of the user's leave of it."""
    probe = None if scheme is None else scheme.encoding(TensorInfo((ROUND, ROUND), "float32"))
    if scheme is None or isinstance(probe, Refusal | None) or probe.name == "dense":  # a cast
        return {}
    targets = {kind.target for kind in steps.counted() if kind.role == "model"}
    if not targets or any(target.partition("(")[0] == scheme.name for target in targets):
        return {}
    found = ", ".join(sorted(targets))
    given = [name for name in ("encode", "no_encode") if getattr(options, name)]
    by = " and ".join(f"--{name.replace('_', '-')}" for name in given) or "default"
    why = f"no weight becomes {scheme.name} by {by}, all stay as they are ({found})"
    return {scheme.name: why}


def refused_if_strict(
    left: Mapping[str, str],
    loose: Mapping[str, str],
    empty: Mapping[str, str],
    options: Options,
) -> list[Unresolved]:
    """With `--strict`, weights that would stay as they are, patterns that match nothing, and a
    scheme that takes nothing."""
    if not options.strict:
        return []
    ways = (
        "leave it as it is with --no-encode '{}'",
        "correct it",
        "name weights with --encode GLOB",
    )
    return [
        Unresolved(key, why, f"{way.format(key)}, or convert without --strict")
        for found, way in zip((left, loose, empty), ways, strict=True)
        for key, why in found.items()
    ]
