"""Tensors that few models have: each comes back with the same bits, or one line refuses it. Nothing is altered in silence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptmap
from ckptmap.errors import CkptmapError, LoadError
from ckptmap.live.model.values_in_memory import expanded


class Doubled(torch.Tensor):
    """A wrapper whose values are twice those that it holds, and which torch cannot take apart."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Doubled:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = (one.inner * 2 if isinstance(one, Doubled) else one for one in args)
        return func(*plain, **kwargs or {})


def codes(dtype: str) -> torch.Tensor:
    return torch.randint(0, 255, (3, 4), dtype=torch.uint8).view(getattr(torch, dtype))


def inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.randn(3, 3)


Make = Callable[[], torch.Tensor]
KEPT: dict[str, Make] = {
    "complex": lambda: torch.randn(3, dtype=torch.complex128),
    "conjugate": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "negative view": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "bool": lambda: torch.randn(3, 3) > 0,
    "uint64": lambda: torch.arange(5).to(torch.uint64),
    "float8": lambda: torch.randn(3, 3).to(torch.float8_e4m3fn),
    "float4": lambda: codes("float4_e2m1fn_x2"),
    "no elements": lambda: torch.empty(3, 0, 2),
    "no dims": lambda: torch.tensor(3.5),
    "float64": lambda: torch.randn(3, dtype=torch.float64),
    "nan and -0": lambda: torch.tensor([float("nan"), -0.0, float("inf")]),
    "expanded": lambda: torch.randn(3, 1).expand(3, 4),
    "overlapping": lambda: torch.randn(12).as_strided((4, 3), (2, 1)),
    "channels last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "every other": lambda: torch.randn(6)[::2],
    "with a gradient": lambda: torch.randn(3, 3).requires_grad_(),
    "computed": lambda: torch.randn(3, 3).requires_grad_() * 2,
    "of inference mode": inference,
}
REFUSED: dict[str, Make] = {
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged
    ),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)]),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "sparse blocks": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(3, 3), 0.1, 0, torch.qint8),
    "of MKL-DNN": lambda: torch.randn(3, 3).to_mkldnn(),
    "on meta": lambda: torch.empty(3, 3, device="meta"),
    "masked": lambda: torch.masked.masked_tensor(
        torch.randn(3, 3), torch.ones(3, 3, dtype=torch.bool)
    ),
    "of a wrapper": lambda: Doubled(torch.randn(3, 3)),
    "uint4": lambda: codes("uint4"),
    "bits8": lambda: codes("bits8"),
    "without a shape": lambda: nn.parameter.UninitializedBuffer(),
}
PLACES = ("buffer", "parameter", "state", "group", "extra")


class Run:
    """A model and an optimizer with a tensor in one place."""

    def __init__(self, place: str, value: torch.Tensor) -> None:
        self.place, self.value = place, value
        self.model = nn.Linear(3, 3)
        self.extra: dict[str, Any] = {}
        if place == "buffer":
            self.model.register_buffer("odd", value)
        elif place == "parameter":
            self.model.odd = nn.Parameter(value, requires_grad=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        state = self.optimizer.state[self.model.weight]
        state["momentum_buffer"] = torch.zeros(3, 3)
        if place == "state":
            state["odd"] = value
        elif place == "group":
            self.optimizer.param_groups[0]["odd"] = value
        elif place == "extra":
            self.extra["odd"] = value

    def found(self, report: Any) -> torch.Tensor:
        if self.place == "extra":
            return report.extra["odd"]  # type: ignore[no-any-return]
        if self.place == "group":
            return self.optimizer.param_groups[0]["odd"]  # type: ignore[no-any-return]
        if self.place == "state":
            return self.optimizer.state[self.model.weight]["odd"]  # type: ignore[no-any-return]
        return self.model.odd  # type: ignore[return-value]


def bits(value: torch.Tensor) -> torch.Tensor:
    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", KEPT)
def test_the_same_bits_come_back(name: str, place: str, tmp_path: Path) -> None:
    run, again = Run(place, KEPT[name]()), Run(place, KEPT[name]())
    ckptmap.save(tmp_path / "c", run.model, run.optimizer, extra=run.extra).wait()
    report = ckptmap.load(tmp_path / "c", again.model, again.optimizer, exact=True)
    found, wanted = again.found(report), run.value
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert torch.equal(bits(found), bits(wanted))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", REFUSED)
def test_one_line_refuses_it(name: str, place: str, tmp_path: Path) -> None:
    value = REFUSED[name]()
    if place == "parameter" and torch.nn.parameter.is_lazy(value):
        value = nn.parameter.UninitializedParameter(requires_grad=False)
    try:
        run = Run(place, value)
    except (RuntimeError, ValueError, AttributeError):
        pytest.skip("torch makes no such parameter")
    with pytest.raises(CkptmapError) as no:
        ckptmap.save(tmp_path / "c", run.model, run.optimizer, extra=run.extra)
    text = str(no.value)
    assert "odd" in text and "\n" not in text and no.value.hint, text
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("place", ["buffer", "parameter", "state", "group"])
def test_elements_that_share_memory_take_values_of_their_own(place: str, tmp_path: Path) -> None:
    """The last one was the value of all."""
    run, again = Run(place, torch.randn(4, 3)), Run(place, KEPT["overlapping"]())
    ckptmap.save(tmp_path / "c", run.model, run.optimizer).wait()
    report = ckptmap.load(tmp_path / "c", again.model, again.optimizer)
    assert torch.equal(again.found(report), run.value)


def test_a_live_tensor_of_a_dtype_that_no_file_knows_is_refused(tmp_path: Path) -> None:
    run, again = Run("buffer", codes("uint8")), Run("buffer", codes("uint4"))
    ckptmap.save(tmp_path / "c", run.model).wait()
    with pytest.raises(LoadError, match=r"model: odd is a tensor of torch\.uint4, expected dense"):
        ckptmap.load(tmp_path / "c", again.model)


def test_whether_elements_share_memory() -> None:
    flat = torch.zeros(24)
    for apart in (flat.view(4, 6).t(), flat[::3], flat.view(2, 3, 4).permute(2, 0, 1), flat[:0]):
        assert not expanded(apart)
    for shared in (flat.as_strided((4, 3), (2, 1)), flat[:1].expand(3), flat.unfold(0, 4, 2)):
        assert expanded(shared)
    assert not expanded(flat[:1].expand(1)) and not expanded(flat.as_strided((1, 3), (0, 1)))
