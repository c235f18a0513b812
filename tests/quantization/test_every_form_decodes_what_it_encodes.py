"""Each form that values are encoded in decodes to nearly those values: those that only `--as` writes, too.

A bound that no 2-bit form misses: a scale that is stored as its reciprocal, or in the wrong place, is far beyond it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.gpu_session.encoders import decode, encode, encodings, placed
from benchmarks.gpu_session.read_forms import SIDES, is_encoded, more_forms
from benchmarks.gpu_session.timing import weight
from ckptmap.tensors import TensorInfo


def forms() -> Iterator[Any]:
    info = TensorInfo(SIDES, "bfloat16")
    for kind in ("bfloat16", "float32"):
        for name, encoding in encodings(TensorInfo(SIDES, kind)).items():
            yield pytest.param(encoding, TensorInfo(SIDES, kind), id=f"{name}-{kind}")
    for number, (name, encoding, info) in enumerate(more_forms()):
        if is_encoded(encoding, info):
            yield pytest.param(encoding, info, id=f"{name}-{number}")


@pytest.mark.parametrize(("encoding", "info"), list(forms()))
def test_values_come_back(encoding: Any, info: TensorInfo) -> None:
    flat = weight(512, info.dtype)[:96].contiguous()
    values = flat if len(info.shape) == 2 else torch.stack([flat, flat * 3])
    parts = encode(encoding, info, values)
    described = {name: part.dtype for name, part in encoding.parts(info).items()}
    assert {
        name: str(part.dtype).removeprefix("torch.") for name, part in parts.items()
    } == described
    found = decode(encoding, info, placed(encoding, info, parts, "cpu"), "cpu")
    wide, wanted = found.float(), values.float()
    assert float((wide - wanted).norm() / wanted.norm()) < 0.7
    assert 0.5 < float(wide.norm() / wanted.norm()) < 1.5
