"""Training under FSDP2 goes on from DeepSpeed's checkpoint as it would on one process.

python -m tests.ranks.resume_zero FOLDER NAME...

FOLDER has the samples of `golden/deepspeed`. The expected weights are those of one AdamW step from what
DeepSpeed had in memory.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import ckptmap
from tests.golden.deepspeed.make_deepspeed import RUNS
from tests.support.cpu_sharding import fully_shard
from tests.support.same_tensors import assert_same
from tests.support.zero_resume import groups_in_order, one_step, resumed_by_hand, untrained


def main(folder: Path, names: list[str]) -> None:
    for run in (run for run in RUNS if run.name in names):
        model = untrained(run)
        fully_shard(model.inner)
        fully_shard(model)
        optimizer = torch.optim.AdamW(groups_in_order(run, model), lr=0.5)
        report = ckptmap.load(folder / run.name, model, optimizer)
        assert report.state is not None and not report.state.initialised, report
        one_step(model, optimizer)
        expected = resumed_by_hand(folder / run.name, run)
        one_step(*expected)
        for name, value in model.named_parameters():
            whole = value.full_tensor()  # type: ignore[attr-defined]
            assert_same(whole.detach(), expected[0].get_parameter(name).detach(), name)
        dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]), sys.argv[2:])
    dist.barrier()
    dist.destroy_process_group()
