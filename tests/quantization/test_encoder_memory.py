"""On a CPU an encoder keeps no tensor of a feed: each that stays between temporaries that go splits the heap, and the
memory of a conversion grew by 3 bytes for each value of one weight."""

from __future__ import annotations

import gc
from collections.abc import Mapping

import pytest
import torch

from benchmarks.gpu_session.encoders import looking
from ckptmap.protocols import Encoder, Encoding
from ckptmap.quantization.dense import CastEncoder
from ckptmap.quantization.gptq.encodings import Awq, Gptq
from ckptmap.tensors import TensorInfo
from tests.quantization.test_kernel_counts import targets_of_all

SHAPE = (1024, 512)
FEEDS = 8
INFO = TensorInfo(SHAPE, "bfloat16")
TARGETS: Mapping[str, Encoding] = {
    name: encoding
    for name, encoding in targets_of_all("bfloat16").items()
    if not encoding.encoder(INFO, "cpu").state_nbytes  # the others state what they keep
}


def held(root: object) -> list[torch.Tensor]:
    """The tensors that an object reaches by its attributes and their lists."""
    seen: set[int] = set()
    todo: list[object] = [root]
    tensors: list[torch.Tensor] = []
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, type):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            tensors.append(one)
        elif isinstance(one, list | tuple):
            todo += one
        elif type(one).__module__.startswith("ckptmap"):
            todo += gc.get_referents(one) if not hasattr(one, "__dict__") else vars(one).values()
    return tensors


def fed(encoder: Encoder, values: torch.Tensor) -> list[int]:
    """Feed the values in parts and return how many tensors the encoder holds after each."""
    counts = []
    parts = values.reshape(FEEDS, -1)
    look = looking(encoder)
    for part in parts if look is not None else ():
        look(part)
    for number, part in enumerate(parts):
        list(encoder.feed(number * part.numel(), part))
        counts.append(len(held(encoder)))
    return counts


@pytest.mark.parametrize("name", TARGETS)
def test_no_tensor_of_a_feed_stays(name: str) -> None:
    encoder = TARGETS[name].encoder(INFO, "cpu")
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).bfloat16()
    counts = fed(encoder, values)
    assert len(set(counts)) == 1, counts


def test_none_stays_of_values_that_were_infinite_before_a_cast() -> None:
    values = torch.full(SHAPE, torch.inf)
    values[::2] = torch.nan
    assert set(fed(CastEncoder("float32", "bfloat16"), values)) == {0}


@pytest.mark.parametrize("encoding", [Gptq(4, 64), Awq(4, 64)], ids=["gptq", "awq"])
def test_what_lies_across_the_rows_is_held_once(encoding: Encoding) -> None:
    """In bands at first, which were joined at the end."""
    encoder = encoding.encoder(INFO, "cpu")
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).bfloat16()
    fed(encoder, values)
    kept = held(encoder)
    assert sum(tensor.nbytes for tensor in kept) <= encoder.state_nbytes
    codes = next(write.values for write in encoder.finish() if write.part == "qweight")
    assert codes.data_ptr() in {tensor.data_ptr() for tensor in kept}
