"""Make the checkpoints that the benchmarks read: Llama-3.2-1B shapes, tied, random bfloat16.

    python benchmarks/sources.py FOLDER SIZE [NAME ...]

Every source is written once, by the framework's own writer (safetensors, torch.save, or
torch.distributed.checkpoint over four gloo ranks). The file `NAME.done` beside it marks it
complete.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rank_sources
import sparse_sources

if TYPE_CHECKING:
    from torch import Tensor

SIZES = {"full": (16, 128256), "quarter": (4, 32064)}
"""Size -> (layers, vocabulary): 146 tensors in 2.47 GB, 38 tensors in 0.62 GB."""
HIDDEN, KV, FFN = 2048, 512, 8192
RANKS = 4
MANY = 100_000
MANY_NUMEL = 2048
FILES = 1024
SHARD_NBYTES = 700_000_000
PREFIX = "module._orig_mod."


def shapes(size: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, shape) of each tensor, with the names of transformers.

    There is no `lm_head`, because it is tied to the embedding.
    """
    layers, vocabulary = SIZES[size]
    yield "model.embed_tokens.weight", (vocabulary, HIDDEN)
    for layer in range(layers):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (HIDDEN,)
        yield f"{at}.mlp.down_proj.weight", (HIDDEN, FFN)
        yield f"{at}.mlp.gate_proj.weight", (FFN, HIDDEN)
        yield f"{at}.mlp.up_proj.weight", (FFN, HIDDEN)
        yield f"{at}.post_attention_layernorm.weight", (HIDDEN,)
        yield f"{at}.self_attn.k_proj.weight", (KV, HIDDEN)
        yield f"{at}.self_attn.o_proj.weight", (HIDDEN, HIDDEN)
        yield f"{at}.self_attn.q_proj.weight", (HIDDEN, HIDDEN)
        yield f"{at}.self_attn.v_proj.weight", (KV, HIDDEN)
    yield "model.norm.weight", (HIDDEN,)


def config(size: str) -> dict[str, Any]:
    layers, vocabulary = SIZES[size]
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": layers,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "vocab_size": vocabulary, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
    }  # fmt: skip


# ------------------------------------------------------------------------- in one process


def hf(folder: Path, size: str) -> None:
    """Write one safetensors file and a config."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, shape in shapes(size):
        state[name] = torch.empty(shape, dtype=torch.bfloat16)
        for rows in torch.split(state[name].view(-1), 1 << 22):
            rows.copy_(torch.randn(len(rows), generator=generator) * 0.02)
    folder.mkdir()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config(size)))


def _weights(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    state: dict[str, Tensor] = load_file(folder.parent / "hf" / "model.safetensors")
    return state


def hf_shards(folder: Path, size: str) -> None:
    """Write the weights of `hf` as several safetensors files with an index, and a config."""
    from huggingface_hub import save_torch_state_dict

    folder.mkdir()
    save_torch_state_dict(_weights(folder), folder, max_shard_size=SHARD_NBYTES)
    (folder / "config.json").write_text(json.dumps(config(size)))


def hf_fp32(folder: Path, size: str) -> None:
    from safetensors.torch import save_file

    folder.mkdir()
    state = {name: tensor.float() for name, tensor in _weights(folder).items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def pt(path: Path, size: str) -> None:
    """Write the torch.save file of the state dict of a compiled model in DDP."""
    import torch

    torch.save({PREFIX + name: tensor for name, tensor in _weights(path).items()}, path)


def many_safetensors(folder: Path, size: str) -> None:
    from safetensors.torch import save_file

    folder.mkdir()
    save_file(_many(), folder / "model.safetensors", metadata={"format": "pt"})


def many_pt(path: Path, size: str) -> None:
    import torch

    torch.save(_many(), path)


def many_dcp(folder: Path, size: str) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    save(_many(), checkpoint_id=folder, no_dist=True)


def _many() -> dict[str, Tensor]:
    """Return 100,000 tensors of 4 KB."""
    import torch

    rows = torch.randn(MANY, MANY_NUMEL // 8).to(torch.bfloat16).repeat(1, 8)
    return {f"model.layers.{i // 100}.experts.{i % 100}.w": rows[i].clone() for i in range(MANY)}


# ------------------------------------------------------------------------- over four ranks


def dcp(folder: Path, size: str) -> None:
    """Write a DCP directory, every tensor `Shard(0)` over four ranks."""
    _on_ranks(_save_dcp, folder, size, "rows")


def dcp_columns(folder: Path, size: str) -> None:
    """Write the same with matrices cut by columns, as tensor parallelism cuts them."""
    _on_ranks(_save_dcp, folder, size, "columns")


def dcp_files(folder: Path, size: str) -> None:
    """Write 256 tensors over four ranks with one file for each chunk: 1024 files."""
    _on_ranks(_save_dcp, folder, size, "files")


def ranks(folder: Path, size: str) -> None:
    """Write one torch.save file of `Shard(0)` DTensors for each of four ranks."""
    folder.mkdir()
    _on_ranks(_save_rank, folder, size, "rows")


def _on_ranks(save: Callable[..., None], folder: Path, size: str, cut: str) -> None:
    from torch.multiprocessing.spawn import spawn

    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    store = folder.resolve().parent / f"{folder.name}.store"
    store.unlink(missing_ok=True)
    spawn(_rank, (save, folder, size, cut, store), nprocs=RANKS)  # type: ignore[no-untyped-call]
    store.unlink(missing_ok=True)


def _rank(
    rank: int, save: Callable[..., None], folder: Path, size: str, cut: str, store: Path
) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    state = {}
    for name, tensor in _blocks() if cut == "files" else _lazy(folder):
        dim = 1 if cut == "columns" and len(tensor.get_shape()) == 2 else 0
        shape = tensor.get_shape()
        step = shape[dim] // RANKS
        at = (slice(None),) * dim + (slice(rank * step, (rank + 1) * step),)
        local = tensor[at].clone()  # the slice may refer to the file, which is closed later
        state[name] = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)
    save(state, folder, cut)
    dist.destroy_process_group()


def _lazy(folder: Path) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    with safe_open(folder.parent / "hf" / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 (no mapping)
            yield name, file.get_slice(name)


class _Block:
    """Stands in for a slice of a safetensors file; each rank gets 600 KB of it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def get_shape(self) -> list[int]:
        return [600, 2048]

    def __getitem__(self, at: tuple[slice, ...]) -> Tensor:
        import torch

        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(600, 2048, generator=generator).to(torch.bfloat16)[at]


