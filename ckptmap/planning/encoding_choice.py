"""Which encoding a tensor gets: by the codes that could be kept, else by its name and shape."""

from __future__ import annotations

from fnmatch import fnmatchcase

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.core.code_grids import KeepsCodes, Repairs, ScalesExactly, TakesModules
from ckptmap.errors import PlanError
from ckptmap.planning.kept_codes import code_grid
from ckptmap.planning.options import Options
from ckptmap.protocols import Encoding, Refusal, Scheme
from ckptmap.storage.lazy_tensor import LazyTensor

ROUND = 4096
"""A multiple of every block size: what a shape is rounded up to, to see whether it is the shape
that keeps a weight from being encoded."""


def encoding_for(
    lazy: LazyTensor, scheme: Scheme | None, options: Options, *, declared: bool = False
) -> Encoding | None:
    """None: the tensor stays as it is. `declared`: a config.json will promise the scheme's library
    what it can load. Raises PlanError CKM203 where `--encode` names a tensor that the scheme cannot
    hold, or codes would be kept that the library does not load."""
    if scheme is None or lazy.encoding == scheme.name or matches(lazy.fqn, options.no_encode):
        return _repaired(lazy)
    found = _chosen(lazy, scheme, options)
    if found is not None and declared:
        _check_module(lazy, scheme)
    return _repaired(lazy) if found is None else found


def _chosen(lazy: LazyTensor, scheme: Scheme, options: Options) -> Encoding | None:
    exact = matches(lazy.fqn, options.exact_scales)
    named = matches(lazy.fqn, options.encode)
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
    return encoding is not None and not matches(lazy.fqn, options.no_encode)


def matches(fqn: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(fqn, pattern) for pattern in patterns)


def _repaired(lazy: LazyTensor) -> Encoding | None:
    """What a tensor that was found malformed is written as; None: as it is."""
    encoding = lazy.encoding_
    if encoding.name == "dense":  # a look at a protocol's methods costs as much as all else here
        return None
    return encoding.repaired() if isinstance(encoding, Repairs) else None
