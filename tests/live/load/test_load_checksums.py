"""`load` refuses a damaged checkpoint, though each rank reads a part of a record only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptmap
from ckptmap.errors import ArgumentError, SourceError
from tests.corpus.ranks import run_ranks
from tests.support.resume_model import net


def saved(folder: Path, flip: str = "") -> Path:
    """Write a state dict with torch.save, one bit flipped in the middle of the tensor `flip`."""
    path = folder / f"{flip or 'good'}.pt"
    tensors = {name: tensor.clone() for name, tensor in net(0).state_dict().items()}
    del tensors["head.weight"]  # tied
    torch.save(tensors, path)
    if flip:
        with ckptmap.open(path) as ckpt:
            extent = ckpt[flip].parts[""].extent
            assert extent is not None
        content = bytearray(path.read_bytes())
        content[extent.offset + tensors[flip].nbytes // 2] ^= 2
        path.write_bytes(content)
    return path


def test_ranks_put_together_what_each_has_read(tmp_path: Path) -> None:
    bad = saved(tmp_path, "layers.1.up.weight")
    run_ranks("tests.ranks.load_damaged", 2, [str(saved(tmp_path)), str(bad)])


@pytest.mark.parametrize("verify", ["stored", "full"])
def test_one_process(verify: str, tmp_path: Path) -> None:
    bad = saved(tmp_path, "layers.0.down.weight")
    with pytest.raises(SourceError, match=r"layers\.0\.down\.weight.*are damaged") as caught:
        ckptmap.load(bad, net(1), verify=verify)
    assert caught.value.code == "CKM105"
    ckptmap.load(bad, net(1), verify="none")
    report = ckptmap.load(saved(tmp_path), net(1), verify=verify)
    assert report.source.checked and not report.source.unchecked


def test_exact_without_checksums_means_nothing(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="verify: expected"):
        ckptmap.load(saved(tmp_path), net(1), exact=True, verify="none")
