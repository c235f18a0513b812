"""hf -> every setup -> hf, and every container -> each setup that no other test covers: the values that
come back are those that went in, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmap
from ckptmap import registry
from tests.corpus import CASES, Corpus
from tests.support.same_tensors import assert_same

SETUPS = [setup.name for setup in registry.setups()]
SHARDED = {setup.name for setup in registry.setups() if setup.sharded}
OTHERS = [
    name for name in SETUPS if name not in ("hf", "full", "ddp", "compiled", "fsdp1", "fsdp2")
]
DEMANDS = {setup.name: setup.demands for setup in registry.setups() if setup.demands}
"""Setups whose loader wants some tensors in another dtype, or has none for them: GGUF."""
NAMED = {setup.name for setup in registry.setups() if setup.names}
"""Setups with names of their own: what they hold is compared under Hugging Face's names."""
ONE_OF_EACH = ["torch_tied", "torch_compiled_layers", "safetensors_bf16", "fsdp2_dcp_w2", "hf_sharded_fp32"]  # fmt: skip


def there(source: Path, dst: Path, setup: str, **options: Any) -> Path:
    options |= {"world_size": 3} if setup.removesuffix("-fp32") in SHARDED else {}
    ckptmap.convert(source, dst, to=setup, optimizer="drop", **options)
    report = ckptmap.verify(dst, against=source)
    assert report.ok, str(report)
    return dst


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("name", ["hf_bf16", "hf_sharded_tied_bf16", "hf_sharded_fp32"])
def test_hf_to_every_setup_and_back(name: str, setup: str, corpus: Corpus, tmp_path: Path) -> None:
    case = corpus[name]
    middle = there(case.path, tmp_path / "middle", setup)
    # What was cast for the loader is cast back: bf16 -> fp32 -> bf16 gives every bit again.
    cast = f"-{name.rsplit('_', 1)[1]}" if setup in DEMANDS else ""
    back = there(middle, tmp_path / "back", f"hf{cast}")
    assert ckptmap.diff(case.path, back, values=True).equal


@pytest.mark.parametrize("setup", OTHERS)
@pytest.mark.parametrize("name", [name for name in ONE_OF_EACH if name in CASES])
def test_every_container_to_every_setup(
    name: str, setup: str, corpus: Corpus, tmp_path: Path
) -> None:
    case = corpus[name]
    options: dict[str, Any] = {}
    left = refused(setup, case.truth)
    if left:
        options["exclude"] = left
    if setup == "fsdp1-local":  # the order of the modules, which some sources do not tell
        options["like"] = str(tmp_path / "like.pt")
        torch.save(dict(case.truth), options["like"])
    out = there(case.path, tmp_path / "out", setup, **options)
    if setup in NAMED and case.spec.container == "hf":
        out = there(out, tmp_path / "named", "hf")
    with ckptmap.open(out) as ckpt:
        for fqn in ckpt:
            assert_same(ckpt[fqn].read(), case.truth[fqn], fqn)
        tied = {fqn for group in case.spec.tied for fqn in group}
        assert set(case.truth) - tied - set(left) <= set(ckpt)


def refused(setup: str, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of the tensors that the setup has no type for; a bool one in GGUF."""
    if setup not in DEMANDS:
        return []
    dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
    return [name for name, dtype in dtypes.items() if DEMANDS[setup].refusal("dense", dtype)]


@pytest.mark.parametrize("setup", [setup.name for setup in registry.setups() if setup.dense])
def test_what_cannot_be_loaded_is_refused(setup: str, corpus: Corpus, tmp_path: Path) -> None:
    """A setup whose own loader takes dense tensors gets no NF4 payloads, but may get them decoded."""
    for source, to in ((corpus["hf_bf16"], f"{setup}-nf4"), (corpus["nf4_torch_llama"], setup)):
        with pytest.raises(ckptmap.CkptmapError, match=f"{setup} holds dense tensors only"):
            ckptmap.convert(source.path, tmp_path / "out", to=to)
    there(corpus["nf4_torch_llama"].path, tmp_path / "out", f"{setup}-fp32")
