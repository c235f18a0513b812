"""What Lightning leaves where a model is sharded: a DCP directory, and beside it what is no shard.

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
    """Weights and optimizers where the DCP has them; meta.pt holds what its one-file form
    holds beside them."""

    name = "lightning"

    def claims(self, place: Place) -> bool:
        return place.is_dir and {".metadata", META} <= {*place.names}

    def members(self, place: Place) -> Members:
        saved = Member(place.path, "all", names=matching(_DCP, place))
        return Members((saved, Member(str(Path(place.path) / META), "extra")))
