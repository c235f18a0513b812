"""What ckptmap writes for fixed sources, as SHA-256 digests: `outputs.json` holds what was recorded.

    python -m tests.golden.outputs          # record again, after a change of an output that is meant

Every source is either a golden of this folder or is written by the format's own library from
numbers that are counted, not drawn: so the same bytes go in on every machine.

A digest covers each file's name and bytes. The plan's digest, which stands in every manifest, is
pinned, because it depends on ckptmap's version; `PLANS` records it apart, at a pinned version.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import ckptmap
from ckptmap import registry
from ckptmap.execution import manifest
from ckptmap.planning import plan as plans
from tests.golden.mappings.tables import ROOT as MAPPINGS
from tests.support.mapping_state import hub_state, state_of

HERE = Path(__file__).parent
RECORDED = HERE / "outputs.json"
VERSION = "0.1.0"
"""The version that every recorded output and plan names."""
WHEN = 1_700_000_000
"""The time of change that every source file is given: a plan's digest depends on it."""

ARITHMETIC = ("nf4", "int8", "float8", "fp4", "fp8", "adam")
"""Encodings that compute: their sums may be taken in another order on another kind of CPU."""


def encodings() -> list[str]:
    """Every encoding of weights that `--to` takes, "" for as it is."""
    inner = ("trained-dense", "adam8bit", "adam4bit", "adamfp8", "bnb8bit")
    # Microscaled forms are compared with their libraries, bit for bit, in tests/quantization.
    compared = {s.name for s in registry.schemes() if getattr(s, "live", "") == "microscaled"}
    left_out = {*inner, *compared, *gguf_types(), "fp8-ue8m0"}
    return ["", *(s.suffix for s in registry.schemes() if s.suffix and s.name not in left_out)]


def gguf_types() -> list[str]:
    """The encodings of GGUF's types: only a GGUF file is written in each."""
    return [s.suffix for s in registry.schemes() if s.suffix and getattr(s, "live", "") == "gguf"]


@dataclass(frozen=True)
class Source:
    """A checkpoint that `write` puts below a folder, and to which setups it is converted."""

    name: str
    write: Callable[[Path], Path]
    setups: tuple[str, ...]
    options: Mapping[str, Any] | None = None

    def runs(self) -> Iterator[str]:
        yield from (f"{self.name} -> {to}" for to in self.setups)


# ------------------------------------------------------------------------------- golden files


def copied(path: str) -> Callable[[Path], Path]:
    """A file or directory of this folder."""

    def write(folder: Path) -> Path:
        source, at = HERE / path, folder / Path(path).name
        if source.is_dir():
            shutil.copytree(source, at)
        else:
            shutil.copyfile(source, at)
        return at

    return write


def goldens() -> Iterator[Source]:
    """Checkpoints that other programs wrote, as they lie in this folder."""
    for file in sorted((HERE / "torchao").glob("0*")):
        yield Source(
            f"torchao/{file.name}",
            copied(f"torchao/{file.name}"),
            ("full", "hf", "fsdp2", "hf-bf16"),
        )
    for release in ("0.12.2", "0.8.1"):
        setups = ("hf", "full-fp32", "hf-ct-int8", "fsdp2-nf4")
        yield Source(f"compressed/{release}", copied(f"compressed/{release}"), setups)
    for path in sorted((HERE / "gptq").glob("*-*")):
        kept = "hf-ct-int8" if path.name == "gptq-8" else "hf-ct-int4"
        setups = ("hf", "full-bf16", "fsdp2", kept, "gguf-q8_0")
        yield Source(f"gptq/{path.name}", copied(f"gptq/{path.name}"), setups)
    for name in ("hqq.safetensors", "quanto-qint4.safetensors", "quanto-qint8.safetensors",
                 "quanto-qfloat8.safetensors", "q8_0.gguf"):  # fmt: skip
        setups = ("full-bf16", "full-fp32", *(("full", "fsdp2") if name.endswith("gguf") else ()))
        yield Source(f"decoded/{name}", copied(f"foreign/{name}"), setups)
    for file in sorted((HERE / "foreign").glob("*.safetensors")):
        yield Source(
            f"foreign/{file.name}", copied(f"foreign/{file.name}"), ("full", "hf", "fsdp2")
        )
    composer = {"drop": ("state.callbacks", "state.timestamp", "rng")}
    training = {
        "lightning/trainer/trainer.ckpt": {"drop": ("hyper_parameters",)},
        "lightning/ema/ema.ckpt": {"drop": ("hyper_parameters.optimizer",)},
        "lightning/gan/gan.ckpt": {"optimizer": "drop"},
        "lightning/model_parallel/model_parallel": {},
        "lightning/fabric_fsdp/fabric_fsdp": {},
        "composer/single/run.pt": composer,
        "composer/sharded/run/ba1": {"drop": ("rng",)},
        "hub/timm_saver/last.pth.tar": {"drop": ("args",)},
    }
    for path, options in training.items():
        setups = ("full", "fsdp1", "fsdp2", "fsdp2-ranks", "hf", "ddp-bf16", "fsdp2-nf4")
        yield Source(path, copied(path), setups, options)
    for path in ("diffusers/transformer", "diffusers_sharded/vae", "sentence_transformers/model",
                 "timm_hub/model", "open_clip/model"):  # fmt: skip
        yield Source(
            f"hub/{path}", copied(f"hub/{path}"), ("hf", "full", "hf-bf16", "hf-int8", "fsdp2")
        )


