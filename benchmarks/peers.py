"""The programs that people run today for the same jobs: one function for each.

    python benchmarks/peers.py NAME SRC [DST]

Each function is the shortest correct use of its library on one machine, with the library's default
settings. It is measured as a process of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

PREFIX = "module._orig_mod."
NOT_LINEAR = ("embed_tokens", "norm", "lm_head")


def accelerate_merge(src: str, dst: str) -> None:
    """Merge a DCP directory into safetensors files by accelerate."""
    from accelerate.utils import merge_fsdp_weights

    merge_fsdp_weights(src, dst, safe_serialization=True)


def dcp_to_torch_save(src: str, dst: str) -> None:
    """Convert a DCP directory to one torch.save file."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(src, dst)


def torch_save_to_dcp(src: str, dst: str) -> None:
    """Convert one torch.save file to a DCP directory of one rank."""
    from torch.distributed.checkpoint.format_utils import torch_save_to_dcp

    torch_save_to_dcp(src, dst)


def load_and_save_file(src: str, dst: str) -> None:
    """Convert a torch.save file to safetensors, and remove the prefixes of wrappers from names."""
    from pathlib import Path

    import torch
    from safetensors.torch import save_file

    state = torch.load(src, weights_only=True)
    Path(dst).mkdir()
    state = {name.removeprefix(PREFIX): tensor for name, tensor in state.items()}
    save_file(state, f"{dst}/model.safetensors", metadata={"format": "pt"})


def load_file_and_save_file(src: str, dst: str) -> None:
    """Merge the safetensors files of a directory into one file."""
    from pathlib import Path

    from safetensors.torch import load_file, save_file

    state: dict[str, Any] = {}
    for file in sorted(Path(src).glob("*.safetensors")):
        state |= load_file(file)
    Path(dst).mkdir()
    save_file(state, f"{dst}/model.safetensors", metadata={"format": "pt"})


def rank_files(src: str, dst: str) -> None:
    """Convert rank files of DTensors to safetensors: concatenate local tensors by placement."""
    from pathlib import Path

    import torch
    import torch.distributed.tensor  # the classes that the files name
    from safetensors.torch import save_file

    files = sorted(Path(src).glob("*_rank_*.pt"))
    parts = [torch.load(file, weights_only=False) for file in files]
    state = {
        name: torch.cat([part[name]._local_tensor for part in parts], value.placements[0].dim)
        for name, value in parts[0].items()
    }
    Path(dst).mkdir()
    save_file(state, f"{dst}/model.safetensors", metadata={"format": "pt"})


def load_all_and_cat(src: str, dst: str) -> None:
    """Convert verl's directory to safetensors with torch alone, in the same steps as verl's merger.

    Threads load the files of all ranks into memory; then every tensor is concatenated.
    """
    import os
    from concurrent.futures import ThreadPoolExecutor
    from functools import partial
    from pathlib import Path

    import torch
    import torch.distributed.tensor  # the classes that the files name
    from safetensors.torch import save_file

    count = len(list(Path(src).glob("model_*_rank_*.pt")))
    files = [f"{src}/model_world_size_{count}_rank_{rank}.pt" for rank in range(count)]
    with ThreadPoolExecutor(min(32, os.cpu_count() or 1)) as pool:
        parts = list(pool.map(partial(torch.load, weights_only=False), files))
    state = {}
    for name in list(parts[0]):
        shards = [part.pop(name) for part in parts]
        local = [shard._local_tensor.bfloat16() for shard in shards]
        state[name] = torch.cat(local, shards[0].placements[0].dim)
    Path(dst).mkdir()
    save_file(state, f"{dst}/model.safetensors", metadata={"format": "pt"})