def _blocks() -> Iterator[tuple[str, Any]]:
    return ((f"blocks.{i}.weight", _Block(i)) for i in range(FILES // RANKS))


def _save_dcp(state: dict[str, Any], folder: Path, cut: str) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = FileSystemWriter(folder, single_file_per_rank=cut != "files")
    save(state, storage_writer=writer)


def _save_rank(state: dict[str, Any], folder: Path, cut: str) -> None:
    import torch
    import torch.distributed as dist

    torch.save(state, folder / f"model_world_size_{RANKS}_rank_{dist.get_rank()}.pt")


# --------------------------------------------------------------------------------- make


def many_ranks(world: int, width: int) -> Callable[[Path, str], None]:
    """Return the function that writes verl's directory with that many rank files."""

    def make_ranks(folder: Path, size: str) -> None:
        rank_sources.write(folder, world, width)

    return make_ranks


def sparse_model(form: str) -> Callable[[Path, str], None]:
    """Return the function that writes the headers of a large quantized model."""

    def make_sparse(folder: Path, size: str) -> None:
        sparse_sources.write(form, folder)

    return make_sparse


SOURCES: dict[str, tuple[str, Callable[[Path, str], None]]] = {
    "hf": ("hf", hf),
    "hf_shards": ("hf_shards", hf_shards),
    "hf_fp32": ("hf_fp32", hf_fp32),
    "pt": ("prefixed.pt", pt),
    "dcp": ("dcp", dcp),
    "dcp_columns": ("dcp_columns", dcp_columns),
    "dcp_files": ("dcp_files", dcp_files),
    "ranks": ("ranks", ranks),
    "many_safetensors": ("many_safetensors", many_safetensors),
    "many_pt": ("many.pt", many_pt),
    "many_dcp": ("many_dcp", many_dcp),
    **{name: (name, many_ranks(*cut)) for name, cut in rank_sources.SETS.items()},
    **{name: (name, sparse_model(name)) for name in sparse_sources.FORMS},
}
"""Name -> (path in the folder, function that makes it); others are made from `hf`, the first."""


def path_of(folder: Path, name: str) -> Path:
    return folder / SOURCES[name][0]


def is_made(folder: Path, name: str) -> bool:
    return (folder / f"{name}.done").is_file()


def make(folder: Path, size: str, name: str) -> None:
    """Make a source unless it is complete; one that an interrupted run left is made again."""
    if is_made(folder, name):
        return
    path = path_of(folder, name)
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)
    SOURCES[name][1](path, size)
    (folder / f"{name}.done").touch()


if __name__ == "__main__":
    where, wanted_size, *wanted = sys.argv[1:]
    Path(where).resolve().mkdir(parents=True, exist_ok=True)
    for source in wanted or SOURCES:
        make(Path(where).resolve(), wanted_size, source)
