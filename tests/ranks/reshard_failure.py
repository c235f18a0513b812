"""A live reshard of which one rank fails, in each of its parts: every rank gets the error, none waits.

python -m tests.ranks.reshard_failure
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import ckptmap
from ckptmap.errors import CkptmapError
from ckptmap.live.state_dict import reshard
from tests.support.resume_model import fsdp2, net

SMALL = 6_000
"""Bytes of messages: several rounds."""


def failing(real: Callable[..., Any], at: int) -> Callable[..., Any]:
    """Return the real function, whose call number `at` is out of memory on rank 1."""
    calls = itertools.count()

    def call(*given: Any) -> Any:
        if next(calls) == at and dist.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*given)

    return call


def error_of(state: Any, model: Any) -> str:
    try:
        ckptmap.translate(state, like=model, max_memory=SMALL)
    except (CkptmapError, torch.OutOfMemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    source = net(0).state_dict() if rank == 0 else {}
    model = fsdp2(net(1))
    for where, name, at in (
        (reshard.Exchange, "_outs", 0),
        (reshard.Exchange, "_message", 0),
        (reshard.Exchange, "_message", 2),
        (reshard, "_view", 1),
        (reshard, "_view", 3),
    ):
        call = failing(getattr(where, name), at)
        with mock.patch.object(where, name, lambda *given, call=call: call(*given)):
            error = error_of(source, model)
        expected = "OutOfMemoryError: " if rank == 1 else "RunError: [rank 1] OutOfMemoryError: "
        assert error == expected + "CUDA out of memory", (name, at, error)
    made = ckptmap.translate(source, like=model, max_memory=SMALL)
    for fqn, value in net(0).state_dict().items():
        whole = made[fqn].full_tensor() if hasattr(made[fqn], "full_tensor") else made[fqn]
        assert torch.equal(whole, value), fqn
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
