"""The checkpoints that are mutated: each kind of container and record, as its own library wrote it."""

from __future__ import annotations

import contextlib
import json
import random
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptmap
from ckptmap.errors import RunError
from ckptmap.planning.saved_plan import replan
from ckptmap.storage.locks import Owner
from ckptmap.storage.publish import WorkDirectory
from tests.corpus import CASES, Corpus
from tests.support.gguf_files import blocks
from tests.support.gguf_files import write as write_gguf
from tests.torture import mutators as m
from tests.torture import readers as r
from tests.torture import torch_mutators as t

BYTES: tuple[m.Mutator, ...] = (m.bytes_of_a_file,)
ZIP = (*BYTES, t.archive, t.archive, t.archive, t.archive)
TENSORS = (*BYTES, m.safetensors_header, m.safetensors_header, m.safetensors_tensor)
RECORDS = (*TENSORS, m.safetensors_metadata, m.safetensors_metadata, m.safetensors_tensor)
INDEXED = (
    *TENSORS, m.json_of("index.json"), m.json_of("index.json"), m.files_of_a_directory,
    m.safetensors_index, m.safetensors_index,
)  # fmt: skip
CONFIGURED = (
    *TENSORS,
    m.safetensors_tensor,
    *[m.json_of("config.json", "quantization_config")] * 4,
)
DCP = (*BYTES, t.dcp_pickle, t.dcp_pickle, t.dcp_metadata, t.dcp_metadata, t.dcp_item, t.dcp_item)
DIRECTORY = (m.files_of_a_directory,)
ADAPTED = (*TENSORS, *[m.json_of("adapter_config.json")] * 3)
OWN = (*[m.json_of("manifest.json")] * 5, m.bytes_of_a_file)
OWN_FILE = (t.archive, *BYTES, t.manifest_inside)
OWN_DCP = (*OWN, *DCP, *DIRECTORY)
OWN_RANKS = (*OWN, *ZIP, *DIRECTORY)
Work = Callable[[Path, Path], object]


@dataclass(frozen=True)
class Subject:
    """A checkpoint, how to mutate it, what is done with it, and who reads it independently.

    path     the checkpoint, or a directory with the state of a run that did not end
    read     the reference reader; None: whatever the mutation, the output is that of the original
    work     called with (mutated path, destination)
    result   what the destination holds; `read` gives the same
    settled  the work must succeed, whatever the mutation
    """

    name: str
    path: Path
    mutators: Sequence[m.Mutator]
    read: Callable[[Path], r.Content] | None
    work: Work
    result: Callable[[Path], r.Content]
    settled: bool = False

    def mutate(self, draw: random.Random, path: Path) -> str:
        """Change the copy at `path` in one place, and return what was done."""
        return draw.choice(self.mutators)(draw, path)


def converted(
    name: str,
    path: Path,
    mutators: Sequence[m.Mutator],
    read: Callable[[Path], r.Named],
    to: str = "full",
    own: bool = False,
    written: Callable[[Path], r.Named] = r.read_torch,
    wide: bool = False,
    **options: Any,
) -> Subject:
    """Return a subject that is converted to one torch.save file, by `options` of `ckptmap.convert`.

    `own`: we wrote it, with a digest of every chunk, so that no other values may come out of it.
    `written` reads the output. `wide`: values are compared in float32, as those of `full-fp32` are.
    """
    options = {"keep_layout": False, **options}

    def content(reader: Callable[[Path], r.Named]) -> Callable[[Path], r.Content]:
        return lambda path: r.content(reader(path), wide=wide or to == "full-fp32")

    return Subject(
        name, path, mutators, None if own else content(read),
        lambda path, dst: ckptmap.convert(path, dst, to, sync=False, **options),
        content(written),
    )  # fmt: skip


