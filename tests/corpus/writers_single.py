"""One process: torch.save in all its shapes, safetensors, single-process DCP."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from tests.corpus.case import Gathered, case
from tests.corpus.models import (
    Recipe,
    Tiny,
    compiled,
    moments,
    nested,
    nested_truth,
    seeded,
    tiny,
    trained,
    truth,
)

TIED = Recipe(tied=True)
BF16 = Recipe(dtype=torch.bfloat16)
TIED_NAMES = (("embed.weight", "lm_head.weight"),)


@case("torch_plain", 1, "torch", file="model.pt", truth=truth)
def torch_plain(path: Path) -> None:
    torch.save(tiny().state_dict(), path)


@case("torch_bf16", 1, "torch", file="model.pt", truth=partial(truth, BF16))
def torch_bf16(path: Path) -> None:
    torch.save(tiny(BF16).state_dict(), path)


@case("torch_tied", 1, "torch", file="model.pt", truth=partial(truth, TIED), tied=TIED_NAMES)
def torch_tied(path: Path) -> None:
    """A true alias: both names point at one storage record with one view."""
    torch.save(tiny(TIED).state_dict(), path)


@case(
    "torch_nested", 1, "torch", file="checkpoint.pt", root=("model",), optimizer="index",
    order="the order of the saved model dict",
    extra={"step": 7, "config": {"lr": 0.01, "betas": [0.9, 0.95], "name": "run é"}},
    opaque=("args",),
    notes="optimizer.state_dict() keyed by index",
)  # fmt: skip
def torch_nested(path: Path) -> Gathered:
    model, optimizer = trained()
    checkpoint = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 7,
        "config": {"lr": 0.01, "betas": [0.9, 0.95], "name": "run é"},
        "args": argparse.Namespace(lr=0.01, data="/data", layers=[1, 2]),
    }
    torch.save(checkpoint, path)
    return Gathered(model.state_dict(), moments(model, optimizer))


@case(
    "torch_named_optimizer", 1, "torch", file="checkpoint.pt", root=("model",), optimizer="index",
    order="param_names in the groups", extra={"step": 3}, notes="the optimizer's groups carry param_names",
)  # fmt: skip
def torch_named_optimizer(path: Path) -> Gathered:
    model, optimizer = trained(grouped=False, steps=1)
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    torch.save(checkpoint, path)
    return Gathered(model.state_dict(), moments(model, optimizer))


@case(
    "torch_compiled", 1, "torch", file="model.pt", truth=truth, prefix="_orig_mod.",
    wrappers=("_orig_mod",),
)  # fmt: skip
def torch_compiled(path: Path) -> None:
    torch.save(compiled(tiny()).state_dict(), path)


def compile_layers(model: Tiny) -> Tiny:
    for i, layer in enumerate(model.layers):
        model.layers[i] = compiled(layer)
    return model


@case(
    "torch_compiled_layers", 1, "torch", file="model.pt", truth=truth, wrappers=("_orig_mod",),
    notes="layers.N._orig_mod., the rest bare",
)  # fmt: skip
def torch_compiled_layers(path: Path) -> None:
    torch.save(compile_layers(tiny()).state_dict(), path)


def checkpoint_layers(model: Tiny) -> Tiny:
    """Activation checkpointing of each layer."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for i, layer in enumerate(model.layers):
        model.layers[i] = checkpoint_wrapper(layer)
    return model


@case("torch_checkpoint_wrapper", 1, "torch", file="model.pt", truth=truth)
def torch_checkpoint_wrapper(path: Path) -> None:
    """The wrapper's own hook drops its segment when the state dict is made."""
    torch.save(checkpoint_layers(tiny()).state_dict(), path)


def parameters_truth(recipe: Recipe = Recipe()) -> dict[str, Tensor]:  # noqa: B008 - frozen
    return {name: p.detach() for name, p in tiny(recipe).named_parameters()}


@case(
    "torch_checkpoint_wrapper_params", 1, "torch", file="ema.pt", truth=parameters_truth,
    wrappers=("_checkpoint_wrapped_module", "_orig_mod"),
    notes="dict(named_parameters()): Parameters, with the segments that state_dict() would drop",
)  # fmt: skip
def torch_checkpoint_wrapper_params(path: Path) -> None:
    model = compile_layers(checkpoint_layers(tiny()))
    torch.save(dict(model.named_parameters()), path)


@case(
    "torch_module_attribute", 1, "torch", file="model.pt", truth=nested_truth,
    notes="submodules called `module` at the root and inside: nothing to strip",
)  # fmt: skip
def torch_module_attribute(path: Path) -> None:
    torch.save(nested().state_dict(), path)


