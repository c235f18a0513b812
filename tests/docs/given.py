"""The checkpoints that the pages of the documentation begin with, made by their real writers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.optim.swa_utils import AveragedModel

from tests.corpus import Corpus
from tests.corpus.models import tiny_llama
from tests.support.paths import EXAMPLES


@dataclass(frozen=True)
class Writers:
    """What the writers of the corpus have written: the table of cases, and frameworks' directories."""

    corpus: Corpus
    directories: Path


Make = Callable[[Path, Callable[[], Writers]], object]
"""Makes a checkpoint at a path. Writers of several ranks are asked for only by pages that need them."""


def hub_model(
    path: Path, writers: Callable[[], Writers], dtype: torch.dtype = torch.bfloat16
) -> None:
    """A model's directory, by `save_pretrained`."""
    tiny_llama(dtype=dtype).save_pretrained(path)


def training_script(path: Path, writers: Callable[[], Writers]) -> None:
    """What a script saves that trains a compiled model under DDP: one `torch.save` file."""
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.arange(8)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    state = torch.compile(model, backend="eager").state_dict()
    named = {f"module.{key}": tensor for key, tensor in state.items()}
    torch.save({"model": named, "optimizer": optimizer.state_dict(), "epoch": 3}, path)


def average(path: Path, writers: Callable[[], Writers]) -> None:
    """An exponential moving average, by torch's own AveragedModel."""
    torch.save(AveragedModel(tiny_llama()).state_dict(), path)


def distillation(path: Path, writers: Callable[[], Writers]) -> None:
    """A training module with a student, a teacher and a loss with a buffer."""
    parts = {"student": tiny_llama(seed=1), "teacher": tiny_llama()}
    module = torch.nn.ModuleDict({**parts, "dino_loss": torch.nn.BatchNorm1d(3, affine=False)})
    torch.save(module.state_dict(), path)


def plain_state_dict(path: Path, writers: Callable[[], Writers]) -> None:
    torch.save(tiny_llama().state_dict(), path)


def directory(name: str, path: Path, writers: Callable[[], Writers]) -> None:
    """A directory of a framework: see `tests.corpus.writers_directories`."""
    shutil.copytree(writers().directories / name, path)


def case(name: str, path: Path, writers: Callable[[], Writers]) -> None:
    """A case of the corpus that is a directory."""
    shutil.copytree(writers().corpus[name].path, path)


def lora(path: Path, writers: Callable[[], Writers]) -> None:
    """A base model and an adapter of it, by peft."""
    from tests.support.merge_cases import llama, saved

    saved(path.parent, llama(torch.bfloat16), target_modules=["q_proj", "v_proj"])


def zero(path: Path, writers: Callable[[], Writers]) -> None:
    """What Trainer saved under DeepSpeed's ZeRO-2 on two ranks."""
    from tests.golden.deepspeed.make_deepspeed import unpack

    unpack(path.parent / "samples")
    shutil.move(path.parent / "samples" / "trainer" / "checkpoint-2", path)
    shutil.rmtree(path.parent / "samples")


def four_bit(path: Path, writers: Callable[[], Writers]) -> None:
    """A model in packed int4, as compressed-tensors saves it."""
    from compressed_tensors.quantization import QuantizationArgs

    from tests.support.int8_models import compressed

    groups = QuantizationArgs(num_bits=4, strategy="group", group_size=32)
    compressed(path, groups, "pack-quantized")


def gguf(path: Path, writers: Callable[[], Writers]) -> None:
    """A model in Q8_0, as llama.cpp names it."""
    from tests.support.gguf_models import MODELS, build, write_model

    write_model(MODELS["llama"], build(MODELS["llama"]), path, "Q8_0")


def examples(path: Path, writers: Callable[[], Writers]) -> None:
    """The examples of the repository."""
    path.symlink_to(EXAMPLES)


BASE = {"base": hub_model}
GIVEN: Mapping[str, Mapping[str, Make]] = {
    "tutorial.md": {},
    "recipes/wrapped-names.md": {"run/model.pt": training_script, **BASE},
    "recipes/prefixes.md": {
        "distilled.pt": distillation,
        "ema.pt": average,
        "model.pt": plain_state_dict,
        **BASE,
    },
    "recipes/accelerate-to-hf.md": {
        "checkpoint-2": partial(directory, "trainer_fsdp_sharded_w2/checkpoint-2"),
        **BASE,
    },
    "recipes/deepspeed.md": {"checkpoint-2": zero},
    "recipes/rank-files-to-hf.md": {"global_step_2": partial(directory, "verl_w2"), **BASE},
    "recipes/qlora-fsdp2.md": BASE,
    "recipes/another-world-size.md": {"step-100": partial(case, "fsdp2_dcp_optimizer_w2")},
    "recipes/report.md": BASE,
    "recipes/dequantize.md": {"quantized": four_bit},
    "recipes/low-bit-and-back.md": {"release": four_bit},
    "recipes/gguf.md": {"model.gguf": gguf},
    "recipes/meta-and-megatron.md": BASE,
    "recipes/merge-lora.md": {"adapter": lora},
    "recipes/checkpoint-manager.md": {},
    "recipes/several-models.md": {},
    "recipes/rounding-any-world.md": {},
    "recipes/hub.md": {},
    "recipes/mapping-file.md": BASE,
    "recipes/container.md": {"plain.pt": training_script, "examples": examples},
    "recipes/several-ranks.md": BASE,
}
"""Page -> path -> what makes the checkpoint that the page begins with there."""
