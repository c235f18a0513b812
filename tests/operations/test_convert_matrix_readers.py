"""Every reader that the registry knows -> hf-fp32, and hf -> every writer -> hf-fp32: the values
are those that each format's own library has saved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmap
from ckptmap import registry
from tests.corpus import CASES, Corpus
from tests.corpus.writers_directories import sample
from tests.operations.test_convert_matrix import SETUPS, there
from tests.support.mapping_state import hub_state, state_of
from tests.support.paths import GOLDEN
from tests.support.same_tensors import assert_same
from tests.testing.test_conformance import DIRECTORIES, KNOWN, ONLY_READ, READERS, plain_tensors

IN_CORPUS = {
    "dcp": "fsdp2_dcp_w2",
    "hf": "hf_sharded_tied_bf16",
    "rank-files": "fsdp2_ranks_w4",
    "torch-zip": "torch_compiled_layers",
}
"""Reader -> a checkpoint of the corpus that is of its format."""
KEPT = {"deepspeed"}
"""Readers of a framework that is not installed: formats/deepspeed/test_converted.py converts what it has written."""
SAMPLES = {
    **{reader: place for reader, place in DIRECTORIES.items() if reader not in KEPT},
    "dcp-hf": ("dcp_hf_w2", ""),
}
"""Reader -> what its framework writes on two ranks, and the place in it."""


def test_every_reader_and_writer_is_here() -> None:
    assert {*IN_CORPUS, *ONLY_READ, *SAMPLES, *KEPT} == set(READERS)
    assert {setup.writer for setup in registry.setups() if setup.name in SETUPS} == {
        registry._load(spec).name for spec in registry.WRITERS
    }


def assert_widened(path: Path, truth: Mapping[str, torch.Tensor], left: set[str]) -> None:
    """float32 of the true values; `left` need not be there, for another name of theirs is."""
    with ckptmap.open(path) as ckpt:
        assert set(truth) - left <= set(ckpt) <= set(truth)
        assert ckpt.index.container == "hf"
        for fqn in ckpt:
            want = truth[fqn].float() if truth[fqn].is_floating_point() else truth[fqn]
            assert_same(ckpt[fqn].read(), want, fqn)


def proven(source: Path, dst: Path, **options: Any) -> Path:
    ckptmap.convert(source, dst, to="hf-fp32", optimizer="drop", **options)
    report = ckptmap.verify(dst, against=source)
    assert report.ok, str(report)
    return dst


@pytest.mark.parametrize("reader", IN_CORPUS)
def test_from_the_corpus(reader: str, corpus: Corpus, tmp_path: Path) -> None:
    case = corpus[IN_CORPUS[reader]]
    with ckptmap.open(case.path) as ckpt:
        assert ckpt.index.container == reader
    tied = {fqn for group in CASES[case.name].tied for fqn in group}
    assert_widened(proven(case.path, tmp_path / "out"), case.truth, tied)


@pytest.mark.parametrize("reader", ONLY_READ)
def test_from_formats_that_are_not_written(reader: str, tmp_path: Path) -> None:
    """Those of known names only go to the hub's names; a writer leaves what its format can hold."""
    known = reader in KNOWN
    stored = dict(state_of("llama", KNOWN[reader])) if known else plain_tensors()
    source = ONLY_READ[reader](stored, tmp_path)
    truth = hub_state("llama") if known else stored
    assert known or reader == "gguf" or stored.keys() == plain_tensors().keys()
    with ckptmap.open(source) as ckpt:
        assert ckpt.index.container == reader
    options: dict[str, Any] = {}
    if known:
        config = GOLDEN / "mappings" / "llama" / "config.json"
        options = {"names": "hf", "config_from": str(config)}
    ckptmap.convert(source, tmp_path / "out", to="hf-fp32", optimizer="drop", **options)
    assert ckptmap.verify(tmp_path / "out", against=source).ok
    assert_widened(tmp_path / "out", truth, set())


@pytest.mark.parametrize("reader", SAMPLES)
def test_from_what_frameworks_write(
    reader: str, framework_directories: Path, tmp_path: Path
) -> None:
    name, inner = SAMPLES[reader]
    case = sample(framework_directories, name)
    with ckptmap.open(case.path / inner) as ckpt:
        assert ckpt.index.container == reader
    assert_widened(proven(case.path / inner, tmp_path / "out"), case.truth, set())


@pytest.mark.parametrize("setup", SETUPS)
def test_from_hf_by_every_writer(setup: str, corpus: Corpus, tmp_path: Path) -> None:
    """Its bits in bfloat16 on the way, widened at the end; and the source is as it was."""
    case = corpus["hf_bf16"]
    before = {file: file.read_bytes() for file in case.path.rglob("*") if file.is_file()}
    middle = there(case.path, tmp_path / "middle", setup)
    assert_widened(proven(middle, tmp_path / "out"), case.truth, set())
    assert {file: file.read_bytes() for file in case.path.rglob("*")} == before
