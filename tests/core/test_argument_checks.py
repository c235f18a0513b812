"""Python calls refuse arguments that mean nothing with one ckptmap error, before they touch a file."""

from __future__ import annotations

import logging
from collections.abc import Callable
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmap
from ckptmap.errors import CkptmapError
from ckptmap.storage.process_guards import quiet_torchao

pytestmark = pytest.mark.python_texts

Call = Callable[[Path, Any, Any], Any]


def model() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("arguments") / "out"
    net = model()
    ckptmap.save(path, net, torch.optim.AdamW(net.parameters()), step=3).wait()
    (path.parent / "file").write_text("words")
    return path


class Strange:
    """Nothing that a checkpoint holds."""


def endless() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["again"] = found
    return found


LOAD: dict[str, tuple[Call, str]] = {
    "precision": (
        lambda p, m, o: ckptmap.load(p, m, precision="half"),
        "precision='half', expected one of 'keep', 'target', 'fp32'",
    ),
    "random": (lambda p, m, o: ckptmap.load(p, m, random="no"), "random='no', expected one of"),
    "rounding": (lambda p, m, o: ckptmap.load(p, m, rounding="up"), "rounding='up', expected one"),
    "nf4": (lambda p, m, o: ckptmap.load(p, m, nf4="gguf"), "nf4='gguf', expected one of"),
    "seed": (lambda p, m, o: ckptmap.load(p, m, seed="a"), "seed='a', expected an integer"),
    "large seed": (lambda p, m, o: ckptmap.load(p, m, seed=2**70), "expected an integer from -9"),
    "memory": (
        lambda p, m, o: ckptmap.load(p, m, max_memory="64 MB each"),
        "max_memory='64 MB each', expected a size: 64MiB, 2GB or 4096",
    ),
    "no memory": (lambda p, m, o: ckptmap.load(p, m, max_memory=0), "max_memory=0, expected an in"),
    "model": (lambda p, m, o: ckptmap.load(p, m.state_dict()), r"expected a torch\.nn\.Module"),
    "optimizer": (lambda p, m, o: ckptmap.load(p, m, o.state_dict()), "dict is no torch.optim"),
    "another's": (
        lambda p, m, o: ckptmap.load(p, m, torch.optim.AdamW(model().parameters())),
        r"parameter 0 \(4, 4\) is not the model's",
    ),
    "scheduler": (
        lambda p, m, o: ckptmap.load(p, m, o, "cosine"),
        r"scheduler='cosine', expected a scheduler, with load_state_dict\(\)",
    ),
    "the model as its scheduler": (
        lambda p, m, o: ckptmap.load(p, m, o, m),
        r"scheduler=a Sequential, expected a scheduler, with load_state_dict\(\)",
    ),
    "the optimizer as its scheduler": (
        lambda p, m, o: ckptmap.load(p, m, o, {"a": o}),
        r"scheduler=a \w+, expected a scheduler, with load_state_dict\(\)",
    ),
    "a class for an object": (
        lambda p, m, o: ckptmap.load(p, m, o, stateful={"l": torch.nn.Linear}),
        r"stateful\['l'\]: is a type, expected an object with state_dict\(\)",
    ),
    "no path": (lambda p, m, o: ckptmap.load(None, m), "path=None, expected a path"),
    "swapped": (lambda p, m, o: ckptmap.load(m, p), "expected a path"),
    "a file of words": (
        lambda p, m, o: ckptmap.load(p.parent / "file", m),
        "file: is text, not weights: it begins .words.",
    ),
    "no parameters": (
        lambda p, m, o: ckptmap.load(p, torch.nn.ReLU()),
        r"4 unexpected: 0\.weight",
    ),
}

