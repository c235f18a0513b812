"""A program that destroys its process group while a save is written is told what to do; the next group saves again.

python -m tests.ranks.destroyed_group FOLDER
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import ckptmap
from ckptmap.errors import RunError
from ckptmap.live.save import this_rank
from tests.support.resume_model import WRAPS, net


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    model = WRAPS["fsdp2"](net(0))
    ckptmap.save(folder / "first", model).wait()
    destroyed = threading.Event()
    merge = this_rank.merge

    def held_up(*arguments: Any) -> Any:
        assert destroyed.wait(60)
        return merge(*arguments)

    with mock.patch.object(this_rank, "merge", held_up):  # of a known plan, in the background
        handle = ckptmap.save(folder / "second", model)
        dist.barrier()
        dist.destroy_process_group()
        destroyed.set()
        try:
            handle.wait()
        except RunError as error:
            assert error.code == "CKM307" and "process group was destroyed" in error.message, error
            assert "before dist.destroy_process_group()" in error.hint
        else:
            raise AssertionError("it is published, although the ranks could not agree on it")
    assert not (folder / "second").exists()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
