"""FSDP1 gathers before a hook can act: told at once, on install.  python -m tests.live.hooks_fsdp1"""

from __future__ import annotations

import torch
import torch.distributed as dist

import ckptmap
from tests.live.resume_model import fsdp1, net

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    wrapped = fsdp1(net(0))
    for attempt in (
        lambda: ckptmap.hooks.install(wrapped),
        lambda: ckptmap.translate(net(1).state_dict(), like=wrapped),
    ):
        try:
            attempt()
        except ckptmap.CkptmapError as error:
            assert error.code == "CKM505" and "ckptmap.load" in error.hint, error
        else:
            raise AssertionError("FSDP1 was not refused")
    dist.destroy_process_group()
