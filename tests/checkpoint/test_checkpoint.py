"""Every checkpoint of the corpus opens under plain FQNs, with its writer's values bit for bit."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch

import ckptmap
from ckptmap.errors import MissingKeyError
from tests.corpus import CASES, Corpus, Spec
from tests.support.same_tensors import assert_same, expected_keys

ALL = sorted(CASES)
LOADABLE_ROOT = "/"


def open_case(spec: Spec, path: Any) -> ckptmap.Checkpoint:
    return ckptmap.open(path, root=LOADABLE_ROOT.join(spec.root) if spec.root else None)


@pytest.mark.parametrize("name", ALL)
def test_values_by_plain_fqn(name: str, corpus: Corpus) -> None:
    case = corpus[name]
    with ckptmap.open(case.path) as ckpt:
        must, may = expected_keys(case)
        assert must <= set(ckpt) <= may
        for fqn in ckpt:
            assert ckpt[fqn].shape == tuple(case.truth[fqn].shape), fqn
            assert_same(ckpt[fqn].read(), case.truth[fqn], fqn)
        assert bool(ckpt.wrappers) == bool(case.spec.wrappers or case.spec.prefix)


@pytest.mark.parametrize("name", ALL)
def test_any_box_reads_like_the_whole(name: str, corpus: Corpus) -> None:
    case = corpus[name]
    with ckptmap.open(case.path) as ckpt:
        for fqn in ckpt:
            lazy, whole = ckpt[fqn], case.truth[fqn]
            if not lazy.shape or 0 in lazy.shape:
                continue
            low = [n // 3 for n in lazy.shape]
            sizes = [max(1, n // 2) for n in lazy.shape]
            cut = tuple(slice(o, o + n) for o, n in zip(low, sizes, strict=True))
            assert_same(lazy.read(low, sizes), whole[cut], fqn)
            assert_same(lazy[-1], whole[-1], fqn)
            assert_same(lazy[1:], whole[1:], fqn)


@pytest.mark.parametrize("name", [n for n in ALL if CASES[n].optimizer])
def test_optimizer_state_by_fqn_or_said_to_be_by_index(name: str, corpus: Corpus) -> None:
    case = corpus[name]
    with ckptmap.open(case.path) as ckpt:
        assert ckpt.optimizer_order == case.spec.order
        if case.spec.optimizer == "index" and not case.spec.order:
            assert ckpt.optimizer_by_index
            assert ckpt.optimizer == {}
            return
        assert set(ckpt.optimizer) == set(case.optimizer)
        for fqn, states in case.optimizer.items():
            assert set(ckpt.optimizer[fqn]) == set(states)
            for state, value in states.items():
                assert_same(ckpt.optimizer[fqn][state].read(), value, f"{fqn} {state}")


@pytest.mark.parametrize("name", [n for n in ALL if CASES[n].extra])
def test_extra_is_what_was_saved_beside(name: str, corpus: Corpus) -> None:
    case = corpus[name]
    with ckptmap.open(case.path) as ckpt:
        for key, value in case.spec.extra.items():
            assert ckpt.extra[key] == value


@pytest.mark.parametrize("name", [n for n in ALL if CASES[n].opaque])
def test_foreign_classes_are_shown_inert(name: str, corpus: Corpus) -> None:
    case = corpus[name]
    with ckptmap.open(case.path) as ckpt:
        assert [item.key for item in ckpt.refused] == list(case.spec.opaque)
        assert all(item.droppable for item in ckpt.refused)
        with pytest.raises(
            ckptmap.CkptmapError, match=f"{case.spec.opaque[0]}: an object of unknown class"
        ):
            ckptmap.plan(ckpt, "full", optimizer="drop").require_resolved()
        plan = ckptmap.plan(ckpt, "full", optimizer="drop", drop=case.spec.opaque)
        plan.require_resolved()
        assert plan.dropped[case.spec.opaque[0]] == f"--drop {case.spec.opaque[0]}"


@pytest.mark.parametrize("name", ["torch_nested", "safetensors_plain", "dcp_single_raw_optimizer"])
def test_files_are_closed_with_the_last_reference(name: str, corpus: Corpus) -> None:
    """No cycle holds a checkpoint: a process that converts every hour would run out of files."""
    path = corpus[name].path
    before = os.listdir("/proc/self/fd")
    gc.disable()
    try:
        for _ in range(3):
            ckpt = ckptmap.open(path)
            next(iter(ckpt.values())).read()
            objects = [item.key for item in ckpt.refused]
            ckptmap.plan(ckpt, "full", drop=objects, optimizer="drop")
            del ckpt
        assert len(os.listdir("/proc/self/fd")) == len(before)
    finally:
        gc.enable()


def test_missing_key_names_the_nearest(corpus: Corpus) -> None:
    name = next(n for n in ALL if CASES[n].container == "hf")
    with ckptmap.open(corpus[name].path) as ckpt:
        fqn = next(iter(ckpt))
        with pytest.raises(MissingKeyError, match=f"did you mean '{fqn}'"):
            ckpt[fqn + "s"]
        with pytest.raises(KeyError, match="no tensor"):
            ckpt["nothing.like.it"]
        nameless: Any = 3
        assert ckpt.get(nameless) is None


def test_box_outside_the_tensor_is_refused(corpus: Corpus) -> None:
    name = next(n for n in ALL if CASES[n].container == "hf")
    with ckptmap.open(corpus[name].path) as ckpt:
        lazy = next(lazy for lazy in ckpt.values() if len(lazy.shape) == 2)
        with pytest.raises(ValueError, match="leaves shape"):
            lazy.read((0, 0), (lazy.shape[0] + 1, 1))
        with pytest.raises(ValueError, match="needs 2 offsets"):
            lazy.read((0,), (1,))
        with pytest.raises(IndexError, match="out of range"):
            lazy[lazy.shape[0]]
        with pytest.raises(IndexError, match="step 2"):
            lazy[::2]
        with pytest.raises(ValueError, match="needs 2 offsets"):
            lazy.read((0,))
        for key in (None, [0], True, "x", 1.0, torch.tensor(True), torch.tensor([1])):
            with pytest.raises(TypeError, match=r"index .*, expected int or slice"):
                lazy[key]
        with pytest.raises(IndexError, match="2 indices"):
            lazy[..., ...]


def test_an_index_means_what_it_means_to_a_tensor(corpus: Corpus) -> None:
    name = next(n for n in ALL if CASES[n].container == "dcp")
    with ckptmap.open(corpus[name].path) as ckpt:
        lazy = next(lazy for lazy in ckpt.values() if len(lazy.shape) == 2 and lazy.info.numel > 9)
        whole = lazy.read()
        keys: list[Any] = [..., (..., 0), (0, ...), (..., slice(1, -1)), (slice(1), ..., -1), ()]
        keys += [(0, 1, ...), torch.tensor(1)]
        for key in keys:
            assert torch.equal(lazy[key], whole[key]), key
