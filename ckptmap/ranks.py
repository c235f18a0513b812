"""Several processes that do one conversion together: `with ckptmap.ranks.join() as ranks`.

    torchrun --nproc-per-node 8 my_conversion.py

    with ckptmap.ranks.join() as ranks:
        ckptmap.convert("runs/step-2000", "out/", "hf", ranks=ranks)

The classes are written in `ckptmap.execution.ranks`; these names stay here.
"""

from __future__ import annotations

from ckptmap.execution.ranks import (
    ALONE,
    GRACE_S,
    TIMEOUT_S,
    GlooRanks,
    Ranks,
    ShownElsewhere,
    join,
)

__all__ = ["ALONE", "GRACE_S", "TIMEOUT_S", "GlooRanks", "Ranks", "ShownElsewhere", "join"]
