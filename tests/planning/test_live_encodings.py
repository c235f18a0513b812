"""The encodings that live models take: the table is complete, plans keep to it, `doctor` prints it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

import ckptmap
from benchmarks.gpu_session.read_forms import more_forms
from ckptmap import registry
from ckptmap.planning.live_encodings import TABLE, HeldLive, LiveSupport, rows, scheme_of
from ckptmap.quantization.torchao.int8 import Int8Scheme
from ckptmap.setups import names
from ckptmap.testing import registered
from tests.support.gguf_files import blocks, write

INT8 = ("int8", "bnb-int8", "ct-int8")
FLOAT8 = ("float8", "fp8", "ct-fp8")


def live_support(setup: str, encoding: str) -> LiveSupport | None:
    return {(base, held): support for base, held, support in rows()}.get((setup, encoding))


def test_every_setup_and_every_quantized_target_is_in_the_table() -> None:
    assert all(setup.live for setup in registry.setups())
    casts = {"bf16", "fp32", "fp16"}
    held = [s for s in registry.schemes() if isinstance(s, HeldLive)]
    targets = {s.name for s in registry.schemes() if s.suffix} - casts
    assert targets == {s.name for s in held if s.suffix}, "others are read only"  # type: ignore[attr-defined]
    assert len(list(rows())) == len(registry.setups()) * len(held)


def test_another_scheme_says_itself_how_it_is_held() -> None:
    class Rows(Int8Scheme):
        name = suffix = "rows"

    class Unknown(Rows):
        name = suffix = "unknown"
        live = "of nobody's"

    with registered(Rows(), Unknown()):
        there, where = live_support("fsdp2", "rows"), live_support("fsdp1", "rows")
        assert there is not None and there.ok and where is not None and not where.ok
        assert live_support("fsdp1", "unknown") is None


def test_the_nearest_are_targets_that_are_held() -> None:
    known = set(names())
    for setup, encoding, found in rows():
        for nearest in found.nearest:
            assert nearest in known, (setup, encoding)
            base, _, suffix = nearest.partition("-")
            there = live_support(base, suffix)
            assert there is None or there.ok, nearest
    assert live_support("fsdp2", "dense") is None


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    torch.save({"fc.weight": torch.randn(128, 128)}, tmp_path / "dense.pt")
    return tmp_path / "dense.pt"


@pytest.mark.parametrize("encoding", [*INT8, *FLOAT8])
def test_planning_refuses_what_fsdp1_cannot_hold(
    encoding: str, dense: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        ckptmap.CkptmapError, match=rf"fc\.weight: {encoding} in a model of fsdp1"
    ) as e:
        ckptmap.plan(dense, f"fsdp1-{encoding}", world_size=2)
    assert e.value.code == "CKM317" and "--to fsdp1-bf16" in e.value.hint
    ckptmap.convert(dense, tmp_path / "q.pt", to=f"full-{encoding}")
    with pytest.raises(ckptmap.CkptmapError, match="in a model of fsdp1"):
        ckptmap.plan(tmp_path / "q.pt", "fsdp1", world_size=2)
    plan = ckptmap.plan(tmp_path / "q.pt", "fsdp1-bf16", world_size=2)  # the nearest
    assert plan.steps[0].target == "bfloat16"
    ckptmap.plan(tmp_path / "q.pt", "fsdp2", world_size=2)


def test_every_encoding_that_is_read_is_in_the_table() -> None:
    """By its own name: blocks of ggml's types, and codes of other widths, are of a scheme with another."""
    names = {encoding.name for _, encoding, _ in more_forms()} | {f"ct-int{n}" for n in range(1, 9)}
    assert len(names) > 35
    for name in names:
        scheme = scheme_of(name)
        assert isinstance(scheme, HeldLive), name
        assert ("FSDP1", scheme.live) in TABLE


