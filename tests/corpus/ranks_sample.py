"""A module for the tests of `run_ranks`: sums over ranks, fails on one, or hangs."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist


def main(what: str) -> None:
    if what == "hang":
        time.sleep(600)
    dist.init_process_group("gloo")
    total = torch.tensor(dist.get_rank() + 1)
    if what == "fail" and dist.get_rank() == 1:
        raise SystemExit("died on purpose")
    dist.all_reduce(total)
    print(int(total))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
