"""Make the rank files of a job of 16, 64 or 256 ranks in one process: a model of 291 tensors.

At width 1024 the files of 256 ranks have 1.06 GB in all (4 MB each), at width 2048 4.16 GB (16 MB
each).

For each rank R of N the process joins torch's fake process group, which needs no other processes.
So the device mesh, the DTensors and their pickles are those of a real job of N ranks. The directory
has the form of verl's checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

LAYERS, VOCABULARY = 32, 32000
SETS = {
    "ranks_16": (16, 1024), "ranks_64": (64, 1024), "ranks_256": (256, 1024),
    "ranks_256_large": (256, 2048),
}  # fmt: skip
"""Name -> (ranks, width): 4,656, 18,624, 74,496 and 74,496 shards."""


def shapes(width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, shape) of each tensor of a Llama model, with the names of transformers."""
    kv, ffn = width // 4, 4 * width
    yield "model.embed_tokens.weight", (VOCABULARY, width)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        yield f"{at}.self_attn.q_proj.weight", (width, width)
        yield f"{at}.self_attn.k_proj.weight", (kv, width)
        yield f"{at}.self_attn.v_proj.weight", (kv, width)
        yield f"{at}.self_attn.o_proj.weight", (width, width)
        yield f"{at}.mlp.gate_proj.weight", (ffn, width)
        yield f"{at}.mlp.up_proj.weight", (ffn, width)
        yield f"{at}.mlp.down_proj.weight", (width, ffn)
        yield f"{at}.input_layernorm.weight", (width,)
        yield f"{at}.post_attention_layernorm.weight", (width,)
    yield "model.norm.weight", (width,)
    yield "lm_head.weight", (VOCABULARY, width)


def config(width: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": LAYERS,
        "num_attention_heads": width // 64, "num_key_value_heads": width // 256, "head_dim": 64,
        "vocab_size": VOCABULARY, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
    }  # fmt: skip


def write(folder: Path, world: int, width: int) -> None:
    """Write `model_world_size_N_rank_R.pt`, fsdp_config.json and huggingface/ into `folder`."""
    import torch

    torch.manual_seed(0)
    whole = {
        name: torch.randn(shape).mul_(0.02).to(torch.bfloat16) for name, shape in shapes(width)
    }
    (folder / "huggingface").mkdir(parents=True)
    (folder / "huggingface" / "config.json").write_text(json.dumps(config(width)))
    _write_tokenizer(folder / "huggingface")
    about = {"FSDP_version": 2, "world_size": world}
    (folder / "fsdp_config.json").write_text(json.dumps(about))
    for rank in range(world):
        _write_rank(folder, whole, rank, world)


def _write_tokenizer(folder: Path) -> None:
    """Write a small tokenizer beside the config, because verl's merger requires one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def _write_rank(folder: Path, whole: dict[str, Tensor], rank: int, world: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
        state = {}
        for name, tensor in whole.items():
            step = -(-tensor.shape[0] // world)
            local = tensor[rank * step : (rank + 1) * step].clone()
            state[name] = DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride()
            )
        torch.save(state, folder / f"model_world_size_{world}_rank_{rank}.pt")
    finally:
        dist.destroy_process_group()
