"""Loads of two ranks from a file of which each reads a part, and in which one bit is flipped.

python -m tests.ranks.load_damaged GOOD BAD
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import ckptmap
from ckptmap.errors import CkptmapError
from tests.support.resume_model import fsdp2, net


def refusal(path: str, verify: str) -> str:
    """Return the error of a load, "" where it raised none."""
    try:
        ckptmap.load(path, fsdp2(net(1)), verify=verify)
    except CkptmapError as error:
        return f"{error.code} {error}"
    return ""


def main(good: str, bad: str) -> None:
    dist.init_process_group("gloo")
    report = ckptmap.load(good, fsdp2(net(1)))
    if dist.get_rank() == 0:
        whole = torch.load(good, weights_only=True)  # buffers are read by both ranks
        nbytes = [tensor.untyped_storage().nbytes() for tensor in whole.values()]
        assert report.source.checked - sum(nbytes) == whole["calls"].nbytes, report.source
    assert not report.source.unchecked, report.source
    for verify in ("stored", "full"):
        error = refusal(bad, verify)
        assert "CKM105" in error and "are damaged: expected CRC-32" in error, error
        assert "layers.1.up.weight" in error, error
    assert not refusal(bad, "none")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
