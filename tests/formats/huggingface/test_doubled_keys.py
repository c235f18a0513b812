"""A config.json with a key twice, which RFC 8259 allows: nobody knows which value counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptmap
from ckptmap.errors import CkptmapError


def test_a_key_twice_in_a_config_is_refused_with_what_to_do(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    save_file({"a.weight": torch.ones(4, 4)}, model / "model.safetensors")
    config = model / "config.json"
    config.write_text('{"model_type": "llama", "dtype": "float32", "dtype": "bfloat16"}')
    with pytest.raises(CkptmapError) as caught:
        ckptmap.convert(model, tmp_path / "out", "hf-fp32")
    assert caught.value.code == "CKM103"
    assert "config.json: cannot be read as JSON: expected each key once" in caught.value.message
    assert "got 'dtype' twice: remove one of the two" in caught.value.message
    config.write_text('{"model_type": "llama", "dtype": "bfloat16"}')
    ckptmap.convert(model, tmp_path / "out", "hf-fp32")
