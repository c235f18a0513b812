"""Which encoding a tensor gets: by the codes that could be kept, else by its name and shape."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.core.code_grids import KeepsCodes, Repairs, ScalesExactly, TakesModules
from ckptmap.errors import PlanError
from ckptmap.planning.conversion import Step, Steps
from ckptmap.planning.kept_codes import code_grid
from ckptmap.planning.options import Options
from ckptmap.planning.plan import Unresolved
from ckptmap.protocols import Encoding, Refusal, Scheme
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import TensorInfo

ROUND = 4096
"""A multiple of every block size: what a shape is rounded up to, to see whether it is the shape
that keeps a weight from being encoded."""


def encoding_for(
    lazy: LazyTensor, scheme: Scheme | None, options: Options, *, declared: bool = False
) -> Encoding | None:
    """None: the tensor stays as it is. `declared`: a config.json will promise the scheme's library
    what it can load. Raises PlanError CKM203 where `--encode` names a tensor that the scheme cannot
    hold, or codes would be kept that the library does not load."""
    if scheme is None or lazy.encoding == scheme.name or _matches(lazy.fqn, options.no_encode):
        return _repaired(lazy)
    found = _chosen(lazy, scheme, options)
    if found is not None and declared:
        _check_module(lazy, scheme)
    return _repaired(lazy) if found is None else found


def _chosen(lazy: LazyTensor, scheme: Scheme, options: Options) -> Encoding | None:
    exact = _matches(lazy.fqn, options.exact_scales)
    named = _matches(lazy.fqn, options.encode)
    grid = code_grid(lazy)
    if grid is not None and isinstance(scheme, KeepsCodes) and (named or not options.encode):
        kept = scheme.keeping(lazy.info, grid, exact)
        if kept is not None:
            return kept
    found = _fresh(lazy, scheme, named) if named or not options.encode else None
    if found is not None and exact and isinstance(scheme, ScalesExactly):
        return scheme.exactly(found, lazy.info)
    return found


def _check_module(lazy: LazyTensor, scheme: Scheme) -> None:
    if isinstance(scheme, TakesModules) and not scheme.takes(lazy.fqn):
        raise PlanError(
            "CKM203",
            f"{lazy.fqn}: cannot be {scheme.name}: by its name it is of no linear module of its own,"
            " and transformers would not load it",
            f"leave it as it is with --no-encode '{lazy.fqn}', or write where no config.json"
            f" promises it, --to full-{scheme.suffix}; from codes of another scheme: first --to hf-bf16",
        )


def _fresh(lazy: LazyTensor, scheme: Scheme, named: bool) -> Encoding | None:
    if not named:
        return scheme.target(lazy.fqn, lazy.info)
    forced = scheme.encoding(lazy.info)
    if isinstance(forced, Refusal):
        raise PlanError(
            "CKM203", f"{lazy.fqn}: cannot be {scheme.name}: {forced.reason}",
            "narrow --encode, or leave it out with --no-encode",
        )  # fmt: skip
    return forced


def beside_ties(ckpt: Checkpoint, scheme: Scheme | None, options: Options) -> dict[str, str]:
    """Weights that stay as they are because a tensor of the same storage does, each with its
    reason: a head tied to an embedding, whatever it is called, would be another tensor else."""
    if scheme is None or options.encode:
        return {}
    found = {}
    for tied in ckpt.sharing():
        left = [fqn for fqn in tied if not _takes(scheme, ckpt[fqn], options)]
        if left and len(left) < len(tied):
            why = f"is one tensor with {left[0]}, which stays"
            found.update({fqn: why for fqn in tied if fqn not in left})
    return found


def _takes(scheme: Scheme, lazy: LazyTensor, options: Options) -> bool:
    encoding = scheme.target(lazy.fqn, lazy.info)
    return encoding is not None and not _matches(lazy.fqn, options.no_encode)


def written_apart(ckpt: Checkpoint, left: Mapping[str, str]) -> dict[str, str]:
    """Names of one tensor, beside those that are `left` out, that become tensors of their own, for
    the target knows no ties: each with the first of them."""
    found = {}
    for names in ckpt.sharing():
        written = [fqn for fqn in names if fqn not in left]
        found.update({fqn: written[0] for fqn in written[1:]})
    return found


def left_by_shape(
    ckpt: Mapping[str, LazyTensor], steps: Iterable[Step], scheme: Scheme | None, options: Options
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
            and not _matches(step.fqn, options.no_encode)
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


def _matches(fqn: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(fqn, pattern) for pattern in patterns)


def _repaired(lazy: LazyTensor) -> Encoding | None:
    """What a tensor that was found malformed is written as; None: as it is."""
    encoding = lazy.encoding_
    if encoding.name == "dense":  # a look at a protocol's methods costs as much as all else here
        return None
    return encoding.repaired() if isinstance(encoding, Repairs) else None
