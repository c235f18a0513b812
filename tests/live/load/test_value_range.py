"""Values that the model's dtype does not hold are refused: a cast would wrap integers around, and make floats infinite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptmap
from ckptmap.errors import LoadError, RunError
from ckptmap.live.model import tensor_reader, value_range
from ckptmap.live.model.tensor_reader import TensorReader
from ckptmap.storage import device_copies
from ckptmap.tensors import Box
from tests.support.dispatched import NeverWaits, OneDevice, Waited

INTEGERS = [
    torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip


class Counts(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(3, dtype=dtype))


def stored(*values: int, dtype: torch.dtype = torch.int64) -> dict[str, torch.Tensor]:
    return Counts(dtype).state_dict() | {"seen": torch.tensor(values, dtype=dtype)}


def by_load(state: Any, model: nn.Module, path: Path) -> None:
    torch.save(state, path)
    ckptmap.load(path, model, max_memory=16)


def by_hooks(state: Any, model: nn.Module, path: Path) -> None:
    with_hooks = ckptmap.hooks.install(model)
    model.load_state_dict(state)
    with_hooks.remove()


def by_translate(state: Any, model: nn.Module, path: Path) -> None:
    model.load_state_dict(ckptmap.translate(state, like=model))


@pytest.mark.parametrize("way", [by_load, by_hooks, by_translate])
def test_in_range_or_refused(way: Callable[..., None], tmp_path: Path) -> None:
    model = Counts(torch.int32)
    way(stored(1, -(2**31), 2**31 - 1), model, tmp_path / "a.pt")
    assert model.seen.tolist() == [1, -(2**31), 2**31 - 1]
    with pytest.raises(LoadError, match=r"seen.*5000000000") as caught:
        way(stored(4, 5, 5_000_000_000), model, tmp_path / "b.pt")
    assert caught.value.code == "CKM502" and "\n" not in caught.value.message
    assert model.seen.tolist() == [1, -(2**31), 2**31 - 1]


def test_nothing_is_touched_and_without_strict_the_rest_is_loaded(tmp_path: Path) -> None:
    state = stored(0, 300, 0)
    torch.save(state, tmp_path / "a.pt")
    model = Counts(torch.uint8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(
        LoadError, match=r"model uint8\[3\], checkpoint int64\[3\], which holds 300"
    ):
        ckptmap.load(tmp_path / "a.pt", model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    report = ckptmap.load(tmp_path / "a.pt", model, strict=False)
    assert [one.holds for one in report.mismatched] == [300] and not report.cast
    assert torch.equal(model.fc.weight, state["fc.weight"]) and model.seen.tolist() == [0, 0, 0]


@pytest.mark.parametrize("way", [by_load, by_hooks, by_translate])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_finite_floats_stay_finite(
    stored: torch.dtype, way: Callable[..., None], tmp_path: Path
) -> None:
    """65,504 is the largest value of float16; what was infinite or NaN before the cast is no loss."""
    model = nn.Linear(3, 2, dtype=torch.float16)
    kept = torch.tensor([[1.5, -65_280.0, float("inf")], [float("nan"), 0.0, 2.0**-30]])
    state = {"weight": kept.to(stored), "bias": torch.zeros(2, dtype=stored)}
    way(state, model, tmp_path / "a.pt")
    assert torch.equal(model.weight.nan_to_num(7), kept.half().nan_to_num(7))
    state["weight"][1, 2] = 70_000.0
    with pytest.raises(RunError, match=r"^weight: holds finite values of torch\.") as caught:
        way(state, model, tmp_path / "b.pt")
    assert caught.value.code == "CKM309" and "\n" not in caught.value.message
    way(state, nn.Linear(3, 2, dtype=torch.bfloat16), tmp_path / "c.pt")  # as the hint says


def test_decoded_values_stay_finite(tmp_path: Path) -> None:
    """int8 weights whose scales make them large."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    big = nn.Linear(32, 4, bias=False)
    big.weight.data.mul_(1e6)
    quantize_(big, Int8WeightOnlyConfig(version=2))
    ckptmap.save(tmp_path / "int8", big).wait()
    with pytest.raises(RunError, match=r"^weight: holds finite values of torch\.float32"):
        ckptmap.load(tmp_path / "int8", nn.Linear(32, 4, bias=False, dtype=torch.float16))


@pytest.mark.parametrize("live", INTEGERS, ids=str)
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_every_pair_of_dtypes(dtype: torch.dtype, live: torch.dtype) -> None:
    """By Python's own integers: each bound of the stored dtype, alone."""
    mine, theirs = torch.iinfo(dtype), torch.iinfo(live)
    lost = {value for value in (mine.min, mine.max) if not theirs.min <= value <= theirs.max}
    assert value_range.narrows(dtype, live) == bool(lost)
    for value in (mine.min, mine.max):
        found = value_range.outside(torch.tensor([0, value], dtype=dtype), live)
        assert found == (value if value in lost else None)