# ------------------------------------------------------------------------------- names


def save_state(model: str, scheme: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        torch.save(dict(state_of(model, scheme)), folder / "model.pt")
        return folder / "model.pt"

    return write


def mappings() -> Iterator[Source]:
    """Every shipped naming scheme, to the names of Hugging Face."""
    for path in sorted(MAPPINGS.glob("*/*.tsv")):
        model, scheme = path.parent.name, path.stem
        options = {"names": "hf", "config_from": str(path.parent / "config.json")}
        yield Source(f"mappings/{model}/{scheme}", save_state(model, scheme), ("hf",), options)


# ------------------------------------------------------------------------------- every setup


def tensors() -> dict[str, Tensor]:
    """A tiny Llama in bfloat16: weights between -1 and 1 whose bits are counted."""
    return {k: (v % 251 / 125 - 1).to(torch.bfloat16) for k, v in hub_state("llama").items()}


def moments(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """AdamW's state by index, as torch keys it; every number is counted."""
    state = {
        index: {
            "step": torch.tensor(3.0),
            "exp_avg": (torch.arange(w.numel()) % 127 / 1024 - 1 / 16).reshape(w.shape),
            "exp_avg_sq": (torch.arange(w.numel()) % 113 / 4096).reshape(w.shape),
        }
        for index, w in enumerate(weights.values())
    }
    parameters = [torch.nn.Parameter(w.float()) for w in weights.values()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}


def with_config(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(MAPPINGS / "llama" / "config.json", folder / "config.json")
    return folder


def write_hf(folder: Path) -> Path:
    at = with_config(folder / "hf")
    save_file(tensors(), at / "model.safetensors", {"format": "pt"})
    return at


def write_wrapped(folder: Path) -> Path:
    torch.save({f"module._orig_mod.{k}": v for k, v in tensors().items()}, folder / "model.pt")
    return folder / "model.pt"


def write_training(folder: Path) -> Path:
    weights = tensors()
    torch.save({"model": weights, "optimizer": moments(weights), "step": 7}, folder / "run.pt")
    return folder / "run.pt"


def write_dcp(folder: Path) -> Path:
    from torch.distributed.checkpoint.state_dict_saver import save

    save({"model": tensors(), "step": 7}, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


def write_bins(folder: Path) -> Path:
    from huggingface_hub import save_torch_state_dict

    at = with_config(folder / "bins")
    save_torch_state_dict(tensors(), at, safe_serialization=False, max_shard_size=30_000)
    return at


def write_parallel(kind: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        from tests.support.parallel_writers import (
            LLAMA_PARAMS,
            Grid,
            write_megatron,
            write_meta,
            write_torch_dist,
        )

        torch.manual_seed(0)  # their files hold the random state
        if kind == "meta":
            return write_meta(folder / "meta", state_of("llama", "meta"), 2, LLAMA_PARAMS)
        state = state_of("llama", "megatron")
        if kind == "megatron":
            return write_megatron(folder / "megatron", state, Grid(2, (1, 1)))
        return write_torch_dist(folder / "dist", state)

    return write


def matrix() -> Iterator[Source]:
    """Every setup in every encoding from one source, and every setup from every container."""
    setups = [setup.name for setup in registry.setups()]
    every = tuple(f"{s}-{e}".removesuffix("-") for s in setups if s != "gguf" for e in encodings())
    gguf = ("gguf", *(f"gguf-{cast}" for cast in ("bf16", "fp16", "fp32")), *gguf_types())
    plain = tuple(setups)
    yield Source("hf", write_hf, (*every, *gguf, "full-gguf-q8_0"))
    config = str(MAPPINGS / "llama" / "config.json")
    yield Source("wrapped", write_wrapped, plain, {"like": config})
    more = ("fsdp2-nf4", "hf-bf16")
    ordered = {"like": config, "param_order": (tuple(tensors()),)}
    yield Source("training", write_training, (*plain, *more), ordered)
    keyed = {**ordered, "optimizer_keys": "index"}
    yield Source("training by index", write_training, ("full", "fsdp2"), keyed)
    meshed = {"mesh": "replicate=2,shard=2", "wrap": ("ddp", "compile")}
    yield Source("hf on a mesh", write_hf, ("fsdp2", "fsdp2-nf4", "fsdp2-ranks"), meshed)
    yield Source("dcp", write_dcp, plain, {"like": config})
    yield Source("bins", write_bins, plain)
    for kind in ("meta", "megatron", "torch_dist"):
        options = {"names": "hf", "config_from": config}
        yield Source(kind, write_parallel(kind), ("hf", "fsdp2", "full-bf16", "fsdp2-nf4"), options)


SOURCES = {source.name: source for source in (*goldens(), *mappings(), *matrix())}
PLANNED = (
    "hf -> full", "hf -> fsdp2", "hf -> fsdp2-nf4", "hf -> hf-int8", "hf -> fsdp1-local",
    "hf -> fsdp2-ranks", "hf -> accelerate", "hf -> hf-bnb-nf4", "wrapped -> hf",
    "training -> full", "training -> fsdp1", "training -> fsdp2-nf4", "training -> trainer",
    "lightning/model_parallel/model_parallel -> hf", "bins -> dcp-hf", "megatron -> hf", "lightning/trainer/trainer.ckpt -> fsdp2",
    "composer/sharded/run/ba1 -> full", "compressed/0.12.2 -> full-fp32",
    "mappings/qwen3_moe/torchtitan -> hf", "torchao/0.18-nf4.pt -> fsdp2",
)  # fmt: skip
"""Runs whose plans are recorded, too: none of a DCP written here, in which torch puts its own path."""


# ------------------------------------------------------------------------------- measured


def made(source: Source, folder: Path) -> Path:
    """The source on disk, every file of which has the same time of change."""
    folder.mkdir(parents=True)
    at = source.write(folder)
    for file in folder.rglob("*"):
        os.utime(file, (WHEN, WHEN))
    return at


def options(source: Source, to: str) -> dict[str, Any]:
    """Three ranks where the setup has any, and the model's config where its names need one."""
    wanted = dict(source.options or {})
    sharded = {setup.name for setup in registry.setups() if setup.sharded}
    name = max((s.name for s in registry.setups() if to.startswith(s.name)), key=len)
    if name == "gguf" and "like" in wanted:  # the sizes of the model are in its metadata
        wanted["config_from"] = wanted.pop("like")
    return wanted | ({"world_size": 3} if name in sharded and "mesh" not in wanted else {})


def digest(path: Path) -> str:
    """SHA-256 over the names and bytes of all files at a path."""
    seen = hashlib.sha256()
    files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.is_file())
    for file in files:
        name = "" if file == path else str(file.relative_to(path))
        content = file.read_bytes()
        seen.update(f"{name}\0{len(content)}\0".encode() + content)
    return seen.hexdigest()


def converted(source: Path, dst: Path, to: str, **options: Any) -> str:
    """The digest of the output, or the code of the error that refuses it."""
    try:
        ckptmap.convert(source, dst, to, sync=False, **options)
    except ckptmap.CkptmapError as error:
        return error.code
    return digest(dst)


def planned(source: Path, to: str, **options: Any) -> str:
    return ckptmap.plan(source, to, **options).digest


def outputs(source: Source, folder: Path) -> dict[str, str]:
    """Run -> digest or error code, of each setup; "plan of RUN" -> the plan's digest."""
    at, found = made(source, folder / "source"), {}
    for run, to in zip(source.runs(), source.setups, strict=True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(manifest, "__version__", VERSION)
            patch.setattr(plans, "__version__", VERSION)
            if run in PLANNED:
                found[f"plan of {run}"] = planned(at, to, **options(source, to))
            patch.setattr(plans.Plan, "_digest", lambda plan: "0" * 64)
            dst = folder / "out"
            found[run] = converted(at, dst, to, **options(source, to))
        shutil.rmtree(dst) if dst.is_dir() else dst.unlink(missing_ok=True)
    return found


def capability() -> str:
    """The vector instructions that torch uses."""
    return torch.backends.cpu.get_cpu_capability()


def record() -> None:
    found: dict[str, str] = {}
    for source in SOURCES.values():
        with tempfile.TemporaryDirectory() as folder:
            found |= outputs(source, Path(folder))
    document = {"capability": capability(), "torch": torch.__version__, "digests": found}
    RECORDED.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    record()
