"""Shared by the examples: a small Llama, its input, and a process group on loopback."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=2048,
    max_position_embeddings=256,
    tie_word_embeddings=False,
)


def build(device: str = "cpu") -> LlamaForCausalLM:
    """Return the model in bfloat16, with the same weights at every call; on "meta" without any."""
    torch.manual_seed(0)
    with torch.device(device):
        model: LlamaForCausalLM = LlamaForCausalLM(CONFIG).to(torch.bfloat16)
    return model


def tokens() -> torch.Tensor:
    """Return a prompt [2, 64] of token ids, the same at every call."""
    return torch.randint(CONFIG.vocab_size, (2, 64), generator=torch.Generator().manual_seed(1))


def mesh() -> DeviceMesh:
    """Return all ranks as a mesh of CPUs: without one `fully_shard` takes the GPUs that there are."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


@contextmanager
def ranks() -> Iterator[int]:
    """Join the process group that torchrun describes; yields this process's rank."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    try:
        yield dist.get_rank()
        dist.barrier()
    finally:
        dist.destroy_process_group()
