"""What each of 2 ranks does in `tests.live.load.test_every_form`, by `run_ranks(module, 2, [DIR])`.

Loads every `DIR/FORM/in` into a dense model under FSDP2 and compares each shard with that of `DIR/FORM/values.pt`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import GptOssConfig, GptOssForCausalLM

import ckptmap
from tests.support.cpu_sharding import fully_shard
from tests.support.gpt_oss import SIZES
from tests.support.int8_models import llama


def check(folder: Path) -> None:
    if folder.name == "mxfp4":
        model = GptOssForCausalLM(GptOssConfig(**SIZES)).to(torch.bfloat16)
    else:
        model = llama(hidden=128)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    ckptmap.load(folder / "in", model)
    wanted = torch.load(folder / "values.pt")
    state = model.state_dict()
    assert state.keys() == wanted.keys(), folder
    for key, value in state.items():
        assert isinstance(value, DTensor), key
        mine = distribute_tensor(wanted[key], value.device_mesh, value.placements).to_local()
        got = value.to_local()
        assert got.dtype == mine.dtype and torch.equal(got, mine), (folder.name, key)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for given in sorted(Path(sys.argv[1]).iterdir()):
        check(given)
    dist.destroy_process_group()