FROM_CORPUS: Mapping[str, tuple[Sequence[m.Mutator], Callable[[Path], r.Named]]] = {
    "torch_module_attribute": (ZIP, r.read_torch),
    "torch_tied": (ZIP, r.read_torch),
    "torch_views": (ZIP, r.read_torch),
    "torch_dtypes": (ZIP, r.read_torch),
    "torch_aligned_nocrc": (ZIP, r.read_torch),
    "torch_named_optimizer": (ZIP, r.read_torch),
    "safetensors_dtypes": (TENSORS, r.read_safetensors),
    "safetensors_bf16": (TENSORS, r.read_safetensors),
    "hf_sharded_tied_bf16": (INDEXED, r.read_hf),
    "dcp_single_tied_bf16": ((*DCP, *DIRECTORY), r.read_dcp),
    "nf4_torch_bf16": (ZIP, r.read_torch),
    "nf4_dcp_single": (DCP, r.read_dcp_blobs),
    "int8_torch_bf16": (ZIP, r.read_torch),
    "int8_dcp_fp32": (DCP, r.read_dcp_blobs),
    "float8_torch_fp32": (ZIP, r.read_torch),
    "float8_safetensors_bf16": (RECORDS, r.read_flattened),
    "fsdp2_ranks_w1": (ZIP, r.read_ranks),
    "fsdp2_dcp_bf16_w2": ((*DCP, *DIRECTORY), r.read_dcp),
    "fsdp1_dcp_flat_w2": (DCP, r.read_dcp),
    "fsdp2_ranks_bf16_w2": ((*ZIP, *DIRECTORY), r.read_ranks),
    "fsdp1_ranks_mesh_w2": (ZIP, r.read_ranks),
    "tp_ranks_w2": ((*ZIP, *DIRECTORY), r.read_ranks),
}


def gguf_file(folder: Path) -> Path:
    """A GGUF file of few types, with metadata of each kind."""
    tensors = {f"{kind}.w": (kind, blocks(kind, (3, 512))) for kind in ("Q4_K", "Q8_0", "IQ3_S")}
    tensors |= {
        "norm": ("F32", np.ones(7, np.float32)),
        "half": ("F16", np.ones((2, 3), np.float16)),
    }
    return write_gguf(
        folder / "some.gguf", tensors, llama__block_count=2, llama__embedding_length=256,
        llama__attention__head_count=4, llama__rope__freq_base=10000.0, general__name="some",
        tokenizer__ggml__tokens=["a", "b"], llama__list=[1, 2, 3],
    )  # fmt: skip


def subjects(corpus: Corpus, folder: Path, worlds: Sequence[int]) -> list[Subject]:
    """Return all subjects that as many ranks wrote; those beside the corpus are written to `folder`."""
    found = []
    for name, (mutators, read) in FROM_CORPUS.items():
        if CASES[name].world_size in worlds:
            to = "full" if CASES[name].encoding == "dense" else "full-fp32"
            found.append(converted(name, corpus[name].path, mutators, read, to))
    found.append(converted("gguf", gguf_file(folder), BYTES, r.read_gguf, "full-fp32"))
    found += bitsandbytes(folder)
    found += compressed(folder)
    found += eight_bits(folder)
    found += ours(corpus, folder)
    found += adapters(folder)
    found += states(corpus, folder)
    return found


def bitsandbytes(folder: Path) -> list[Subject]:
    import torch

    from tests.support.bnb_cases import bnb_file, weight

    found = []
    for kind, double in (("nf4", False), ("nf4", True), ("fp4", True)):
        place = folder / f"bnb-{kind}-{double}"
        place.mkdir()
        file = bnb_file(place, weight((48, 64), torch.bfloat16), kind, double)
        found.append(converted(place.name, file, RECORDS, r.read_bnb, "full-fp32"))
    return found


def compressed(folder: Path) -> list[Subject]:
    from compressed_tensors.quantization import QuantizationArgs

    from tests.support.int8_models import compressed as write

    forms = {
        "ct-int8": ({"num_bits": 8, "strategy": "channel"}, "int-quantized"),
        "ct-w4": (
            {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False},
            "pack-quantized",
        ),
        "ct-w8": ({"num_bits": 8, "strategy": "channel"}, "pack-quantized"),
        "ct-fp8": ({"num_bits": 8, "type": "float", "strategy": "tensor"}, "float-quantized"),
        "ct-nvfp4": (
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            "nvfp4-pack-quantized",
        ),
        "ct-mxfp4": (
            {
                "num_bits": 4,
                "type": "float",
                "strategy": "group",
                "group_size": 32,
                "scale_dtype": "torch.uint8",
            },
            "mxfp4-pack-quantized",
        ),
    }
    for name, (args, form) in forms.items():
        write(folder / name, QuantizationArgs(**args), form)
    return [
        converted(name, folder / name, CONFIGURED, r.read_compressed, "full-fp32") for name in forms
    ]


