"""Find the parts of a directory in which Lightning saved a sharded model: DCP files and `meta.pt`.

The weights and optimizers are in the DCP files under these keys, the rest is in `meta.pt`:

    Trainer, FSDPStrategy             {"model": ..., "optimizer_0": ...}
    Trainer, ModelParallelStrategy    {"state_dict": ..., "optimizer_0": ...}
    Fabric                            the names that its user gave
    meta.pt                           epoch, global_step, loops, lr_schedulers, hyper_parameters, ...

Source: lightning 2.6, pytorch/strategies and fabric/strategies, fsdp.py and model_parallel.py.
"""

from __future__ import annotations

import re
from pathlib import Path

from ckptmap.formats.frameworks.accelerate_names import matching
from ckptmap.protocols import Member, Members, Place

META = "meta.pt"
_DCP = re.compile(r"\.metadata|.+\.distcp")


class Lightning:
    """Names the parts of the directory: the DCP files, and `meta.pt`, whose values are extra values."""

    name = "lightning"

    def claims(self, place: Place) -> bool:
        """Return True for a DCP directory with meta.pt."""
        return place.is_dir and {".metadata", META} <= {*place.names}

    def members(self, place: Place) -> Members:
        """Return the DCP files and `meta.pt`."""
        saved = Member(place.path, "all", names=matching(_DCP, place))
        return Members((saved, Member(str(Path(place.path) / META), "extra")))
