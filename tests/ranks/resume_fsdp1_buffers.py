"""FSDP1 casts buffers before its first forward: a run goes on bit for bit in a model that has not run yet.

python -m tests.ranks.resume_fsdp1_buffers FOLDER
"""

from __future__ import annotations

import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

import ckptmap
from ckptmap.errors import LoadError
from tests.ranks.resume_save import expect

LOW, FULL = torch.bfloat16, torch.float32
CAST = {"rotary": LOW, "norm.running_mean": LOW, "head.scale": FULL}


class Head(nn.Linear):
    """A unit of its own, whose buffer stays in float32."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__(16, 4)
        self.register_buffer("scale", torch.linspace(0.7, 1.3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale.to(x.dtype)


class Net(nn.Module):
    rotary: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = Head()
        self.register_buffer("rotary", torch.linspace(0.1, 1.7, 16))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.up(x) * self.rotary.cos()))
        return out


def built(seed: int, buffers: torch.dtype | None = LOW) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = Net()
    model.head = FullyShardedDataParallel(  # type: ignore[assignment]
        model.head, mixed_precision=MixedPrecision(param_dtype=LOW), use_orig_params=True,
        device_id=torch.device("cpu"),
    )  # fmt: skip
    wrapped = FullyShardedDataParallel(
        model, use_orig_params=True,
        mixed_precision=MixedPrecision(param_dtype=LOW, buffer_dtype=buffers),
        device_id=torch.device("cpu"),
    )  # fmt: skip
    return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=1e-2)


def train(model: Any, optimizer: Any, first: int, last: int) -> list[float]:
    """All ranks have the same words: FSDP1 does not make the statistics of BatchNorm equal."""
    losses = []
    for step in range(first, last):
        words = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        loss = model(words).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def dtypes(model: Any) -> dict[str, torch.dtype]:
    named = {n.replace("_fsdp_wrapped_module.", ""): b.dtype for n, b in model.named_buffers()}
    return {name: named[name] for name in CAST}


def main(folder: Path) -> None:
    model, optimizer = built(0)
    ckptmap.save(folder / "first", model, optimizer, background=False)
    train(model, optimizer, 0, 3)
    assert dtypes(model) == CAST
    ckptmap.save(folder / "third", model, optimizer, background=False)
    want = train(model, optimizer, 3, 6)
    ends = {name: buffer.clone() for name, buffer in model.named_buffers()}

    fresh, its = built(1)
    assert set(dtypes(fresh).values()) == {FULL}
    report = ckptmap.load(folder / "third", fresh, its, exact=True)
    assert not report.cast and not report.changes
    assert train(fresh, its, 3, 6) == want and dtypes(fresh) == CAST
    assert all(torch.equal(buffer, ends[name]) for name, buffer in fresh.named_buffers())
    ckptmap.load(folder / "third", fresh, its, exact=True)  # one that has run
    assert train(fresh, its, 3, 6) == want

    before, its = built(2)
    ckptmap.load(folder / "first", before, its, exact=True)  # saved before the first forward
    assert train(before, its, 0, 6)[3:] == want

    uncast, its = built(3, buffers=None)
    text = "3 weights cast"
    expect(LoadError, text, lambda: ckptmap.load(folder / "third", uncast, its, exact=True))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    main(Path(sys.argv[1]))
    dist.barrier()
    dist.destroy_process_group()
