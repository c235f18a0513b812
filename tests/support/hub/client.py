"""The real huggingface_hub client, pointed at the Hub of the tests; and checkpoints to put there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.hub.server import Hub


def environment(hub: Hub, home: Path, token: str = "") -> dict[str, str]:
    """For a process of its own: nothing of this machine's own login or cache is seen."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGG"))}
    return kept | {
        "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_TOKEN": token,
        "OMP_NUM_THREADS": "1", "TMPDIR": str(home.parent),
    }  # fmt: skip


@contextmanager
def connected(home: Path, patch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The same in this process, whose huggingface_hub may be imported already. Waiting before a
    request is made again takes no time."""
    import huggingface_hub.file_download
    import huggingface_hub.utils._cache_assets
    import huggingface_hub.utils._http
    from huggingface_hub import constants

    huggingface_hub.utils.disable_progress_bars()
    with Hub() as hub:
        template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "ENDPOINT", hub.endpoint)
        for module in (constants, huggingface_hub.file_download):  # the second until 1.0
            patch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
        patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True, raising=False)  # since 0.31
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        patch.setattr(huggingface_hub.utils._cache_assets, "HF_ASSETS_CACHE", str(home / "assets"))
        waiting = SimpleNamespace(sleep=lambda seconds: None)
        patch.setattr(huggingface_hub.utils._http, "time", waiting)
        patch.setattr(huggingface_hub.file_download, "time", waiting)
        patch.setenv("HF_TOKEN", "")
        patch.setenv("HF_XET_CACHE", str(home / "xet"))
        yield hub


def llama(folder: Path, max_shard_size: str = "5GB", dtype: str = "bfloat16") -> Path:
    """transformers' own `save_pretrained` of a tiny Llama, with a tokenizer: 21 tensors."""
    import torch

    from tests.corpus.models import tiny_llama
    from tests.corpus.writers_hf import write_tokenizer

    tiny_llama(False, getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    write_tokenizer(folder)
    return folder


def wide(folder: Path, shards: int = 4, rows: int = 1024) -> Path:
    """A sharded set of `rows` * 2 KiB a shard, written by safetensors and huggingface_hub: large
    enough to tell a header from a file."""
    import torch
    from huggingface_hub import save_torch_state_dict

    generator = torch.Generator().manual_seed(0)
    state = {
        f"layers.{i}.weight": torch.randn(rows, 512, generator=generator) for i in range(shards)
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(state, folder, max_shard_size=rows * 2048 + 4096)
    (folder / "config.json").write_text('{"model_type": "none", "torch_dtype": "float32"}\n')
    return folder