SAVE: dict[str, tuple[Call, str]] = {
    "over": (
        lambda p, m, o: ckptmap.save(p, m).wait(),
        "exists; .* replace it with overwrite=True",
    ),
    "over a file": (
        lambda p, m, o: ckptmap.save(p.parent / "file", m, overwrite=True).wait(),
        "overwrite=True replaces checkpoints only",
    ),
    "no path": (lambda p, m, o: ckptmap.save(None, m), "path=None, expected a path"),
    "model": (lambda p, m, o: ckptmap.save(p, m.state_dict()), r"expected a torch\.nn\.Module"),
    "scheduler": (
        lambda p, m, o: ckptmap.save(p, m, o, Strange()),
        r"expected a scheduler, with state_dict\(\)",
    ),
    "the model as its scheduler": (
        lambda p, m, o: ckptmap.save(p.parent / "x", m, o, m),
        r"expected a scheduler, with state_dict\(\)",
    ),
    "a class of schedulers": (
        lambda p, m, o: ckptmap.save(p.parent / "x", m, o, torch.optim.lr_scheduler.StepLR),
        r"expected a scheduler, with state_dict\(\)",
    ),
    "a model among the values": (
        lambda p, m, o: ckptmap.save(p.parent / "x", m, extra={"a": m}),
        r"extra\.a: Sequential\( \(0\): Linear[^\n]* cannot be written; pass tensors and plain values",
    ),
    "step": (lambda p, m, o: ckptmap.save(p, m, step="three"), "step='three', expected an integer"),
    "half a step": (lambda p, m, o: ckptmap.save(p, m, step=3.5), "step=3.5, expected an integer"),
    "two steps": (
        lambda p, m, o: ckptmap.save(p, m, step=3, extra={"step": 4}),
        r"extra\['step'\]=4, expected nothing: step= says it",
    ),
    "extra": (lambda p, m, o: ckptmap.save(p, m, extra=[1]), r"extra=\[1\], expected a dict"),
    "a key": (
        lambda p, m, o: ckptmap.save(p, m, extra={"a": {(1, 2): 3}}),
        r"extra\['a'\] key=\(1, 2\), expected a string or an integer",
    ),
    "an object": (
        lambda p, m, o: ckptmap.save(p.parent / "x", m, extra={"a": Strange()}),
        r"extra\.a: .*Strange.* cannot be written; pass tensors and plain values",
    ),
    "endless": (lambda p, m, o: ckptmap.save(p, m, extra=endless()), "at most 100 dicts and lists"),
    "replicas": (lambda p, m, o: ckptmap.save(p, m, replicas="all"), "replicas='all', expected"),
}

IN_MEMORY: dict[str, tuple[Call, str]] = {
    "like and to": (
        lambda p, m, o: ckptmap.translate(m.state_dict(), like=m, to="hf"),
        "to='hf', expected nothing beside like=",
    ),
    "encoding": (
        lambda p, m, o: ckptmap.translate(m.state_dict(), encoding="int3"),
        "encoding='int3', expected one of",
    ),
    "no dict": (lambda p, m, o: ckptmap.translate([1]), r"state_dict=\[1\], expected a dict of"),
    "keys": (
        lambda p, m, o: ckptmap.translate({1: torch.ones(1)}),
        "state_dict key=1, expected a name",
    ),
    "like": (lambda p, m, o: ckptmap.translate({}, like={}), r"like=\{\}, expected a torch"),
    "hooks": (lambda p, m, o: ckptmap.hooks.install(None), r"model=None, expected a torch"),
    "hooks' optimizer": (
        lambda p, m, o: ckptmap.hooks.install(model(), o),
        "parameter 0 .* is not the model's",
    ),
}

FILES: dict[str, tuple[Call, str]] = {
    "open": (lambda p, m, o: ckptmap.open(None), "path=None, expected a path"),
    "dst": (lambda p, m, o: ckptmap.convert(p, None, "hf"), "dst=None, expected a path"),
    "to": (lambda p, m, o: ckptmap.convert(p, p / "x", None), "to='None' is not a setup"),
    "scales": (
        lambda p, m, o: ckptmap.plan(p, "hf-nf4", exact_scales=7),
        "exact_scales=7, expected a pattern of names, or a list of them",
    ),
    "world size": (
        lambda p, m, o: ckptmap.plan(p, "fsdp2", world_size="2"),
        "world_size='2', expected an integer",
    ),
    "optimizer": (
        lambda p, m, o: ckptmap.plan(p, "full", optimizer="dorp"),
        "optimizer='dorp', expected one of 'keep', 'drop'",
    ),
    "shard size": (
        lambda p, m, o: ckptmap.plan(p, "hf", max_shard_nbytes="5 GiG"),
        "max_shard_nbytes='5 GiG', expected a size: 64MiB, 2GB or 4096",
    ),
    "mesh": (
        lambda p, m, o: ckptmap.plan(p, "fsdp2", mesh={"shard": 2}),
        r"mesh=\{'shard': 2\}, expected a string",
    ),
    "like": (lambda p, m, o: ckptmap.plan(p, "full", like=m), "like=.*, expected a path"),
    "digest": (
        lambda p, m, o: ckptmap.convert(p, p.parent / "x", "hf", digest="md5"),
        "digest='md5', expected one of",
    ),
    "threads": (
        lambda p, m, o: ckptmap.convert(p, p.parent / "x", "hf", threads="all"),
        "threads='all', expected an integer",
    ),
    "progress": (
        lambda p, m, o: ckptmap.convert(p, p.parent / "x", "hf", progress=3),
        "progress=3, expected True, False or a function",
    ),
    "pull": (lambda p, m, o: ckptmap.pull(None, p / "x"), "src=None, expected a path"),
    "push": (lambda p, m, o: ckptmap.push(b"x", "org/name"), "src=b'x', expected a path"),
    "push to": (lambda p, m, o: ckptmap.push(p, 3), "repo=3, expected a string"),
    "report to": (lambda p, m, o: ckptmap.report(p, to=3.5), "to=3.5, expected a pattern"),
    "plan saved": (lambda p, m, o: ckptmap.plan(p, "full").save([]), r"path=\[\], expected a path"),
    "overwrite": (
        lambda p, m, o: ckptmap.convert(p, p.parent / "x", "hf", overwrite="no"),
        "overwrite='no', expected True or False",
    ),
    "strict": (lambda p, m, o: ckptmap.plan(p, "hf", strict=b"1"), "strict=b'1', expected True"),
    "saved optimizer": (lambda p, m, o: ckptmap.save(p.parent / "y", m, 3.5), "float is no torch"),
    "stateful": (lambda p, m, o: ckptmap.load(p, m, stateful=[1]), "stateful: is a list"),
    "base": (lambda p, m, o: ckptmap.load(p, m, base=3), "base=3, expected a path"),
    "offsets": (
        lambda p, m, o: ckptmap.open(p)["0.weight"].read((0.5, 0), (1, 1)),
        r"0\.weight: offsets=\(0\.5, 0\), expected integers",
    ),
    "device": (
        lambda p, m, o: ckptmap.open(p)["0.weight"].read(device="abacus"),
        "device='abacus': cannot be used here",
    ),
    "meta": (
        lambda p, m, o: ckptmap.open(p)["0.weight"].read(device="meta"),
        "device='meta': cannot be used here",
    ),
    "device of a run": (
        lambda p, m, o: ckptmap.plan(p, to="hf-bf16").execute(p.parent / "x", device="abacus"),
        "device='abacus': cannot be used here",
    ),
}