def views() -> dict[str, Tensor]:
    """Views of one storage: offset, strided, transposed, expanded, overlapping, empty."""
    flat = seeded("flat", torch.empty(480), seed=5)
    base = flat.view(20, 24)
    return {
        "base": base,
        "offset": flat[100:130].view(5, 6),
        "transposed": base.t(),
        "columns": base[:, 3:7],
        "strided": base[::3, 1::2],
        "permuted": flat.view(4, 10, 12).permute(2, 0, 1),
        "expanded": base[2:8, 4:5].expand(6, 3),
        "overlapping": flat.as_strided((5, 4), (2, 1), 7),
        "empty": flat[:0].view(0, 4),
        "scalar": flat[17],
        "row_alias": base[3:5],
        "row_alias_again": base[3:5],
    }


@case(
    "torch_views", 1, "torch", file="views.pt", truth=views,
    tied=(("row_alias", "row_alias_again"),),
    notes="one shared storage; only equal views are aliases",
)  # fmt: skip
def torch_views(path: Path) -> None:
    torch.save(views(), path)


FLOATS = ("float64", "float32", "float16", "bfloat16")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
INTS = ("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64")
COMPLEX = ("complex32", "complex64", "complex128")


def dtypes(names: tuple[str, ...]) -> dict[str, Tensor]:
    """A (5, 7) tensor of random bytes per dtype, so any bit pattern, NaN payloads included."""
    out: dict[str, Tensor] = {"bool": seeded("bool", torch.empty(5, 7, dtype=torch.bool), 6)}
    for name in names:
        dtype: torch.dtype = getattr(torch, name)
        generator = torch.Generator().manual_seed(len(name))
        width = 7 * torch.empty((), dtype=dtype).element_size()
        raw = torch.randint(0, 256, (5, width), generator=generator, dtype=torch.uint8)
        out[f"{name}.matrix"] = raw.view(dtype)
        out[f"{name}.scalar"] = raw.view(dtype)[4, 6]
        out[f"{name}.empty"] = raw.view(dtype)[:, :0]
    return out


ALL_DTYPES = FLOATS + FLOAT8 + INTS + COMPLEX
SAFETENSORS_DTYPES = (*FLOATS, *FLOAT8, *INTS, "complex64")


@case("torch_dtypes", 1, "torch", file="dtypes.pt", truth=partial(dtypes, ALL_DTYPES))
def torch_dtypes(path: Path) -> None:
    torch.save(dtypes(ALL_DTYPES), path)


@case(
    "torch_aligned_nocrc", 1, "torch", file="model.bin", truth=truth,
    notes="storage_alignment 4096, CRC-32 fields 0: not computed, not wrong",
)  # fmt: skip
def torch_aligned_nocrc(path: Path) -> None:
    save: Any = torch.utils.serialization.config.save
    before = save.storage_alignment, save.compute_crc32
    save.storage_alignment, save.compute_crc32 = 4096, False
    try:
        torch.save(tiny().state_dict(), path)
    finally:
        save.storage_alignment, save.compute_crc32 = before


@case("safetensors_plain", 1, "safetensors", file="model.safetensors", truth=truth)
def safetensors_plain(path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tiny().state_dict(), path)


@case("safetensors_bf16", 1, "safetensors", file="model.safetensors", truth=partial(truth, BF16))
def safetensors_bf16(path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tiny(BF16).state_dict(), path, metadata={"format": "pt", "note": 'é " \\'})


@case(
    "safetensors_dtypes", 1, "safetensors", file="dtypes.safetensors",
    truth=partial(dtypes, SAFETENSORS_DTYPES),
)  # fmt: skip
def safetensors_dtypes(path: Path) -> None:
    from safetensors.torch import save_file

    state = {name: value.contiguous() for name, value in dtypes(SAFETENSORS_DTYPES).items()}
    save_file({name: value.clone() for name, value in state.items()}, path)


@case(
    "safetensors_compiled", 1, "safetensors", file="model.safetensors", truth=truth,
    prefix="_orig_mod.", wrappers=("_orig_mod",),
)  # fmt: skip
def safetensors_compiled(path: Path) -> None:
    from safetensors.torch import save_file

    save_file(compiled(tiny()).state_dict(), path)


@case("dcp_single", 1, "dcp", truth=truth)
def dcp_single(path: Path) -> None:
    save_dcp(tiny().state_dict(), checkpoint_id=path, no_dist=True)


@case(
    "dcp_single_tied_bf16", 1, "dcp", truth=partial(truth, Recipe(tied=True, dtype=torch.bfloat16)),
    tied=TIED_NAMES, notes="DCP stores both names",
)  # fmt: skip
def dcp_single_tied_bf16(path: Path) -> None:
    state = tiny(Recipe(tied=True, dtype=torch.bfloat16)).state_dict()
    save_dcp(state, checkpoint_id=path, no_dist=True)


@case(
    "dcp_single_raw_optimizer", 1, "dcp", root=("model",), optimizer="index",
    extra={"step": 3, "epoch": [1, 2]},
    notes="raw optimizer.state_dict(): DCP turns its integer keys into strings",
)  # fmt: skip
def dcp_single_raw_optimizer(path: Path) -> Gathered:
    model, optimizer = trained()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 3,
        "epoch": [1, 2],
    }
    save_dcp(state, checkpoint_id=path, no_dist=True)
    return Gathered(model.state_dict(), moments(model, optimizer))