def test_a_state_dict_is_cast_to_no_infinity() -> None:
    state = {"w": torch.tensor([65_504.0, float("inf")]), "n": torch.tensor([1 << 40])}
    made = ckptmap.translate(state, encoding="fp16")
    assert torch.equal(made["w"], state["w"].half()) and made["n"].dtype == torch.int64
    state |= {"a": torch.tensor([7e4]), "b": torch.tensor([-1e6]), "c": torch.tensor([1e30])}
    with pytest.raises(RunError, match=r"^state dict: a, b, c: finite values are too") as caught:
        ckptmap.translate(state, encoding="fp16")
    assert caught.value.code == "CKM309" and "encoding='bf16'" in caught.value.hint
    ckptmap.translate(state, encoding="bf16")


# ------------------------------------------------------------------------------- on a device


def test_casts_on_a_device_are_looked_at_with_one_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait for each tensor would let no read go on while others are copied."""
    torch.save({f"w{n}": torch.ones(4, 4) for n in range(3)}, tmp_path / "a.pt")
    outs = [torch.empty(4, 4, dtype=torch.float16, device="meta") for _ in range(3)]
    asked: list[list[str]] = []
    monkeypatch.setattr(
        tensor_reader, "check_together", lambda some: asked.append([one.name for one in some])
    )
    monkeypatch.setattr(device_copies, "fill_tensor", lambda *_: None)
    with ckptmap.open(tmp_path / "a.pt") as checkpoint, NeverWaits():
        reader = TensorReader(checkpoint.files, 1 << 20)
        steps = [
            lambda its, n=n: its.dense(checkpoint[f"w{n}"], Box.whole((4, 4)), outs[n])
            for n in range(3)
        ]
        assert len(list(reader.run_all(steps, [32] * 3))) == 3
        assert asked == [["w0", "w1", "w2"]]
        with pytest.raises(Waited):  # alone it is looked at at once
            reader.run(steps[0])


def test_what_a_device_has_lost_is_said_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(value_range, "is_waited_for", lambda values: True)
    model = nn.Linear(3, 2)
    model.weight.data[1] = 1e5
    torch.save(model.state_dict(), tmp_path / "a.pt")
    narrow = nn.Linear(3, 2, dtype=torch.float16)
    with pytest.raises(RunError, match=r"^weight: holds finite values of torch\.float32") as caught:
        ckptmap.load(tmp_path / "a.pt", narrow)
    assert caught.value.code == "CKM309"
    assert caught.value.message.endswith("; all 2 tensors of the model are filled")
    model.weight.data[1] = 0
    torch.save(model.state_dict(), tmp_path / "a.pt")
    ckptmap.load(tmp_path / "a.pt", narrow)
    assert torch.equal(narrow.weight, model.weight.half())


LARGEST = {
    torch.float16: (65_504.0, 65_519.0, 65_536.0),
    torch.float8_e5m2: (57_344.0, 61_439.0, 61_442.0),
    torch.float8_e4m3fn: (448.0, 464.0, 465.0),
}
"""The largest value of a dtype, the largest that is rounded to it, and one that is lost."""


@pytest.mark.parametrize("live", LARGEST, ids=str)
@pytest.mark.parametrize("stored", [torch.float64, torch.float32], ids=str)
def test_a_value_is_lost_beyond_half_a_step(stored: torch.dtype, live: torch.dtype) -> None:
    """torch 2.13 casts what is too large for float8_e4m3fn to its largest value, older releases to NaN."""
    largest, rounded, beyond = LARGEST[live]
    for sign in (1, -1):
        out, kept = torch.empty(3, dtype=live), torch.tensor([largest, rounded, 0.3], dtype=stored)
        value_range.copy_held(out, sign * kept, "w")
        assert out[:2].float().tolist() == [sign * largest] * 2
        with pytest.raises(RunError, match=r"^w: holds finite values .* too large for"):
            value_range.copy_held(out, torch.tensor([0.0, sign * beyond, 1.0], dtype=stored), "w")
    odd = torch.tensor([torch.inf, -torch.inf, torch.nan], dtype=stored)
    value_range.copy_held(torch.empty(3, dtype=live), odd, "w")
    value_range.copy_held(torch.empty(0, dtype=live), odd[:0], "w")
    with pytest.raises(RunError, match=r"^w: holds finite values"):
        value_range.copy_held(
            torch.empty(4, dtype=live), torch.cat([odd, kept.new_tensor([beyond])]), "w"
        )


def test_float8_of_one_kind_becomes_the_other() -> None:
    kept = torch.tensor([448.0, -0.5, torch.nan]).to(torch.float8_e5m2)
    out = torch.empty(3, dtype=torch.float8_e4m3fn)
    value_range.copy_held(out, kept, "w")
    assert out[:2].float().tolist() == [448.0, -0.5]
    with pytest.raises(RunError, match=r"^w: holds finite values of torch\.float8_e5m2"):
        value_range.copy_held(out, torch.tensor([1.0, 512.0, 0.0]).to(torch.float8_e5m2), "w")


@pytest.mark.parametrize("live", [torch.float16, torch.float8_e4m3fn])
def test_values_of_another_device_are_looked_at_where_they_are(live: torch.dtype) -> None:
    """A state dict on the CPU, translated for a model on a GPU: two devices in one operation are an error of torch."""
    out = torch.empty(4, dtype=live, device="meta")
    with OneDevice():
        value_range.copy_held(out, torch.ones(4), "w")
        with pytest.raises(RunError, match=r"^w: holds finite values of torch\.float32"):
            value_range.copy_held(out, torch.full((4,), 1e5), "w")
