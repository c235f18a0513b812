"""Writes what is beside this file: models as four libraries save them, most of them for the Hub.

    pip install --no-deps diffusers sentence-transformers timm open_clip_torch torchvision ftfy \\
        scikit-learn scipy joblib threadpoolctl narwhals pillow importlib-metadata zipp wcwidth
    python tests/golden/hub/make_hub.py [NAME ...]

diffusers 0.42.1, sentence-transformers 6.2.0, timm 1.0.31 and open_clip 3.3.0 were run with torch
2.13 and transformers 5.23 on the CPU. Values are those of `tests.corpus.models.seeded`; what was
trained has its truth beside it.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[2]))

from tests.corpus.models import fill  # noqa: E402
from tests.golden.truth import put_truth, truth_of  # noqa: E402


def vae() -> Any:
    made = importlib.import_module("diffusers").AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",), up_block_types=("UpDecoderBlock2D",),
        block_out_channels=(4,), layers_per_block=1, norm_num_groups=2, latent_channels=2,
        mid_block_add_attention=False,
    )  # fmt: skip
    fill(made, 0)
    return made


def transformer() -> Any:
    made = importlib.import_module("diffusers").PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=4, in_channels=2, out_channels=4, num_layers=1,
        cross_attention_dim=8, caption_channels=8, sample_size=4, use_additional_conditions=False,
    )  # fmt: skip
    fill(made, 0)
    return made


def diffusers(out: Path) -> None:
    made = transformer()
    made.save_pretrained(out / "transformer")


def diffusers_sharded(out: Path) -> None:
    made = vae()
    made.save_pretrained(out / "vae", max_shard_size="8KB")


def sentence_transformers(out: Path) -> None:
    library = importlib.import_module("sentence_transformers")
    modules = importlib.import_module("sentence_transformers.models")
    bert(out / "bert")
    first = modules.Transformer(str(out / "bert"), max_seq_length=16)
    pooling = modules.Pooling(16, pooling_mode="cls")
    made = library.SentenceTransformer(modules=[first, pooling, modules.Dense(16, 8)])
    fill(made, 0)
    made.save_pretrained(str(out / "model"), create_model_card=False)
    shutil.rmtree(out / "bert")


def bert(folder: Path) -> None:
    import transformers

    config = transformers.BertConfig(
        vocab_size=9, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\nc\nd\n")
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)


def vit(depth: int) -> Any:
    kind = importlib.import_module("timm.models.vision_transformer").VisionTransformer
    return kind(img_size=8, patch_size=4, num_classes=4, embed_dim=8, depth=depth, num_heads=2)


def timm_hub(out: Path) -> None:
    """As `push_to_hf_hub` stages it."""
    hub = importlib.import_module("timm.models._hub")
    made = vit(1)
    made.pretrained_cfg = {"architecture": "vit_tiny_patch16_224", "input_size": (3, 8, 8)}
    fill(made, 0)
    hub.save_for_hf(made, out / "model", safe_serialization="both")


def timm_saver(out: Path) -> None:
    """As its train.py saves: an EMA, the arguments that argparse made, a GradScaler."""
    import argparse

    utils = importlib.import_module("timm.utils")
    made = vit(0)
    fill(made, 0)
    make = importlib.import_module("timm.optim").create_optimizer_v2
    optimizer = make(made, "adamw", lr=1e-2, weight_decay=0.05)
    average = utils.ModelEmaV3(made, decay=0.5)
    made(torch.randn(2, 3, 8, 8)).square().mean().backward()
    optimizer.step()
    average.update(made)
    saver = utils.CheckpointSaver(
        made, optimizer, args=argparse.Namespace(model="vit", lr=1e-2), model_ema=average,
        amp_scaler=utils.NativeScaler(device="cpu"), checkpoint_dir=str(out), recovery_dir=str(out),
        max_history=1,
    )  # fmt: skip
    saver.save_checkpoint(0, metric=0.5)
    for file in ("model_best.pth.tar", "checkpoint-0.pth.tar"):
        (out / file).unlink()
    put_truth(out, truth_of(made, optimizer))


class NoTokenizer:
    """What CLIP's own is: not saved."""

    def save_pretrained(self, folder: Path) -> None: ...


def open_clip(out: Path) -> None:
    library = importlib.import_module("open_clip")
    config = {
        "embed_dim": 8,
        "vision_cfg": {"image_size": 8, "layers": 1, "width": 8, "patch_size": 4, "head_width": 8},
        "text_cfg": {"context_length": 8, "vocab_size": 12, "width": 8, "heads": 2, "layers": 1},
    }
    made = library.CLIP(**config)
    fill(made, 0)
    seen = {"size": 8, "mode": "RGB", "mean": (0.5,) * 3, "std": (0.5,) * 3}
    importlib.import_module("open_clip.model").set_model_preprocess_cfg(made, seen)
    push = importlib.import_module("open_clip.push_to_hf_hub")
    push.save_for_hf(made, NoTokenizer(), config, out / "model", safe_serialization=True)


WRITERS: dict[str, Callable[[Path], None]] = {
    "diffusers": diffusers, "diffusers_sharded": diffusers_sharded,
    "sentence_transformers": sentence_transformers, "timm_hub": timm_hub,
    "timm_saver": timm_saver, "open_clip": open_clip,
}  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:] or WRITERS:
        shutil.rmtree(HERE / name, ignore_errors=True)
        (HERE / name).mkdir()
        WRITERS[name](HERE / name)


if __name__ == "__main__":
    main()