def eight_bits(folder: Path) -> list[Subject]:
    """LLM.int8 as bitsandbytes saves it, FP8 by blocks, which needs a GPU to be written: ours, and gpt-oss."""
    import torch

    from tests.support.gpt_oss import write as gpt_oss
    from tests.support.int8_models import bnb_int8, dense

    bnb_int8(folder / "bnb-int8", torch.float16)
    place = folder / "fp8"
    ckptmap.convert(dense(folder / "fp8-dense", hidden=128), place, "hf-fp8", sync=False)
    (place / "ckptmap.manifest.json").unlink()
    return [
        converted("bnb-int8", folder / "bnb-int8", CONFIGURED, r.read_int8, "full-fp32"),
        converted("fp8", place, CONFIGURED, r.read_fp8, "full-fp32"),
        converted("mxfp4", gpt_oss(folder / "mxfp4"), CONFIGURED, r.read_mxfp4, "full-fp32"),
    ]


OURS: Mapping[str, tuple[Sequence[m.Mutator], Callable[[Path], r.Named]]] = {
    "hf": ((*OWN, *TENSORS, *DIRECTORY), r.read_hf),
    "full": (OWN_FILE, r.read_torch),
    "fsdp2": (OWN_DCP, r.read_dcp),
    "fsdp2-ranks": (OWN_RANKS, r.read_ranks),
    "fsdp1": (OWN_DCP, r.read_dcp),
    "fsdp1-local": (OWN_RANKS, r.read_ranks),
    "trainer": ((*OWN, *TENSORS), r.read_hf),
    "gguf": (BYTES, r.read_gguf),
}
ONE_FILE: Mapping[str, str] = {"full": "model.pt", "gguf": "model.gguf"}


def ours(corpus: Corpus, folder: Path) -> list[Subject]:
    """Our own outputs, whose manifest states a digest of every byte."""
    source = corpus["torch_module_attribute"].path
    found = []
    for to, (mutators, read) in OURS.items():
        place = folder / f"ours-{to}" / ONE_FILE.get(to, "out")
        place.parent.mkdir()
        world_size = 2 if to.startswith("fsdp") else 1
        ckptmap.convert(source, place, to, world_size=world_size, sync=False)
        found.append(converted(f"ours-{to}", place, mutators, read, own=True))
    return found


def adapters(folder: Path) -> list[Subject]:
    """A LoRA adapter as peft writes it, merged; values are close to those that peft merges."""
    from tests.support.merge_cases import LINEARS, llama, saved

    saved(folder / "lora", llama(), target_modules=LINEARS)
    base = folder / "lora" / "base"

    def merge(path: Path, dst: Path) -> None:
        ckptmap.merge(base, path, dst, "full", sync=False)

    return [
        Subject(
            "lora", folder / "lora" / "adapter", ADAPTED,
            lambda path: r.content(r.read_adapter(base, path), close=True), merge,
            lambda dst: r.content(r.read_torch(dst), close=True),
        )
    ]  # fmt: skip


# ------------------------------------------------------------------------------- state of a run


def states(corpus: Corpus, folder: Path) -> list[Subject]:
    """What a run leaves that did not end, and a saved plan: none of it is believed as it stands."""
    source = corpus["torch_module_attribute"].path
    left = folder / "left"
    left.mkdir()
    _interrupted(source, left / "out")
    lock = folder / "lock"
    lock.mkdir()
    gone = Owner(socket.gethostname(), 2**22 + 5, 1, "t")
    (lock / ".out.ckptmap-lock").write_text(json.dumps(asdict(gone)))
    plan = folder / "plan"
    plan.mkdir()
    ckptmap.plan(source, "hf").save(plan / "plan.json")

    def convert(path: Path, dst: Path) -> None:
        ckptmap.convert(source, path / "out", "hf", sync=False)
        (path / "out").rename(dst)

    def execute(path: Path, dst: Path) -> None:
        replan(path / "plan.json").execute(dst, sync=False)

    journals = (m.journal, m.journal, m.journal, m.bytes_of_a_file)
    planted = (m.files_of_a_directory, m.planted, m.planted)
    return [
        Subject("journal", left, journals, None, convert, r.read_files, settled=True),
        Subject("work directory", left, planted, None, convert, r.read_files),
        Subject("lock", lock, (m.json_of("lock"), *BYTES), None, convert, r.read_files),
        Subject("plan", plan, (m.json_of("plan.json"),), None, execute, r.read_files),
    ]


def _interrupted(source: Path, dst: Path) -> None:
    """Convert as far as every file is written, and leave the work directory as a kill would."""

    def stop(*_: object, **__: object) -> None:
        raise RunError("CKM306", "stopped by the torture")

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(RunError):
        patch.setattr(WorkDirectory, "publish", stop)
        ckptmap.convert(source, dst, "hf", sync=False)
