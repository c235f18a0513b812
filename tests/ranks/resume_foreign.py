"""Low-bit optimizer state as torch itself saves it: DCP with FQNs, and a file a rank.

python -m tests.ranks.resume_foreign FOLDER

Of the 79 rows one rank holds codes and the other a plain tensor, which torch saves side by side.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import ckptmap
from ckptmap.live.quantized import torchao_lowbit_fix as fix_lowbit
from tests.support.resume_model import built, train
from tests.support.resume_optimizers import ALL, same_state


def main(folder: Path) -> None:
    for name in ("ao8", "ao4", "aofp8"):
        model = built("fsdp2", "eager", 0)
        optimizer = ALL[name](model.parameters())
        train(model, optimizer, 0, 2, dist.get_rank())
        state: dict[str, Any] = {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer),
        }
        dcp.save(state, checkpoint_id=folder / name)  # type: ignore[attr-defined]
        files = folder / f"{name}-ranks"
        files.mkdir(exist_ok=True)
        torch.save(state, files / f"model_rank_{dist.get_rank()}.pt")
        dist.barrier()
        for source in (folder / name, files):
            again = built("fsdp2", "eager", 1)
            theirs = ALL[name](again.parameters())
            report = ckptmap.load(source, again, theirs)
            assert report.state is not None and not report.state.initialised, report
            assert not report.state.recoded, report
            assert not same_state(optimizer, theirs), (source, same_state(optimizer, theirs))
            train(again, theirs, 2, 3, dist.get_rank())
        dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")
    dist.init_process_group("gloo")
    fix_lowbit.apply()
    main(Path(sys.argv[1]))
    dist.barrier()
    dist.destroy_process_group()
