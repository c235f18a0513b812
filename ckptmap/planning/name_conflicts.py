"""Names that an output must not have, for it would not be read as it was meant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ckptmap.core.state_paths import join
from ckptmap.errors import PlanError
from ckptmap.mapping.wrappers import HEAD
from ckptmap.planning.conversion import Steps
from ckptmap.tensors import Path


def prove_apart(paths: Sequence[Path]) -> None:
    """("extra", "a.b") and ("extra", "a", "b") are both extra.a.b, and a manifest goes by that.
    Raises PlanError CKM114.

    No two of `paths` are equal; where they are all of one dict, as most are, that is enough.
    """
    if len({path[:-1] for path in paths}) < 2:
        return
    joined = list(map(join, paths))
    if len({*joined}) == len(joined):
        return
    name = Counter(joined).most_common(1)[0][0]
    twice = [path for path, key in zip(paths, joined, strict=True) if key == name]
    raise PlanError(
        "CKM114",
        f"{name!r} would be written twice: as {twice[0]} and as {twice[1]}",
        "drop or rename one of them",
    )


def require_told_apart(steps: Steps) -> None:
    """A module of the model's own that is called `module` is told from DDP's by a name without it.
    Raises PlanError CKM114 where the weights that go along have none left."""
    if all(fqn.startswith(f"{HEAD}.") for fqn in steps.fqns_of("model")):
        raise PlanError(
            "CKM114",
            f"{steps.fqns[0]}: all names that are left begin with '{HEAD}.', which would be read as DDP's",
            "let a weight without it go along, or give other names with --names FILE",
        )