def verl_merger(src: str, dst: str) -> None:
    """Convert verl's directory to safetensors by its own `python -m verl.model_merger merge`.

    Packages that the merger imports but never calls are replaced by stubs, which saves it seconds.
    """
    import sys
    from importlib import import_module
    from importlib.machinery import ModuleSpec
    from unittest.mock import MagicMock

    for name in ("ray", "tensordict", "tensordict.tensorclass", "omegaconf", "dill", "wandb"):
        stub = MagicMock(__path__=[], __spec__=ModuleSpec(name, None), __file__=None)
        sys.modules.setdefault(name, stub)
    merger = import_module("verl.model_merger.fsdp_model_merger")
    config = import_module("verl.model_merger.base_model_merger").ModelMergerConfig(
        operation="merge", backend="fsdp", local_dir=src, target_dir=dst,
        hf_model_config_path=f"{src}/huggingface",
    )  # fmt: skip
    merger.FSDPModelMerger(config).merge_and_save()


def cast_bf16(src: str, dst: str) -> None:
    """Cast the fp32 tensors of a safetensors file to bf16."""
    from pathlib import Path

    import torch
    from safetensors.torch import load_file, save_file

    state = load_file(f"{src}/model.safetensors")
    Path(dst).mkdir()
    state = {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}
    save_file(state, f"{dst}/model.safetensors", metadata={"format": "pt"})


def torchao_nf4(src: str, dst: str) -> None:
    """Write a torch.save file with linear weights as torchao's NF4 and other tensors unchanged."""
    import torch
    from safetensors.torch import load_file
    from torchao.quantization import to_nf4

    state = load_file(f"{src}/model.safetensors")
    for name in state:
        if not any(part in name for part in NOT_LINEAR):
            state[name] = to_nf4(state[name], 64, 256)
    torch.save(state, dst)


def list_safetensors(src: str) -> None:
    """Print the names, dtypes and shapes of a safetensors file."""
    from safetensors import safe_open

    with safe_open(f"{src}/model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 (no mapping)
            slices = file.get_slice(name)
            print(name, slices.get_dtype(), slices.get_shape())


def list_pt(src: str) -> None:
    """Print the names, dtypes and shapes of a torch.save file."""
    import torch

    for name, tensor in torch.load(src, weights_only=True, mmap=True).items():
        print(name, tensor.dtype, tuple(tensor.shape))


def list_dcp(src: str) -> None:
    """Print the names, dtypes and shapes of a DCP directory."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    for name, item in FileSystemReader(src).read_metadata().state_dict_metadata.items():
        print(name, getattr(item, "properties", None), getattr(item, "size", None))


def parse_headers(src: str) -> None:
    """Parse the header of each safetensors file of a directory, and look at nothing in it."""
    import json
    from pathlib import Path

    for path in Path(src).glob("*.safetensors"):
        with path.open("rb") as file:
            json.loads(file.read(int.from_bytes(file.read(8), "little")))


def unpickle_inert(src: str) -> None:
    """Unpickle a torch.save file's data.pkl, or the .metadata of a DCP directory, into objects of one
    empty class, and look at nothing in it."""
    import pickle
    from pathlib import Path
    from zipfile import ZipFile

    class Inert(dict):  # type: ignore[type-arg]
        def __init__(self, *args: object, **named: object) -> None: ...

        def __setstate__(self, state: object) -> None: ...

        def __hash__(self) -> int:  # type: ignore[override]
            return id(self)

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> type:
            return Inert

        def persistent_load(self, pid: object) -> object:
            return pid

    path = Path(src)
    if path.is_dir():
        with (path / ".metadata").open("rb") as file:
            Unpickler(file).load()
        return
    with ZipFile(path) as archive:
        inner = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        with archive.open(inner) as file:
            Unpickler(file).load()


PEERS: tuple[Callable[..., None], ...] = (
    accelerate_merge, dcp_to_torch_save, torch_save_to_dcp, load_and_save_file,
    load_file_and_save_file, rank_files, load_all_and_cat, verl_merger, cast_bf16, torchao_nf4, list_safetensors, list_pt,
    list_dcp, parse_headers, unpickle_inert,
)  # fmt: skip


if __name__ == "__main__":
    {peer.__name__: peer for peer in PEERS}[sys.argv[1]](*sys.argv[2:])
