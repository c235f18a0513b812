"""Who is there: one line a format, loaded when first needed; others come by entry points.

An entry point of group `ckptmap.containers`, `ckptmap.directories`, `ckptmap.writers`,
`ckptmap.layouts`, `ckptmap.schemes`, `ckptmap.key_forms`, `ckptmap.unflatteners` or `ckptmap.setups`
names an object of the protocol of that name. They are asked first, as `ckptmap.testing.registered`
puts them: a format that is a zip of its own is told from torch's by who knows more of it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

from ckptmap.like import Unflattener
from ckptmap.optim.state import KeyForm
from ckptmap.protocols import Container, Directory, Layout, Place, Scheme, Setup, Writer

CONTAINERS = (  # asked in this order: a directory's own marks before what its files look like
    "ckptmap.containers.dcp_megatron:DcpMegatron",
    "ckptmap.containers.dcp:Dcp",
    "ckptmap.containers.hf:HfDirectory",
    "ckptmap.containers.hf_bin:HfBin",
    "ckptmap.containers.dcp_hf:DcpHf",
    "ckptmap.containers.consolidated:Consolidated",
    "ckptmap.containers.megatron:Megatron",
    "ckptmap.containers.rank_files:RankFiles",
    "ckptmap.containers.safetensors:SafetensorsFile",
    "ckptmap.containers.torch_zip:TorchZip",
)
DIRECTORIES = (
    "ckptmap.directories.trainer:Trainer",
    "ckptmap.directories.verl:Verl",
    "ckptmap.directories.accelerate:Accelerate",
    "ckptmap.directories.lightning:Lightning",
)
WRITERS = (
    "ckptmap.containers.hf:HfWriter",
    "ckptmap.containers.torch_zip:TorchZipWriter",
    "ckptmap.containers.dcp_write:DcpWriter",
    "ckptmap.containers.rank_files_write:RankFilesWriter",
    "ckptmap.containers.fsdp1_local_write:Fsdp1LocalWriter",
    "ckptmap.containers.dcp_hf_write:DcpHfWriter",
    "ckptmap.directories.writing:AccelerateWriter",
    "ckptmap.directories.writing:AccelerateFullWriter",
    "ckptmap.directories.writing:TrainerWriter",
)
LAYOUTS = (
    "ckptmap.layouts.full:Full",
    "ckptmap.layouts.shard:Shard0",
    "ckptmap.layouts.sharded_tensor:ShardedTensorLayout",
    "ckptmap.layouts.dtensor:DTensorLayout",
    "ckptmap.layouts.mesh:Mesh",
    "ckptmap.layouts.flat_cut:FlatCut",
)
KEY_FORMS = (  # of optimizer state, asked in this order
    "ckptmap.optim.flattened:Flattened",
    "ckptmap.optim.index:ByIndex",
    "ckptmap.optim.fqn:ByFqn",
)
UNFLATTENERS = (  # one after the other: the optimizer's goes by what became of the weights
    "ckptmap.layouts.flat_param:FlatParams",
    "ckptmap.optim.flat:FlatOptimizer",
)
SCHEMES = (
    "ckptmap.encodings.nf4:NF4Scheme",
    "ckptmap.encodings.bnb_nf4:BnbNF4",
    "ckptmap.encodings.bnb_nf4:BnbNF4Double",
    "ckptmap.encodings.bnb_fp4:BnbFP4",
    "ckptmap.encodings.bnb_fp4:BnbFP4Double",
    "ckptmap.encodings.int8:Int8Scheme",
    "ckptmap.encodings.float8:Float8Scheme",
    "ckptmap.encodings.bnb_int8:BnbInt8Scheme",
    "ckptmap.encodings.compressed:CompressedInt8",
    "ckptmap.encodings.compressed:CompressedFp8",
    "ckptmap.encodings.fp8:Fp8Scheme",
    "ckptmap.encodings.dense_trained:TrainedDense",
    "ckptmap.optim.lowbit_torchao:Adam8bit",
    "ckptmap.optim.lowbit_torchao:Adam4bit",
    "ckptmap.optim.lowbit_torchao:AdamFp8",
    "ckptmap.optim.lowbit_bnb:Bnb8bit",
    "ckptmap.encodings.dense:CastBf16",
    "ckptmap.encodings.dense:CastFp32",
    "ckptmap.encodings.dense:CastFp16",
)
SETUPS = (
    "ckptmap.containers.hf:HF",
    "ckptmap.containers.torch_zip:FULL",
    "ckptmap.containers.torch_zip:DDP",
    "ckptmap.containers.torch_zip:COMPILED",
    "ckptmap.containers.dcp_write:FSDP1",
    "ckptmap.containers.fsdp1_local_write:FSDP1_LOCAL",
    "ckptmap.containers.dcp_write:FSDP2",
    "ckptmap.containers.rank_files_write:FSDP2_RANKS",
    "ckptmap.containers.dcp_hf_write:DCP_HF",
    "ckptmap.directories.writing:ACCELERATE",
    "ckptmap.directories.writing:ACCELERATE_FULL",
    "ckptmap.directories.writing:TRAINER",
)


@cache
def _load(spec: str) -> Any:
    module, _, name = spec.partition(":")
    found = getattr(importlib.import_module(module), name)
    return found() if isinstance(found, type) else found


@cache
def _has_third_party() -> bool:
    """Does any installed distribution name us? A look at files, ten times faster than
    importlib.metadata, which is asked only then."""
    return any(
        b"[ckptmap." in file.read_bytes()
        for directory in map(Path, sys.path)
        if directory.is_dir()
        for file in directory.glob("*.dist-info/entry_points.txt")
    )


@cache
def _third_party(group: str) -> tuple[Any, ...]:
    if not _has_third_party():
        return ()
    from importlib.metadata import entry_points

    found = [entry.load() for entry in entry_points(group=f"ckptmap.{group}")]
    return tuple(value() if isinstance(value, type) else value for value in found)


def _all(specs: Iterable[str], group: str) -> Iterator[Any]:
    yield from _third_party(group)
    yield from map(_load, specs)


def container_for(place: Place) -> Container | None:
    """The container that claims the place; None: nobody does."""
    for container in _all(CONTAINERS, "containers"):
        if container.claims(place):
            return cast(Container, container)
    return None


def directory_for(place: Place) -> Directory | None:
    """The framework whose directory it is, asked before any container; None: nobody's."""
    for directory in _all(DIRECTORIES, "directories"):
        if directory.claims(place):
            return cast(Directory, directory)
    return None


def knows(place: Place) -> bool:
    """Is it a checkpoint, by its structure?"""
    return directory_for(place) is not None or container_for(place) is not None


def schemes() -> tuple[Scheme, ...]:
    return tuple(_all(SCHEMES, "schemes"))


def layouts() -> tuple[Layout, ...]:
    return tuple(_all(LAYOUTS, "layouts"))


def unflatteners() -> tuple[Unflattener, ...]:
    return tuple(_all(UNFLATTENERS, "unflatteners"))


def key_forms() -> tuple[KeyForm, ...]:
    return tuple(_all(KEY_FORMS, "key_forms"))


def key_form(name: str) -> KeyForm | None:
    return next((found for found in key_forms() if found.name == name), None)


def setups() -> tuple[Setup, ...]:
    return tuple(_all(SETUPS, "setups"))


def layout(name: str) -> Layout:
    return next(found for found in layouts() if found.name == name)


def writer(name: str) -> Writer:
    return next(cast(Writer, found) for found in _all(WRITERS, "writers") if found.name == name)