ALL = {
    f"{room}: {name}": case
    for room, cases in (("load", LOAD), ("save", SAVE), ("memory", IN_MEMORY), ("files", FILES))
    for name, case in cases.items()
}


@pytest.mark.parametrize("name", ALL)
def test_refused(name: str, saved: Path) -> None:
    """By an error of ours with a hint; the model and the folder are as they were."""
    call, text = ALL[name]
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    before = {key: value.clone() for key, value in net.state_dict().items()}
    with pytest.raises(CkptmapError, match=text) as refused:
        call(saved, net, optimizer)
    assert refused.value.code and refused.value.hint and "\n" not in str(refused.value)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert sorted(path.name for path in saved.parent.iterdir()) == ["file", "out"]


def test_one_pattern_is_not_its_letters(saved: Path) -> None:
    """One of which would be `*`: everything."""
    with ckptmap.open(saved) as ckpt:
        one = ckptmap.plan(ckpt, "hf", include="1.*", wrap="ddp,compile")
        assert one.options.include == ("1.*",) and one.options.wrap == ("ddp", "compile")
        assert {step.fqn for step in one.steps} == {"1.weight", "1.bias"}
        listed = ckptmap.plan(ckpt, "hf", include=["1.*"], wrap=["ddp", "compile"])
        assert one.digest == listed.digest


def test_all_scales_are_kept_exactly_by_a_flag(saved: Path) -> None:
    """As on the command line."""
    with ckptmap.open(saved) as ckpt:
        plans = [ckptmap.plan(ckpt, "hf-nf4", exact_scales=given) for given in (True, "*")]
        assert plans[0].options == plans[1].options and plans[0].digest == plans[1].digest
        for none in (False, None):
            assert ckptmap.plan(ckpt, "hf-nf4", exact_scales=none).options.exact_scales == ()


@pytest.mark.skipif(torch.cuda.is_available(), reason="cuda is here")
def test_no_gpu(saved: Path) -> None:
    with ckptmap.open(saved) as ckpt, pytest.raises(CkptmapError, match="device='cuda'") as refused:
        ckpt["0.weight"].read(device="cuda")
    assert refused.value.code == "CKM210" and "doctor" in refused.value.hint


def test_integers_of_other_libraries(tmp_path: Path) -> None:
    import numpy

    ckptmap.save(tmp_path / "out", model(), step=numpy.int64(7)).wait()
    assert ckptmap.load(tmp_path / "out", model()).step == 7


def test_torchao_is_imported_quietly() -> None:
    """Its two lines of every import, and nothing else; outside of ours they are told."""
    torchao, told = logging.getLogger("torchao"), BufferingHandler(capacity=10)
    torchao.addHandler(told)
    try:
        with quiet_torchao():
            torchao.warning("Failed to load /x/_C.so: Could not load this library")
            torchao.warning("real trouble")
            torchao.error("Failed to load /x/_C.so: out of memory")
        torchao.warning("Failed to load again")
    finally:
        torchao.removeHandler(told)
    begun = [record.getMessage()[:14] for record in told.buffer]
    assert begun == ["real trouble", "Failed to load", "Failed to load"]
