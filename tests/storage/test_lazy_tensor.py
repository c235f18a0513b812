"""A `LazyTensor` as torch's and NumPy's users take it: dims, length, `numpy.asarray`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import ckptmap

VALUES = torch.tensor([[0.0, -0.5, 1.5], [2.0, float("inf"), -3.0]])
TENSORS = {
    **{
        name: VALUES.to(getattr(torch, name))
        for name in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
    },
    **{name: torch.arange(6).to(getattr(torch, name)) for name in ("int64", "int8", "uint8")},
    "bool": torch.tensor([True, False]),
    "complex64": torch.tensor([1 + 2j, 3 - 4j]),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 4),
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ckptmap.Checkpoint]:
    path: Path = tmp_path_factory.mktemp("lazy") / "m.pt"
    torch.save(TENSORS, path)
    with ckptmap.open(path) as ckpt:
        yield ckpt


@pytest.mark.parametrize("name", TENSORS)
def test_dims_and_counts_are_those_of_the_tensor(stored: ckptmap.Checkpoint, name: str) -> None:
    lazy, tensor = stored[name], TENSORS[name]
    assert (lazy.ndim, lazy.numel()) == (tensor.ndim, tensor.numel())
    assert bool(lazy) is True  # there is a tensor, though it may be empty
    if tensor.ndim:
        assert len(lazy) == len(tensor)
    else:
        with pytest.raises(TypeError, match=r"^scalar: len\(\) of a tensor without dims$"):
            len(lazy)


@pytest.mark.parametrize("name", TENSORS)
def test_as_a_numpy_array(stored: ckptmap.Checkpoint, name: str) -> None:
    tensor = TENSORS[name]
    narrow = tensor.dtype.is_floating_point and tensor.dtype not in (torch.float16, torch.float64)
    expected = (tensor.float() if narrow else tensor).numpy()
    array = np.asarray(stored[name])
    assert array.dtype == expected.dtype
    np.testing.assert_array_equal(array, expected)


def test_a_numpy_dtype_and_copy(stored: ckptmap.Checkpoint) -> None:
    assert np.asarray(stored["bfloat16"], dtype=np.float16).dtype == np.float16
    assert np.array(stored["float32"], copy=True).tolist() == VALUES.tolist()
    with pytest.raises(ValueError, match=r"^float32: is read from a file, which copy=False does"):
        stored["float32"].__array__(copy=False)


def test_names_are_offered_by_a_notebook(stored: ckptmap.Checkpoint) -> None:
    assert stored._ipython_key_completions_() == list(TENSORS)