def test_planning_refuses_blocks_of_any_type_in_fsdp1(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", {"fc.weight": ("Q4_K", blocks("Q4_K", (256, 256)))})
    with pytest.raises(
        ckptmap.CkptmapError, match=r"fc\.weight: gguf-q4_k in a model of fsdp1"
    ) as e:
        ckptmap.plan(tmp_path / "m.gguf", "fsdp1", world_size=2)
    assert e.value.code == "CKM317" and "--to fsdp1-bf16" in e.value.hint
    ckptmap.plan(tmp_path / "m.gguf", "fsdp1-bf16", world_size=2)


def doctor(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ckptmap", "doctor", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_doctor_prints_it(dense: Path, tmp_path: Path) -> None:
    ckptmap.convert(dense, tmp_path / "q.pt", to="full-int8")
    asked = doctor("--from", str(tmp_path / "q.pt"), "--to", "fsdp1")
    assert asked.returncode == 1
    assert "nearest: --to fsdp2-int8 or --to fsdp1-bf16" in asked.stdout
    assert f"torch {torch.__version__}" in asked.stdout, "for the installed versions"
    found = json.loads(doctor("--from", str(tmp_path / "q.pt"), "--to", "fsdp2", "--json").stdout)
    (row,) = found["holding"]
    assert (row["setup"], row["encoding"], row["holds"]) == ("fsdp2", "int8", True)
    assert doctor("--to", "fsdp2-int8").returncode == 0
    assert doctor("--to", "fsdp2-ranks-int8").returncode == 1, "dense tensors only"
    assert "every setup holds them" in doctor("--from", str(dense), "--to", "fsdp1").stdout
    wrong = doctor("--to", "fsdp3")
    assert wrong.returncode == 2 and "CKM201" in wrong.stderr


# ------------------------------------------------------------------------------- the facts


def test_an_integer_parameter_cannot_require_gradients() -> None:
    with pytest.raises(RuntimeError, match="Only Tensors of floating point"):
        nn.Parameter(torch.zeros(2, 2, dtype=torch.int8))


def test_torchaos_int8_cannot_be_cut_as_fsdp2_cuts() -> None:
    """So that ckptmap.load brings a subclass with an all-gather. When this fails, see whether
    `live.quantized.int8_sharded` still needs it."""
    linear = nn.Linear(32, 16, bias=False)
    quantize_(linear, Int8WeightOnlyConfig())
    with pytest.raises(NotImplementedError, match=r"aten\.split|split"):
        torch.chunk(linear.weight, 2)


@pytest.mark.parametrize("setup", [setup.name for setup in registry.setups()])
@pytest.mark.parametrize("encoding", ["int8", "fp8"])
def test_every_setup_takes_a_quantized_source_or_says_why_not(
    encoding: str, setup: str, tmp_path: Path
) -> None:
    """As it is, or refused with a nearest; decoded, always."""
    state = {"a.weight": torch.randn(128, 128), "a.bias": torch.zeros(128)}
    torch.save(state, tmp_path / "dense.pt")
    ckptmap.convert(tmp_path / "dense.pt", tmp_path / "q.pt", to=f"full-{encoding}")
    made = next(found for found in registry.setups() if found.name == setup)
    more: dict[str, Any] = {"world_size": 2} if made.sharded else {}
    if setup == "fsdp1-local":  # the order of the modules decides what lies where
        more["like"] = str(tmp_path / "dense.pt")
    found = live_support(setup, encoding)
    assert found is not None
    if found.ok and not made.dense:
        ckptmap.convert(tmp_path / "q.pt", tmp_path / "as-it-is", to=setup, **more)
        with ckptmap.open(tmp_path / "as-it-is") as ckpt, ckptmap.open(tmp_path / "q.pt") as before:
            assert ckpt["a.weight"].encoding == encoding
            assert torch.equal(ckpt["a.weight"].read(), before["a.weight"].read())
    else:
        with pytest.raises(ckptmap.CkptmapError, match=r"a\.weight") as caught:
            ckptmap.plan(tmp_path / "q.pt", setup, **more)
        assert caught.value.code in ("CKM203", "CKM317") and "--to" in caught.value.hint
    ckptmap.convert(tmp_path / "q.pt", tmp_path / "decoded", to=f"{setup}-bf16", **more)
    with ckptmap.open(tmp_path / "decoded") as ckpt:
        assert ckpt["a.weight"].encoding == "dense"
